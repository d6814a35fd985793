"""What exchanges of gradients keep from step to step, as a checkpoint has it."""

from __future__ import annotations

from typing import Any

from bagua.algorithms import Algorithm
from bagua.common import together
from bagua.common.warn import warn
from bagua.torch import kept, lost
from bagua.torch.bucket_plan import Plan
from bagua.torch.layout import Layout


class Checkpointed:
    """See the module. What was loaded is taken up in the next exchange, where all ranks are."""

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self._plan = plan
        self._layout = layout
        self._loaded = kept.Loaded()
        # Whether ranks agree on what they have loaded, in the next exchange.
        self.due = self._keeps_something()

    def changed(self, before: Algorithm) -> None:
        """What was lost so far is not, where it still counts."""
        if _residuals_of(before) != _residuals_of(self._plan.algorithm):
            lost.restore(None, self._layout.buckets)
        self.due = self._keeps_something()

    def state(self) -> dict[str, Any] | None:
        if self._loaded.state is not None:
            return self._loaded.state
        if not self._keeps_something():
            return None
        names = [[slot.name for slot in run] for run in self._layout.runs]
        return {
            "identity": self._identity(),
            "layout": (self._plan.step, self._layout.order is None, names),
            "lost": lost.by_name(self._layout.buckets),
        }

    def load(self, loaded: dict[str, Any] | None) -> None:
        self._loaded.come(loaded)
        self.due = self._keeps_something()

    def take_up(self) -> None:
        """The ranks agree whether all can, in the first exchange and after loading."""
        if not self.due:
            self._drop_loaded()
            return
        layout, loaded = self._layout, self._loaded.state
        # Else it is of buckets, and little.
        had_lost = loaded is not None and any((loaded.get("lost") or {}).values())
        loses = lost.something(layout.buckets) or had_lost
        group = self._plan.process_set
        takes = self._loaded.agreed(self._identity(), self._name, group, warns=loses)
        self._loaded.take()
        self.due = False
        if takes and loaded is not None:
            _, learned, names = loaded["layout"]
            if learned:
                layout.order = None
            layout.rebuild_as(names)
            lost.restore(loaded["lost"], layout.buckets)
        elif takes is not None:
            lost.restore(None, layout.buckets)

    def refuse(self, problem: str) -> None:
        """Other ranks that come to `take_up` hear why this one does not."""
        together.refuse(self._name, self._plan.process_set, problem)

    @property
    def _name(self) -> str:
        return f"{self._plan.prefix}.load_state_dict"  # which some ranks may not have called

    def _drop_loaded(self) -> None:
        """Else another algorithm would take it up when it is long out of date."""
        loaded = self._loaded.take()
        if loaded is not None and any((loaded.get("lost") or loaded.get("values") or {}).values()):
            warn(
                f"this checkpoint has what {loaded['identity']['algorithm']} had kept, of which "
                f"{self._plan.algorithm!r} keeps nothing {self._here}: it is dropped"
            )

    @property
    def _here(self) -> str:
        size = self._plan.process_set.size()
        return "where one rank trains alone" if size == 1 else f"on these {size} ranks"

    def _keeps_something(self) -> bool:
        """Codecs whose blocks span parameters give other bits where buckets are laid out anew."""
        buckets = self._layout.buckets
        return lost.something(buckets) or any(bucket.in_blocks for bucket in buckets)

    def _identity(self) -> dict[str, object]:
        plan, layout = self._plan, self._layout
        mine = kept.identity(plan.algorithm, plan.process_set, sorted(layout.by_name))
        if not lost.something(layout.buckets):  # a layout is everybody's
            del mine["rank"], mine["size"], mine["machines"]
        return mine


def _residuals_of(algorithm: Algorithm) -> tuple[object, ...]:
    """What residuals are of; where this differs they mean nothing to each other."""
    return algorithm.what, algorithm.hierarchical, bool(algorithm.momentum_correction)
