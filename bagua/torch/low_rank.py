"""Gradients of matrices averaged as products of two thin ones (PowerSGD)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from bagua.algorithms import Exchange
from bagua.common.core import core
from bagua.common.errors import BaguaError, UsageError
from bagua.common.kinds import Urgency
from bagua.common.process_set import ProcessSet
from bagua.torch.arrays import is_on_device
from bagua.torch.buckets import Bucket
from bagua.torch.pieces import Piece
from bagua.torch.slot import Slot

_LEAST = -126  # of the exponents of normal numbers


class LowRankBucket(Bucket):
    """G + e ~ P Q': P = (G + e) Q, averaged and made orthonormal; Q = (G + e)' P, averaged.

    Of each slot two things are kept: e, what the product has lost, and Q, where the next step
    begins. The arena only gathers gradients and gives results. P and Q lie row by row, as their
    transposes: thin matrices are multiplied many times faster that way.
    """

    transforms = True
    replicated = True

    def _prepare(self, exchange: Exchange, process_set: ProcessSet) -> None:
        self.own_residuals = 2
        rank = exchange.low_rank
        self._wholes: list[torch.Tensor] = []  # G + e, while it travels
        self._bases: list[torch.Tensor] = []  # P made orthonormal
        self._firsts: dict[int, torch.Tensor] = {}  # by the slot's number: where Q begins
        tall, wide = [], []
        for slot in self.slots:
            rows, columns = slot.view.shape[0], slot.view[0].numel()
            rank_here = min(rank, rows, columns)
            empty = partial(torch.empty, dtype=torch.float32, device=slot.view.device)
            slot.residuals = [empty(rows, columns), empty(rank_here, columns)]
            self._wholes.append(empty(rows, columns))
            self._firsts[slot.number] = self._first(slot)
            self._bases.append(empty(rank_here, rows))
            tall.append((slot.name, empty(rank_here, rows)))
            wide.append((slot.name, empty(rank_here, columns)))
            self.forget(slot)
        plain = replace(exchange, low_rank=0)
        self._tall = Piece(f"{self.name}.p", tall, plain, process_set)
        self._wide = Piece(f"{self.name}.q", wide, plain, process_set)
        self._refused = ""  # why this rank does not go on after P

    def forget(self, slot: Slot) -> None:
        lost, factor = slot.residuals
        lost.zero_()
        factor.copy_(self._firsts[slot.number])

    @staticmethod
    def _first(slot: Slot) -> torch.Tensor:
        """The same on every rank, and another one for every parameter."""
        factor = slot.residuals[1]
        generator = torch.Generator().manual_seed(slot.number)
        drawn = torch.empty(factor.shape, dtype=torch.float32, device="cpu")
        return drawn.normal_(generator=generator).to(factor.device)

    def count_steps(self, earlier: int, failures: int) -> None:
        super().count_steps(earlier, failures)
        for piece in (self._tall, self._wide):
            piece.count_steps(earlier, failures)

    @torch.no_grad()
    def start(self, urgency: Urgency) -> None:
        for slot, whole, tall in zip(self.slots, self._wholes, self._tall.views):
            lost, factor = slot.residuals
            torch.add(slot.view.reshape(whole.shape), lost, out=whole)
            torch.matmul(factor, whole.T, out=tall)
        self.arena.count_anew()
        self._tall.launch(urgency)
        self.handle = self._tall

    @torch.no_grad()
    def advance(self) -> None:
        if self.handle is not self._tall:
            return
        self.handle = None
        refused, self._refused = self._refused, ""
        self._tall.land()
        if refused:
            raise UsageError(f"{self.name}: {refused}")
        try:
            self._project()
        except Exception as error:
            with contextlib.suppress(BaguaError):  # the others wait for Q
                self._wide.refuse(f"{type(error).__name__} on this rank: {error}")
            raise
        self._wide.launch(Urgency.WAITED)
        self.handle = self._wide

    def _project(self) -> None:
        parts = zip(self._wholes, self._tall.views, self._bases, self._wide.views)
        for whole, tall, basis, wide in parts:
            # A NaN or an Inf must be seen by who scales losses, and is no direction.
            finite = tall.isfinite().all()
            if is_on_device(tall):  # where the host does not ask
                columns = torch.linalg.qr(torch.where(finite, tall, 0.0).T)[0].T
                basis.copy_(torch.where(finite, columns, torch.nan))
            elif finite:
                core.orthonormalize(basis.copy_(tall))
            else:
                basis.fill_(torch.nan)
            torch.matmul(basis, whole, out=wide)

    @torch.no_grad()
    def _wait(self) -> Sequence[int]:
        self.advance()
        self.handle = None
        self._wide.land()
        parts = zip(self.slots, self._wholes, self._bases, self._wide.views)
        for slot, whole, basis, wide in parts:
            self._expand(basis, wide, whole, slot.residuals[0])
            slot.view.copy_(whole.view(slot.view.shape))
            self._keep(slot, wide)
        return self._tall.odd

    def _keep(self, slot: Slot, wide: torch.Tensor) -> None:
        """Q, for the next step; where some rank had a NaN or an Inf, what it began with.

        P is as large as G times Q: with a Q of G's size it would leave float32 where G does not. By
        a power of two Q loses no bit, and P is the same once it is orthonormal.
        """
        lost, factor = slot.residuals
        most = wide.abs().amax()
        if is_on_device(wide):  # where the host does not ask
            finite = most.isfinite()
            power = torch.ldexp(torch.ones_like(most), (torch.frexp(most)[1] - 1).clamp(_LEAST))
            factor.copy_(torch.where(finite, wide / power, self._firsts[slot.number]))
            lost.masked_fill_(~finite, 0.0)
        elif math.isfinite(most):
            torch.div(wide, 2.0 ** max(math.frexp(most)[1] - 1, _LEAST), out=factor)
        else:
            self.forget(slot)  # it is told once, not for ever

    @staticmethod
    def _expand(
        basis: torch.Tensor, wide: torch.Tensor, whole: torch.Tensor, lost: torch.Tensor
    ) -> None:
        """`whole` becomes the product, and `lost` what that is short of it."""
        if not is_on_device(whole):
            return core.expand(basis, wide, whole, lost)
        mean = torch.matmul(basis.T, wide)
        torch.sub(whole, mean, out=lost)
        whole.copy_(mean)

    def discard(self) -> None:
        kept: list[list[torch.Tensor]] = [[r.clone() for r in s.residuals] for s in self.slots]
        super().discard()
        for slot, before in zip(self.slots, kept):
            for lost, value in zip(slot.residuals, before):
                lost.copy_(value)

    def refuse_rest(self, problem: str) -> None:
        if self.handle is None:
            self.arena.count_anew()
            self._tall.refuse(problem)  # without which nobody comes to the other
        elif self.handle is self._tall:
            self._refused = problem
            self._wide.refuse(problem)

    def at_rest(self) -> bool:
        return self._tall.at_rest() and self._wide.at_rest()

    def end(self) -> None:
        self._tall.end()
        self._wide.end()
        super().end()
