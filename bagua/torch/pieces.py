"""Parameters that are exchanged between steps: copies of them in arenas of the engine. Where ranks
mirror their neighbors, large ones are exchanged in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bagua.algorithms import Exchange
from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.kinds import Urgency
from bagua.common.process_set import ProcessSet
from bagua.torch.arrays import arena_of, is_at_rest, is_on_device, wait_for_last
from bagua.torch.slot import in_memory_like, view_like

Named = Sequence[tuple[str, torch.Tensor]]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Piece:
    """Values of some parameters, one after another, exchanged together.

    Weights of 16 bits are exchanged in 32. Behind weights stands a 1: ranks that have joined
    contribute zeros, and the average of the ones tells how many have not.
    """

    def __init__(
        self,
        name: str,
        named: Named,
        exchange: Exchange,
        process_set: ProcessSet,
        rounds: int = 0,
    ) -> None:
        self.name = name
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        dtype = wide(self.params[0])
        self._counts_ranks = exchange.what == "weight" and not exchange.mirrors
        peers = "" if exchange.peers == "all" else f"{exchange.peers}:{rounds}:{exchange.seed}"
        # What is kept of each value stays until the next time.
        self._arena, self.flat, self.kept = arena_of(
            self.params[0],
            dtype,
            name=name,
            counts=[p.numel() for p in self.params] + [1] * self._counts_ranks,
            op=exchange.op,
            prescale=1.0,
            postscale=1.0,
            set=process_set._id(),
            priority=0,
            codec=exchange.wire,
            exact_in_nodes=exchange.hierarchical,
            kept=exchange.kept,
            peers=peers,
            background=exchange.when == "background",
        )
        self._begins = list(self._arena.begins)
        self.views = self.views_of(self.flat)
        self._large = [exchange.mirrors and large for large in self._arena.large]
        self._copied: Pairs = []  # this time: parameters, and where the arena has them
        self._handle: Any | None = None
        # Ranks whose values held a NaN or an Inf the last time, as far as this one reduced them.
        self.odd: Sequence[int] = ()

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of memory like the arena's, with the parameters' shapes."""
        return [
            view_like(flat[begin : begin + param.numel()], param)
            for begin, param in zip(self._begins, self.params)
        ]

    def copy_weights(self, to: Sequence[torch.Tensor] | None = None) -> None:
        torch._foreach_copy_(list(self.views if to is None else to), self.params)

    def held(self, flat: torch.Tensor) -> torch.Tensor:
        """Memory like the arena's with what parameters hold when they are set to its values: those
        of 16 bits round them."""
        if all(param.dtype == flat.dtype for param in self.params):
            return flat
        held = flat.clone()
        for view, param in zip(self.views_of(held), self.params):
            view.copy_(view.to(param.dtype))
        return held

    def set_weights(self, values: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self.params, list(values))

    def launch_weights(self, urgency: Urgency) -> None:
        """Starts the exchange of what the parameters are now."""
        self._copied = []
        lent = []
        for slot, (param, view) in enumerate(zip(self.params, self.views)):
            if self._large[slot] and in_memory_like(view, param):
                lent.append((slot, param.detach(), param.data_ptr()))
            else:
                self._copied.append((param, view))
        _copy([(view, param) for param, view in self._copied])
        core.note_written([param for _, param, _ in lent])  # which share the parameters' versions
        core.tell_written()  # now, or who compares versions would take it for somebody else's
        self.launch(urgency, lent)

    def take_weights(self) -> None:
        """Makes the result the parameters."""
        _copy(self._copied)

    def launch(self, urgency: Urgency, lent: Sequence[tuple[int, torch.Tensor, int]] = ()) -> None:
        """Starts the exchange; of these slots not of what is in the arena."""
        if self._counts_ranks:
            self.flat[self._begins[-1]].fill_(1)  # to assign would wait for a device
        self._handle = core.launch_lent(self._arena, urgency, list(lent))

    def done(self) -> bool:
        return self._handle is None or bool(self._handle.poll())

    def reached(self) -> bool:
        """Done, and no stream would have to wait for it."""
        return self._handle is None or bool(self._handle.reached())

    def land_values(self) -> None:
        """Waits until the result is there, though the exchange may go on."""
        if self._handle is not None:
            self._handle.wait_values()

    def land(self) -> None:
        """Waits for the exchange, if any, whose result is then where its values were."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        handle.wait()
        self.odd = handle.odd
        if self._counts_ranks:  # once that is done the share is 1
            at = self._begins[-1]
            if is_on_device(self.flat):
                self.flat /= self.flat[at : at + 1].clone()
            elif (share := float(self.flat[at])) != 1:
                self.flat /= share

    def at_rest(self) -> bool:
        return is_at_rest(self._arena)

    def end(self) -> None:
        """Waits for what is under way, whatever an interrupt has made of this object."""
        wait_for_last(self._arena)
        self._handle = None

    def refuse(self, problem: str) -> None:
        self._arena.refuse(problem)

    def count_steps(self, earlier: int, failures: int) -> None:
        self._arena.count_steps(earlier, failures)


def _copy(pairs: Pairs) -> None:
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


def land_all(pieces: Sequence[Piece]) -> None:
    """Waits for all of them, also after an error, which is raised in the end."""
    errors: list[Exception] = []
    for piece in pieces:
        try:
            piece.land()
        except Exception as error:
            errors.append(error)
    if errors:
        raise_first(errors)


def raise_first(errors: list[Exception]) -> None:
    try:
        raise errors[0]
    finally:
        errors.clear()  # else they and this frame, and who called it, would hold each other


def pieces_of(
    prefix: str,
    named: Named,
    exchange: Exchange,
    process_set: ProcessSet,
    nbytes: float,
    rounds: int,
    keeps_exact: Callable[[str, tuple[int, ...]], bool],
) -> list[Callable[[], Piece]]:
    """What makes pieces of at most so many bytes, of the parameters in order.

    Those of a piece are of one element type, on one device, and all through a codec or all not.
    """
    done: list[tuple[bool, list[tuple[str, torch.Tensor]]]] = []
    filling: dict[Any, tuple[list[tuple[str, torch.Tensor]], int]] = {}
    for name, param in named:
        dtype = wide(param)
        coded = dtype == torch.float32
        exact = exchange.codec == "raw" or keeps_exact(name, tuple(param.shape))
        exact = exact or (not coded and not exchange.mirrors)
        if not exact and not coded:
            raise UsageError(f"{name} is {param.dtype}; codecs carry floats of 32 and 16 bits")
        kind = (dtype, param.device, exact)
        some, filled = filling.get(kind, ([], 0))
        more = param.numel() * dtype.itemsize
        if some and filled + more > nbytes:
            done.append((exact, some))
            some, filled = [], 0
        some.append((name, param))
        filling[kind] = (some, filled + more)
    done += [(kind[-1], some) for kind, (some, _) in filling.items() if some]
    done.sort(key=lambda piece: not piece[0])  # what stays exact is small, and need not wait
    plain = replace(exchange, codec="raw", error_feedback=None)
    return [
        partial(
            Piece, f"{prefix}.{number}", some, plain if exact else exchange, process_set, rounds
        )
        for number, (exact, some) in enumerate(done)
    ]


def wide(param: torch.Tensor) -> torch.dtype:
    """The element type in which values of this parameter are exchanged."""
    if not param.dtype.is_floating_point:
        raise UsageError(f"weights of type {param.dtype} cannot be averaged between steps")
    return torch.float64 if param.dtype == torch.float64 else torch.float32
