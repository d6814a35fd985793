"""A mixture of experts that are spread over the ranks. See `layer.py`."""

from bagua.torch_api.model_parallel.moe.experts import Experts, is_moe_param
from bagua.torch_api.model_parallel.moe.gate import Routing, TopKGate
from bagua.torch_api.model_parallel.moe.layer import MoE

__all__ = ["Experts", "MoE", "Routing", "TopKGate", "is_moe_param"]
