"""How replicas communicate, under the names and with the arguments that Bagua gave."""

from bagua.torch_api.algorithms import (
    async_model_average,
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)
from bagua.torch_api.algorithms.algorithm import Algorithm

__all__ = [
    "Algorithm",
    "async_model_average",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "q_adam",
]
