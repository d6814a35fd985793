"""How replicas communicate: one small file per algorithm, each a plan made of data."""

from bagua.algorithms.algorithm import Algorithm, BucketInfo, Exchange, find, names, register
from bagua.algorithms.gradient_allreduce import GradientAllreduce

__all__ = [
    "Algorithm",
    "BucketInfo",
    "Exchange",
    "GradientAllreduce",
    "find",
    "names",
    "register",
]
