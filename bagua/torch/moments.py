"""Moments, and what else the wrapped optimizer keeps, where ranks have stepped by themselves.

Each rank has its own then. Where steps are everybody's from here on all ranks have to go on with
the same, or weights that are equal would part again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua.common.kinds import Sum
from bagua.common.objects import allgather_object
from bagua.common.process_set import ProcessSet
from bagua.torch import ops, safety
from bagua.torch.nested import broadcast_nested

Named = Sequence[tuple[str, torch.Tensor]]

_NUMBERS = (bool, int, float, complex, str, type(None))
_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class _Entry:
    """One thing that is kept of a parameter, as other ranks hear of it."""

    kind: str  # "mean": values that are averaged; "number"; "other"
    dtype: torch.dtype | None = None  # if it is a tensor
    shape: tuple[int, ...] = ()
    is_cpu: bool = True
    value: Any = field(default=None, compare=False)  # of a number

    def made_for(self, param: torch.Tensor) -> Any:
        if self.dtype is None:
            return self.value
        device = torch.device("cpu") if self.is_cpu else param.device
        fill = self.value if self.kind == "number" else 0
        if self.shape == tuple(param.shape):  # in memory as it is, too
            return torch.full_like(param, fill, dtype=self.dtype, device=device)
        return torch.full(self.shape, fill, dtype=self.dtype, device=device)


# All that is kept of a parameter; empty where the optimizer has not stepped it.
_Entries = dict[str, _Entry]


@torch.no_grad()
def settle(
    optimizer: torch.optim.Optimizer, named: Named, name: str, process_set: ProcessSet
) -> None:
    """Makes what is kept of these parameters the same on all ranks.

    Values become the mean over the ranks that have them. Numbers, as counts of steps, are those of
    the first such rank; and so is all of a parameter whose state is not of values and numbers, or
    not alike on such ranks.
    """
    if process_set.size() == 1:
        return
    params = dict(named)
    mine = {of: (_signature(p), _entries(optimizer.state.get(p), p)) for of, p in named}
    everyone = allgather_object(mine, name, process_set)
    means: list[tuple[torch.Tensor, int]] = []
    whole: dict[int, list[str]] = {}  # by who has it, as a place in the set
    for of, (signature, _) in everyone[0].items():
        theirs = [each.get(of, (None, {})) for each in everyone]
        if any(like != signature for like, _ in theirs):
            continue  # of what is frozen each rank may have its own
        holders = [place for place, (_, entries) in enumerate(theirs) if entries]
        if not holders:
            continue
        entries = theirs[holders[0]][1]
        alike = all(theirs[place][1] == entries for place in holders)
        if alike and all(entry.kind != "other" for entry in entries.values()):
            state = optimizer.state[params[of]]
            means += [(tensor, len(holders)) for tensor in _prepared(state, entries, params[of])]
        else:
            whole.setdefault(holders[0], []).append(of)
    _average(means, name, process_set)
    gpu = next((param.device for param in params.values() if param.is_cuda), None)
    for place, some in whole.items():
        root = process_set.ranks[place]
        states = [dict(optimizer.state.get(params[of], {})) for of in some]
        states = broadcast_nested(states, root, gpu, process_set, f"{name}.{place}")
        optimizer.state.update({params[of]: state for of, state in zip(some, states)})


def sample(state: Any) -> torch.Tensor:
    """A number for each tensor that is kept of a parameter, of its first few values."""
    tensors = [value for value in (state or {}).values() if isinstance(value, torch.Tensor)]
    firsts = [safety.of_first(t) for t in tensors if t.layout == torch.strided]
    return torch.tensor(firsts, dtype=torch.int64)


def _signature(param: torch.Tensor) -> tuple[object, ...]:
    return param.dtype, tuple(param.shape)


def _entries(state: Any, param: torch.Tensor) -> _Entries:
    return {what: _entry(what, value, param) for what, value in (state or {}).items()}


def _entry(what: str, value: Any, param: torch.Tensor) -> _Entry:
    if isinstance(value, _NUMBERS):
        return _Entry("number", value=value)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return _Entry("other")
    about = value.dtype, tuple(value.shape), value.is_cpu
    # Torch counts steps in floats without a dimension, and some parameters have none either.
    if value.ndim == 0 and (param.ndim > 0 or what == "step"):
        return _Entry("number", *about, value.item())
    averages = value.is_floating_point() or value.is_complex()
    return _Entry("mean" if averages else "other", *about)


def _prepared(state: Any, entries: _Entries, param: torch.Tensor) -> list[torch.Tensor]:
    """The values that are to be averaged, zeros where there were none; all else is set."""
    lacks = not state
    for what, entry in entries.items():
        if lacks or (entry.kind == "number" and entry.dtype is None):
            state[what] = entry.made_for(param)
        elif entry.kind == "number":
            state[what].fill_(entry.value)
    return [state[what].detach() for what, entry in entries.items() if entry.kind == "mean"]


def _average(means: Sequence[tuple[torch.Tensor, int]], name: str, process_set: ProcessSet) -> None:
    """Makes each tensor the sum over all ranks, divided by this number."""
    wide = [tensor.to(_wide(tensor.dtype)) for tensor, _ in means]
    for is_cpu, where in ((True, "cpu"), (False, "gpu")):
        if alike := [tensor for tensor in wide if tensor.is_cpu == is_cpu]:
            of = f"{name}.mean.{where}"
            ops.grouped_allreduce_(alike, name=of, op=Sum, process_set=process_set)
    for (tensor, count), total in zip(means, wide):
        total.div_(count)
        if total is not tensor:
            tensor.copy_(total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype in _WIDE:
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32
