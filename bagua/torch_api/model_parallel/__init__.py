"""Models of which every rank has another part."""

from bagua.torch_api.model_parallel import moe

__all__ = ["moe"]
