"""One exchange of an optimizer's gradients: everything launched once, waited for, delivered."""

from __future__ import annotations

import contextlib

from bagua.common.errors import BaguaError
from bagua.common.kinds import Urgency
from bagua.torch.bucket_plan import Plan
from bagua.torch.buckets import Bucket
from bagua.torch.checkpointed import Checkpointed
from bagua.torch.layout import Layout
from bagua.torch.loose import Loose
from bagua.torch.own import is_own
from bagua.torch.pieces import raise_first
from bagua.torch.safety import NonFinite, first_not_finite


class Shipment:
    """The buckets of a layout and what travels beside them, from launch to delivery."""

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        loose: Loose,
        checkpointed: Checkpointed,
        watch: NonFinite | None,
    ) -> None:
        self._plan = plan
        self._layout = layout
        self._loose = loose
        self._checkpointed = checkpointed
        self._watch = watch
        self._launched = 0  # buckets, while backward goes on
        self._all_gathered = False
        self._error: Exception | None = None  # of a launch
        self._refused = False  # what was not launched when something failed

    def launch(self, bucket: Bucket) -> None:
        """All of it is there, and backward goes on.

        The last one waits for its end, which is near if there is no other optimizer: a pass that
        raises until then leaves it to be refused, and the other ranks, which cannot go on without,
        do not step.
        """
        self._launched += 1
        if self._launched < len(self._layout.buckets):
            bucket.launch(Urgency.NOW)

    def gather_rest(self) -> None:
        """Fills what is not under way, once; a parameter without a gradient counts as zeros."""
        if self._all_gathered:
            return
        self._all_gathered = True
        try:
            self._checkpointed.take_up()
            self._layout.agree_at_first()
            self._loose.launch(None if self._watch is None else self._watch.look)
            rest = [bucket for bucket in self._layout.buckets if bucket.handle is None]
            # Users may have given one parameter's gradient to another, in another bucket.
            for bucket in rest:
                bucket.look()
            for bucket in rest:
                bucket.fill()
        except Exception as error:
            self.fail(error)

    def launch_rest(self) -> None:
        """Launches what is not under way. What goes wrong is told by `finish`."""
        self.gather_rest()
        if self._error is not None:
            return
        try:
            for bucket in self._layout.buckets:
                if bucket.handle is None:
                    bucket.start(Urgency.WAITED)
            self._ask()
        except Exception as error:
            self.fail(error)

    def _ask(self) -> None:
        """Before anything is waited for, since ranks may come to optimizers in different orders."""
        if self._watch is None or self._watch.asked:
            return
        own = [(self._layout.name_of(p), p) for p in self._layout.params if is_own(p)]
        self._watch.look("own", own)
        self._watch.ask()

    def finish(self) -> str:
        """Launches the rest, waits for everything, delivers.

        Returns what any rank has that is no number; may be empty.
        """
        self.launch_rest()
        errors: list[Exception] = [] if self._error is None else [self._error]
        # Whatever failed: nothing may be in flight when the caller touches gradients again.
        waits = [bucket.advance for bucket in self._layout.buckets]
        waits += [bucket.deliver for bucket in self._layout.buckets]
        for wait in [*waits, self._loose.deliver]:
            try:
                wait()
            except Exception as error:
                errors.append(error)
        # An error of ours is everybody's, and so is one of a launch: nobody looks further.
        shared = self._error is not None or any(isinstance(e, BaguaError) for e in errors)
        found = "" if shared else self._not_finite()
        if shared and self._watch is not None:
            self._watch.settle()
        if errors:
            raise_first(errors)
        return found

    def refuse_rest(self, problem: str) -> None:
        """Other ranks that wait for what was not launched hear why, without waiting for them."""
        if self._refused:
            return
        self._refused = True
        if not self._all_gathered:
            first = self._checkpointed if self._checkpointed.due else self._layout
            first.refuse(problem)
        for bucket in self._layout.buckets:
            with contextlib.suppress(BaguaError):
                bucket.refuse_rest(problem)
        self._loose.refuse_rest(problem)
        if self._watch is not None:
            self._watch.refuse(problem)

    def discard(self) -> None:
        """Waits for what was launched without using it."""
        for bucket in self._layout.buckets:
            if bucket.handle is not None:
                with contextlib.suppress(BaguaError):
                    bucket.discard()
        self._loose.discard()

    def forget(self) -> None:
        """What was begun, also after an error in the middle of it: the next one is another."""
        self._launched = 0
        self._all_gathered = False
        self._error = None
        self._refused = False
        if self._watch is not None:
            self._watch.forget()
        for bucket in self._layout.buckets:
            bucket.handle, bucket.stale = None, False

    def end(self) -> None:
        """After an interrupt in the middle of a step."""
        for bucket in self._layout.buckets:
            bucket.end()
        self._loose.discard()

    def fail(self, error: Exception) -> None:
        """Nothing more is launched; `finish` raises it."""
        self._error = error
        for bucket in self._layout.buckets:
            if bucket.handle is None:
                bucket.take_back()
        self.refuse_rest(f"{type(error).__name__} on this rank: {error}")

    def _not_finite(self) -> str:
        """What any rank has found, in what does not travel, too: a step is for all parameters.

        Where all have given numbers, what they got is looked at, which is the same on all.
        """
        if self._watch is None:
            return ""
        if found := self._watch.agreed():
            return found
        slots = self._layout.slots.values()
        name = first_not_finite([(slot.name, slot.param) for slot in slots])
        if not name:
            return ""
        buckets = self._layout.buckets
        places = {slot.name: bucket.name for bucket in buckets for slot in bucket.slots}
        where = f"{name} ({places.get(name, 'alone')})"
        return f"{where} after the exchange, though not before: a sum or a codec overflows"
