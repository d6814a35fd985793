"""What became of a job: which rank is to blame, what is said last, and the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bagua.launch.channel import Exit, signal_name
from bagua.launch.output import MPIRUN, STDERR, Output, Screen, say


def culprit(exits: Iterable[Exit]) -> Exit | None:
    """The first that failed for reasons of its own, else the first that failed unbidden.

    A rank that ended because of another one is no culprit while there is a better; one that was
    told to stop merely followed, and is none unless nothing else is known, or it had stood still.
    """
    failures = [exit for exit in exits if exit.failed]
    return min(failures, key=_innocence, default=None)


def _innocence(exit: Exit) -> tuple[bool, bool]:
    return exit.stopped and not exit.halted, exit.peer


@dataclass(frozen=True)
class Verdict:
    """Speaks once, after everything else has been shown."""

    exits: Sequence[Exit]  # in the order in which the ranks ended
    output: Output
    screen: Screen
    mpirun_code: int
    mpirun_said: Sequence[bytes]
    fault_tolerant: bool
    script: bool  # of Python, which may have been written for one process

    def speak(self) -> int:
        """Say how the job ended and return its exit code."""
        first = culprit(self.exits)
        if first is None:
            code = self._ended_by_mpirun()
            if code == 0:
                self._tell_if_alone()
            return code
        if first.stopped and not first.halted:
            return self._ended_by_mpirun() or first.shell_code
        if first.lost:
            self._show_mpirun()
        self.output.show_tail(first.rank)
        say(self.screen, f"bagua-run: {first}{self._none_better() if first.peer else ''}")
        if not self._survived(first):
            return first.shell_code
        say(self.screen, "bagua-run: the surviving ranks went on and ended well")
        return 0

    def _none_better(self) -> str:
        """Why a victim is named after all."""
        early = self._ended_well()
        left = f"; rank {early} had exited with code 0" if early else ""
        return f", and no rank failed for reasons of its own{left}"

    def _ended_by_mpirun(self) -> int:
        """No rank failed by itself: if mpirun did, it has said why."""
        code = self.mpirun_code
        if code == 0:
            return 0
        self._show_mpirun()
        how = f"code {code}" if code > 0 else f"signal {-code} ({signal_name(-code)})"
        early = self._ended_well()
        left = f" after rank {early} had exited with code 0" if early else ""
        say(self.screen, f"bagua-run: mpirun ended the job with {how}{left}")
        return code if code > 0 else 128 - code

    def _tell_if_alone(self) -> None:
        """Whoever forgets init() trains as many models as there are ranks, and all ends well."""
        count = len(self.exits)
        if self.script and count > 1 and not any(exit.began for exit in self.exits):
            say(
                self.screen,
                "bagua-run: no rank has told of a bagua.init(): unless child processes or another"
                f" library connect them, each of the {count} did all of the work by itself",
            )

    def _ended_well(self) -> str:
        return ", ".join(str(exit.rank) for exit in self.exits if not exit.failed)

    def _show_mpirun(self) -> None:
        for data in self.mpirun_said:
            self.output.feed(MPIRUN, STDERR, data)
        self.output.end()

    def _survived(self, first: Exit) -> bool:
        """Whether a fault-tolerant job outlived its first failure and the rest ended well."""
        if not self.fault_tolerant:
            return False
        others = [exit for exit in self.exits if exit is not first]
        survivors = [exit for exit in others if not exit.signal and not exit.lost]
        return bool(survivors) and not any(exit.failed for exit in survivors)
