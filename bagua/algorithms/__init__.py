"""How replicas communicate: one small file per algorithm, each a plan made of data."""

from bagua.algorithms.algorithm import Algorithm, BucketInfo, find, names, register
from bagua.algorithms.async_model_average import AsyncModelAverage
from bagua.algorithms.bytegrad import ByteGrad
from bagua.algorithms.decentralized import Decentralized
from bagua.algorithms.exchange import Exchange
from bagua.algorithms.gradient_allreduce import GradientAllreduce
from bagua.algorithms.local_sgd import DiLoCo, LocalSGD
from bagua.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from bagua.algorithms.per_parameter import PerParameter
from bagua.algorithms.powersgd import PowerSGD
from bagua.algorithms.qadam import QAdam
from bagua.algorithms.topk import TopK

__all__ = [
    "Algorithm",
    "AsyncModelAverage",
    "BucketInfo",
    "ByteGrad",
    "Decentralized",
    "DiLoCo",
    "Exchange",
    "GradientAllreduce",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "PerParameter",
    "PowerSGD",
    "QAdam",
    "TopK",
    "find",
    "names",
    "register",
]
