"""What exchanges weights or their changes, not gradients: everything but when, and what becomes of
the result, which mixing.py, background.py and outer.py say. Backward is left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from bagua.algorithms import Algorithm, BucketInfo, Exchange
from bagua.algorithms.answers import planned
from bagua.common import joined
from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.kinds import Average
from bagua.common.world import world
from bagua.torch import capture, kept, moments, ops
from bagua.torch.agreement import check_hyperparameters, hyperparameters
from bagua.torch.arrays import dtype_name
from bagua.torch.checks import check_parameters
from bagua.torch.driver import Driver
from bagua.torch.names import Names
from bagua.torch.own import is_own
from bagua.torch.pieces import Named, Piece, land_all, pieces_of
from bagua.torch.safety import Seen, alike, checksum_of, warn_of_frozen
from bagua.torch.spoilt import Spoilt
from bagua.torch.standing import Standing

Kept = dict[str, Sequence["torch.Tensor | None"]]
Values = dict[str, dict[str, torch.Tensor]]


class BetweenSteps(Driver):
    """See the module. Gradients add up without our help, in however many passes."""

    _skipped = "the exchange is skipped on all ranks"
    _first_ranks = "weights"  # what is the first rank's where nothing can be taken up

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Names,
        algorithm: Algorithm,
        standing: Standing,
        step: int,
    ) -> None:
        self.algorithm = algorithm
        self._optimizer = optimizer
        self._names = names
        self._process_set = standing.process_set
        self.standing = standing
        self._generation = 0  # of the pieces there are
        self._step = step
        self._settled = 0  # times
        self._root = standing.process_set.ranks[0]  # whose weights all begin with, if it is there
        self._all_params: list[torch.Tensor] = []
        self._required: list[bool] = []
        self._shared: Named = []  # those that are exchanged, in their order
        self._pieces: list[Piece] = []
        self._exchange = Exchange()
        self._loaded = kept.Loaded()
        self._begun = False
        self._seen = Seen()
        self._spoilt = Spoilt(standing, self._skipped)
        self.refresh()

    # ---- called by the optimizer ---------------------------------------------------------------

    def synchronize(self) -> None:
        """The optimizer is about to step."""
        capture.refuse("%r counts its steps on the host", self.algorithm)
        self.standing.check()
        self.refresh()
        if not self._begun:
            self._begin()
        named = [(self._names[param], param) for param in self._all_params]  # its own, too
        self.skips = self._spoilt.gradients(named, self._step)

    def equal_now(self) -> bool:
        """Whether all replicas are."""
        return False

    def stepped(self) -> None:
        """The optimizer has stepped."""
        for piece in self._pieces:
            self._seen.tell(self._step, piece, "the weight", zip(piece.names, piece.params))
        self._step += 1
        self._note(differ=not self.equal_now())

    def refresh(self) -> None:
        """Notices parameters that were added, frozen or thawed since the last look."""
        lists = [group["params"] for group in self._optimizer.param_groups]
        unchanged = core.unchanged(lists, self._all_params, self._required)
        if unchanged or self.standing.withdrawn:
            return
        everything = [p for params in lists for p in params]
        shared = [p for p in everything if p.requires_grad and not is_own(p)]
        named = [(self._names[param], param) for param in shared]
        # If that is an error it is one the next time, too. Who has joined is asked when it is back.
        if len(self._present()) == self._process_set.size():
            check_parameters(named, self.standing.name("parameters"), self._process_set)
        if self._begun:
            self.settle()  # what ranks have learned by themselves is not lost
        lasting = self._values(self._lasting()) if self._begun else {}
        self._land()
        self._build(named)
        if lasting:
            self._restore(lasting)
        for _, param in self._shared:
            if not param.requires_grad:
                param.grad = None  # or this rank would step it once more, and nobody average it
        self._shared = named
        self._all_params, self._required = everything, [p.requires_grad for p in everything]
        self._begun = False

    def settle(self) -> None:
        """All ranks end with one exact average."""
        self.standing.check()
        with torch.no_grad():
            self._drain()
            self._average(self._spoilt.left_out(self.named(), self._step))

    def _average(self, left_out: bool) -> None:
        params = [param.data for piece in self._pieces for param in piece.params]
        where = params[0].device if params else None
        # Less where ranks have joined, whose weights are zeros.
        share = torch.ones(1, dtype=torch.float64, device=where)
        if left_out:
            torch._foreach_zero_([*params, share])
        name, group = self.standing.name("settle"), self._process_set
        ops.grouped_allreduce_([*params, share], name=name, op=Average, process_set=group)
        if share < 1:
            present = group.size() / round(float(share) * group.size())
            # Where parameters share memory it must not be multiplied twice.
            torch._foreach_copy_(params, torch._foreach_mul(params, present))
        self._all_equal()
        self._settled += 1
        self._note(differ=False)

    def _note(self, differ: bool) -> None:
        """For the end of the job: whether ranks may have different weights."""
        unsettled, key = world().unsettled, id(self._optimizer)
        if differ and self._process_set.size() > 1 and self._process_set.rank() == 0:
            unsettled[key] = self.algorithm.name or repr(self.algorithm)
        else:
            unsettled.pop(key, None)

    def hand_over(self) -> None:
        """Steps are everybody's from here on: all ranks end with equal weights and moments."""
        self.refresh()
        self.standing.check()
        named = [(self._names[param], param) for param in self._all_params if not is_own(param)]
        with torch.no_grad():
            self._drain()
            left_out = self._spoilt.left_out(self.named(), self._step)
            for _, param in named if left_out else ():
                self._optimizer.state.pop(param, None)  # no numbers either; those of the others do
            name = self.standing.name("moments")
            moments.settle(self._optimizer, named, name, self._process_set)
            self._average(left_out)

    def close(self) -> None:
        self._land()

    def at_rest(self) -> bool:
        return all(piece.at_rest() for piece in self._pieces)

    def withdraw(self, problem: str) -> None:
        """In the middle of a step."""
        self.standing.withdraw(problem)
        for piece in self._pieces:
            piece.end()

    def _land(self) -> None:
        """Waits for what is under way, without using it."""
        land_all(self._pieces)

    def _drain(self) -> None:
        """Waits for what is under way, and uses it."""
        self._land()

    def _all_equal(self) -> None:
        """All ranks have the same weights now."""

    # ---- its parts -----------------------------------------------------------------------------

    def _build(self, named: Named) -> None:
        """Pieces for these parameters; what was kept of any is lost."""
        self._generation = self.standing.generation()
        params = [param for _, param in named]
        count = sum(param.numel() for param in params)
        dtype = dtype_name(params[0].dtype) if params else "float32"
        prefix = self.standing.name(f"weights.{self._generation}")
        info = BucketInfo(prefix, 0, dtype, count, sum(p.nbytes for p in params))
        with self.standing.planning():
            exchange = planned(self.algorithm, info, world(), self._step)
            makes = pieces_of(
                prefix,
                named,
                exchange,
                self._process_set,
                self._piece_nbytes(exchange),
                self.rounds,
                self.algorithm.keeps_exact,
            )
        with self.standing.laying_out("weights"):
            self._exchange = exchange
            self._pieces = [make() for make in makes]
            self._start_over()

    def _start_over(self) -> None:
        """What is kept beside the pieces, which are new."""

    def _lasting(self) -> Kept:
        """What goes on where they are laid out anew, of the parameters that stay."""
        return {}

    def _forget(self, loaded: dict[str, Any] | None) -> None:
        """All that is kept, but for what all ranks had in common, if this checkpoint has that."""
        self.rounds = 0
        self._build(self._shared)  # who meets whom is counted there

    def _in_common(self) -> list[torch.Tensor]:
        """Beside weights: what must be the same on all ranks."""
        return []

    def _piece_nbytes(self, exchange: Exchange) -> float:
        """What is exchanged at a time, at most, if it is more than one parameter."""
        return float(world().config.bucket_mb * 2**20)

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return [pair for piece in self._pieces for pair in zip(piece.names, piece.params)]

    def _due(self) -> bool:
        """Whether the exchange belongs to the end of the step that was last."""
        return self._step > 0 and self._step % self._exchange.every == 0

    @torch.no_grad()
    def _begin(self) -> None:
        """Before the first step and after loading: from here on the ranks know each other."""
        loaded = self._loaded.state
        mine = kept.identity(self.algorithm, self._process_set, self._names_of_all())
        name = self.standing.name("load_state_dict")
        instead = f", from the first rank's {self._first_ranks}"
        takes = self._loaded.agreed(mine, name, self._process_set, instead=instead)
        self._compare_rules()
        if takes and loaded is not None:
            _, self.rounds = loaded["layout"]
            self._build(self._shared)
            self._restore(loaded["values"])
        else:
            if takes is not None:
                self._forget(loaded if kept.is_of_other_ranks(loaded, mine) else None)
            common = [param.data for piece in self._pieces for param in piece.params]
            common += self._in_common()
            present, name = self._present(), self.standing.name("begin")
            root = self._root if self._root in present else present[0]
            ops.grouped_broadcast_(common, root, name=name, process_set=self._process_set)
            self._all_equal()
        frozen = [p for p in self._all_params if not (p.requires_grad or is_own(p))]
        named = [(self._names[param], param) for param in frozen]
        warn_of_frozen(named, self.standing.name("frozen"), self._process_set)
        self._loaded.take()
        self._begun = True

    def _present(self) -> list[int]:
        """The ranks that have not joined."""
        return joined.present(self.standing.name("present"), self._process_set)

    def _compare_rules(self) -> None:
        """Tells which ranks step by another learning rate, or whatever else there is."""
        rules = checksum_of(repr(hyperparameters(self._optimizer)))
        name, group = self.standing.name("rules"), self._process_set
        if not alike(rules, f"{name}.alike", group):
            check_hyperparameters(self._optimizer, self.algorithm, name, group)

    def _names_of_all(self) -> list[str]:
        return sorted(name for piece in self._pieces for name in piece.names)

    # ---- what is kept from step to step --------------------------------------------------------

    def _kept(self) -> Kept:
        """By name: where each piece that has it has it, in memory like its arena."""
        return {
            f"kept.{i}": [piece.kept[i] if piece.kept else None for piece in self._pieces]
            for i in range(self._exchange.kept)
        }

    def state(self) -> dict[str, Any] | None:
        if self._loaded.state is not None or not self._begun:
            return self._loaded.state  # before it has begun there is nothing of its own
        mine = kept.identity(self.algorithm, self._process_set, self._names_of_all())
        values = self._values(self._kept())
        return {"identity": mine, "layout": self._layout(), "values": values}

    def _values(self, kept_now: Kept) -> Values:
        """Copies, by name."""
        return {
            what: {
                name: view.clone()
                for piece, flat in zip(self._pieces, flats)
                if flat is not None
                for name, view in zip(piece.names, piece.views_of(flat))
            }
            for what, flats in kept_now.items()
        }

    def _layout(self) -> tuple[int, int]:
        """What is the same on all ranks: steps, and exchanges."""
        return self._step, self.rounds

    def load_state(self, loaded: dict[str, Any] | None, step: int) -> None:
        """It is taken up before the next step, where all ranks are."""
        with contextlib.suppress(UsageError):  # of what is not used any more
            self._land()
        self._expect(loaded, step)

    def _expect(self, loaded: dict[str, Any] | None, step: int) -> None:
        self._loaded.come(loaded)
        self._step, self._begun = step, False

    @property
    def state_due(self) -> bool:
        """Whether ranks agree on what they have loaded, before the next step."""
        return not self._begun

    @property
    def place(self) -> object:
        """What ranks must have in common, but their steps and rounds."""
        return self._generation, self._begun, self._settled

    def begin_from(self, root: int) -> None:
        """Before the first step: with whose weights."""
        self._root = root

    def go_to(self, step: int, rounds: int, state_due: bool) -> None:
        """As all ranks do."""
        if state_due:
            self._land()
        self._step, self.rounds, self._begun = step, rounds, not state_due

    def _restore(self, values: Values) -> None:
        for what, flats in self._kept().items():
            for piece, flat in zip(self._pieces, flats):
                if what not in values or flat is None:
                    continue  # what it has not, began with this run's algorithm
                for name, view in zip(piece.names, piece.views_of(flat)):
                    if name in values[what]:
                        view.copy_(values[what][name])
