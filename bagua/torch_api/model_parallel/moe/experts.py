"""The experts that one rank has."""

from __future__ import annotations

import copy
from typing import Any

import torch

from bagua.torch.own import keep_own


class Experts(torch.nn.Module):
    """Copies of a module, each with rows of its own. Their parameters are this rank's own."""

    def __init__(self, expert: torch.nn.Module, count: int) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(copy.deepcopy(expert) for _ in range(count))
        self.mark()
        # With assign=True there are other tensors.
        self.register_load_state_dict_post_hook(_mark)  # type: ignore[no-untyped-call]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(experts, rows, width) -> the same."""
        return torch.stack([expert(part) for expert, part in zip(self.experts, rows.unbind(0))])

    def mark(self) -> None:
        tensors = [*self.parameters(), *self.buffers()]
        for tensor in tensors:
            tensor.expert = True  # type: ignore[attr-defined]  # as in Bagua: scripts look for it
        keep_own(tensors, of_mean=True)

    # Copying, loading a saved model and moving it to a device make other tensors, too.

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.mark()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.mark()
        return result


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether it is an expert's, and so on one rank only."""
    return bool(getattr(param, "expert", False))


def _mark(experts: Any, incompatible_keys: Any) -> None:
    experts.mark()
