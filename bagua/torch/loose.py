"""Gradients that do not fit a bucket: sparse ones, and those of a compressor of the user's own.

Each travels by itself, under its parameter's name.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch

from bagua.common.errors import BaguaError
from bagua.common.kinds import Kind, ReduceOp
from bagua.common.requests import counted, refuse_quietly
from bagua.torch import ops
from bagua.torch.bucket_plan import Plan, info_alone
from bagua.torch.buckets import Watch
from bagua.torch.pieces import raise_first
from bagua.torch.slot import Slot


class Loose:
    """The parameters of one optimizer whose gradients travel alone."""

    def __init__(self, plan: Plan, compression: Any) -> None:
        self._plan = plan
        self._compression = compression
        # A compressor that is more than a cast works tensor by tensor.
        self.wants_all = bool(compression.custom)
        self._slots: dict[torch.Tensor, Slot] = {}
        self._ops: dict[Slot, ReduceOp] = {}  # of the algorithm there is
        self._flying: list[tuple[Slot, Any, Any]] = []
        self._asked = 0  # how many have been started or refused
        # Exchanges in this step before, and passes that have failed so far.
        self.counts = (0, 0)

    def add(self, slot: Slot) -> None:
        self._slots[slot.param] = slot
        if self.wants_all:
            slot.leave()

    def drop(self, param: torch.Tensor) -> None:
        self._slots.pop(param, None)

    def has(self, param: torch.Tensor) -> bool:
        return param in self._slots

    @property
    def averages(self) -> bool:
        return all(self._op_of(slot) == ReduceOp.Average for slot in self._slots.values())

    def sums_again(self) -> bool:
        grads = any(slot.param.grad is not None for slot in self._slots.values())
        return grads and not self.averages

    def launch(self, watch: Watch | None) -> None:
        if watch is not None and self._slots:
            watch("alone", [(slot.name, slot.param) for slot in self._slots.values()])
        for slot in self._slots.values():
            op = self._op_of(slot)
            grad = slot.dense_gradient()
            start: Any = ops.sparse_allreduce_async
            context = None
            if self.wants_all:
                dense = torch.zeros_like(slot.param) if grad is None else grad.detach()
                wire, context = self._compression.compress(dense)
                before, after = self._plan.scales
                start = partial(ops.allreduce_async, prescale_factor=before, postscale_factor=after)
            else:
                is_sparse = grad is not None and grad.is_sparse
                wire = grad if is_sparse else _as_sparse(slot.param, grad)
            self._asked += 1
            with counted(*self.counts):
                handle = start(
                    wire, name=self._name_of(slot), op=op, process_set=self._plan.process_set
                )
            self._flying.append((slot, handle, context))

    def plan_anew(self) -> None:
        """Buckets are laid out anew: algorithms may be others."""
        self._ops.clear()

    def _op_of(self, slot: Slot) -> ReduceOp:
        if slot not in self._ops:
            self._plan.choose(slot)
            info = info_alone(self._name_of(slot), slot.param)
            self._ops[slot] = self._plan.exchange_of(slot, info).op
        return self._ops[slot]

    def _name_of(self, slot: Slot) -> str:
        return f"{self._plan.prefix}.{slot.name}"

    def refuse_rest(self, problem: str) -> None:
        """Other ranks that wait for what was not launched hear why."""
        kind = Kind.ALLREDUCE if self.wants_all else Kind.ALLGATHER
        for slot in list(self._slots.values())[self._asked :]:
            refuse_quietly(kind, self._name_of(slot), self._plan.process_set, problem)
        self._asked = len(self._slots)

    def discard(self) -> None:
        """Waits for what has been launched without using it."""
        for _, handle, _ in self._flying:
            with contextlib.suppress(BaguaError):
                ops.synchronize(handle)
        self._flying, self._asked = [], 0

    def deliver(self) -> None:
        flying, self._flying, self._asked = self._flying, [], 0
        errors: list[Exception] = []
        for slot, handle, context in flying:
            try:
                result = ops.synchronize(handle)
            except BaguaError as error:
                errors.append(error)  # the others are waited for all the same
                continue
            if self.wants_all:
                result = self._compression.decompress(result, context)
            slot.param.grad = result
        if errors:
            raise_first(errors)


def _as_sparse(param: torch.Tensor, grad: Any) -> torch.Tensor:
    """No gradient is a sparse one without entries."""
    if grad is not None:
        return grad.detach().to_sparse(1)
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, tuple(param.shape), check_invariants=False)
