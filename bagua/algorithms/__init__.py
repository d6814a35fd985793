"""How replicas communicate: one small file per algorithm, each a plan made of data."""

from bagua.algorithms.algorithm import Algorithm, BucketInfo, find, names, register
from bagua.algorithms.bytegrad import ByteGrad
from bagua.algorithms.exchange import Exchange
from bagua.algorithms.gradient_allreduce import GradientAllreduce
from bagua.algorithms.topk import TopK

__all__ = [
    "Algorithm",
    "BucketInfo",
    "ByteGrad",
    "Exchange",
    "GradientAllreduce",
    "TopK",
    "find",
    "names",
    "register",
]
