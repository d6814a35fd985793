"""What parameters are called, in messages and by patterns of names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.parameter import is_lazy

from bagua.common.errors import UsageError


class Names(dict[torch.Tensor, str]):
    """By parameter; one that is added later gets a name when somebody asks for it."""

    def __missing__(self, param: torch.Tensor) -> str:
        name = self[param] = f"parameter.{len(self)}"
        return name


def checked_names(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> Names:
    """A name for every parameter of the optimizer, or an error that says which is wrong."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(is_lazy(param) for param in params):
        raise UsageError(
            "the model has parameters without a shape yet: run it forward once before, on all ranks"
        )
    if named_parameters is None:
        return Names({param: f"parameter.{i}" for i, param in enumerate(params)})
    if isinstance(named_parameters, torch.nn.Module):
        raise UsageError("named_parameters should be model.named_parameters(), not the model")
    names = Names()
    taken: dict[str, torch.Tensor] = {}
    for item in named_parameters:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
            raise UsageError(
                "named_parameters should be (name, parameter) pairs, as model.named_parameters() "
                f"gives; got {type(item).__name__}"
            )
        name, param = item
        if taken.setdefault(name, param) is not param:
            raise UsageError(f"named_parameters has two parameters named {name!r}")
        names.setdefault(param, name)
    missing = sum(param not in names for param in params)
    if missing:
        raise UsageError(
            f"named_parameters lacks {missing} of the optimizer's {len(params)} parameters; pass "
            "those of every model it trains, or leave named_parameters out"
        )
    return names
