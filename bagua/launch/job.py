"""One run of mpirun: shows what the ranks print, and ends them all when one fails."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from typing import IO

from bagua.launch.channel import INTERRUPT, KILL, TERMINATE, Exit, Link, Listener, signal_name
from bagua.launch.input import Input
from bagua.launch.output import MPIRUN, STDERR, STDOUT, Output, Screen, say
from bagua.launch.plan import Plan
from bagua.launch.verdict import Verdict

_TICK_S = 0.05
# Ranks that were told to stop take at most ten seconds (see rank.py); mpirun then has to leave too.
_STOP_S = 12.0
_KILL_S = 3.0
_LEAVE_S = 5.0
# Once a rank has ended because of another one, that one has so long to show itself.
_GRACE_S = 3.0
# Ranks that all stand still when the others have ended are given so long to go on.
_HALT_S = 5.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job:
    """`run()` it once."""

    def __init__(
        self, plan: Plan, output: Output, screens: dict[str, Screen], *,
        fault_tolerant: bool, verbose: bool, start_timeout_s: float, interfaces: str,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._output = output
        self._screens = screens
        self._fault_tolerant = fault_tolerant
        self._verbose = verbose
        self._start_timeout_s = start_timeout_s
        self._listener = Listener(plan.remote, interfaces)
        self._selector = selectors.DefaultSelector()
        self._input = Input(self._selector)
        self._links: list[Link] = []
        self._exits: dict[int, Exit] = {}  # in the order in which the ranks ended
        self._signals: list[int] = []
        self._order: bytes | None = None  # the latest order to stop, for ranks that report late too
        self._escalation: list[tuple[float, int]] = []  # (when, signal) for mpirun, soonest first
        self._grace_ends = float("inf")
        self._halt_ends = float("inf")
        self._trouble = ""  # why the job was ended other than by a rank or a signal
        self._mpirun_said: list[bytes] = []

    def run(self) -> int:
        """The exit code: the failed rank's, or 0."""
        self._wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        old_wake = signal.set_wakeup_fd(wake_write)
        old = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        old[signal.SIGCHLD] = signal.signal(
            signal.SIGCHLD, lambda *_: None
        )  # merely wakes the loop
        try:
            self._start()
            self._follow()
        except BrokenPipeError:  # whoever read our output has left
            self._kill_now()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 128 + signal.SIGPIPE
        except BaseException:
            self._kill_now()
            raise
        finally:
            self._listener.close()
            signal.set_wakeup_fd(old_wake)
            for number, handler in old.items():
                signal.signal(number, handler)
            os.close(self._wake)
            os.close(wake_write)
        self._output.end()
        return self._verdict()

    def _start(self) -> None:
        environment = {**os.environ, **self._plan.environment, **self._listener.variables}
        if self._screens[STDERR].is_tty and "COLUMNS" not in os.environ:  # for progress bars
            width = os.get_terminal_size(2).columns - len(f"[{self._plan.rank_count}] ")
            if width > 20:  # some terminals have none
                environment["COLUMNS"] = str(width)
        self._mpirun = subprocess.Popen(
            self._plan.command,
            env=environment,
            stdin=subprocess.DEVNULL,  # rank 0 gets ours over its link
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us, who tell the ranks in good order
        )
        for file, data in (
            (self._listener.sock, self._accept),
            (self._wake, self._woken),
            (self._mpirun.stdout, self._hear_mpirun),
            (self._mpirun.stderr, self._hear_mpirun),
        ):
            self._selector.register(file, selectors.EVENT_READ, data)  # type: ignore[arg-type]
        self._start_deadline = time.monotonic() + self._start_timeout_s

    def _follow(self) -> None:
        """Until mpirun has ended and every link has closed."""
        waiting = False
        ended_at = float("inf")
        while True:
            now = time.monotonic()
            ended = self._mpirun.poll() is not None
            ended_at = min(ended_at, now) if ended else ended_at
            deadline = min(self._start_deadline, self._grace_ends, self._halt_ends)
            busy = waiting or ended or self._escalation or deadline < float("inf")
            events = self._selector.select(_TICK_S if busy else None)
            for key, _ in events:
                key.data(key.fileobj)
            waiting = self._output.show_waiting()
            self._check_start()
            self._check_grace()
            self._check_halt()
            self._escalate()
            if ended and not events and (not self._open_links() or now - ended_at > _KILL_S):
                return

    def _open_links(self) -> list[Link]:
        return [link for link in self._links if link.exit is None]

    def _accept(self, _: object) -> None:
        sock, _address = self._listener.sock.accept()
        sock.settimeout(5.0)
        link = Link(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda _: self._hear(link))

    def _hear(self, link: Link) -> None:
        frames = link.frames()
        if frames is None:
            self._drop(link)
            if link in self._links and link.exit is None:
                link.exit = Exit(link.rank, link.host, lost=True, stopped=self._order is not None)
                self._note(link.exit)
            return
        for kind, payload in frames:
            if kind == b"H":
                if not link.greet(payload, self._listener.token):
                    self._drop(link)
                    return
                self._links.append(link)
                if self._order:
                    link.order(self._order)
            elif link.rank < 0:
                self._drop(link)
                return
            elif kind == b"X":
                self._note(link.note_exit(payload))
            elif kind == b"R":
                self._input.asked(link)
            elif kind == b"Z":
                say(self._screens[STDERR], f"bagua-run: {link.note_halt(payload)}")
            else:
                self._output.feed(link.rank, STDOUT if kind == b"O" else STDERR, payload)

    def _drop(self, link: Link) -> None:
        if link.sock.fileno() >= 0:
            self._selector.unregister(link.sock)
            link.sock.close()

    def _note(self, exit: Exit) -> None:
        self._exits[exit.rank] = exit
        if exit.failed and not self._fault_tolerant and self._order is None:
            if exit.peer:
                self._grace_ends = min(self._grace_ends, time.monotonic() + _GRACE_S)
            else:
                self._stop(TERMINATE)
        if len(self._exits) == self._plan.rank_count:
            self._end_mpirun(_LEAVE_S)  # after a death it sometimes waits for ever
        # Its wrapper leaves when its link closes. After a failure it stays until all ranks are
        # down: mpirun kills the others, and not their children, once it sees a failed process.
        going_on = self._order is None and self._grace_ends == float("inf")
        if going_on or not self._open_links():
            for link in self._links:
                if link.exit is not None:
                    self._drop(link)

    def _hear_mpirun(self, pipe: IO[bytes]) -> None:
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(pipe)
        elif self._verbose or (
            self._order is None and not any(e.failed for e in self._exits.values())
        ):
            self._output.feed(MPIRUN, STDERR, data)
        else:
            self._mpirun_said.append(data)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.append(number)
        if len(self._signals) > 2:  # perhaps the loop hangs in a write: do not ask it
            self._kill_now()
            os._exit(128 + self._signals[0])

    def _woken(self, fd: int) -> None:
        os.read(fd, 512)
        if len(self._signals) == 1:
            self._stop(INTERRUPT if self._signals[0] == signal.SIGINT else TERMINATE)
        elif self._signals:
            self._stop(KILL)

    def _stop(self, order: bytes) -> None:
        if self._order != order:
            self._order = order
            for link in self._open_links():
                link.order(order)
            # Before its ranks have reported there is only mpirun to stop.
            patience = 0.0 if not self._links else _KILL_S if order == KILL else _STOP_S
            self._end_mpirun(patience)

    def _end_mpirun(self, patience_s: float) -> None:
        now = time.monotonic() + patience_s
        self._escalation = [(now, signal.SIGTERM), (now + _KILL_S, signal.SIGKILL)]

    def _escalate(self) -> None:
        while self._escalation and self._escalation[0][0] <= time.monotonic():
            self._signal_mpirun(self._escalation.pop(0)[1])

    def _check_start(self) -> None:
        present = {link.rank for link in self._links}
        if len(present) >= self._plan.rank_count:
            self._start_deadline = float("inf")
        elif time.monotonic() > self._start_deadline and self._order is None:
            missing = sorted(set(range(self._plan.rank_count)) - present)
            self._trouble = (
                f"{len(missing)} of {self._plan.rank_count} ranks have not started within"
                f" {self._start_timeout_s:g} s: {', '.join(map(str, missing[:16]))}"
                f"{', …' if len(missing) > 16 else ''}; can every host be reached by ssh without a"
                " password, and is --start-timeout long enough?"
            )
            self._stop(KILL)

    def _check_grace(self) -> None:
        if time.monotonic() > self._grace_ends:
            self._grace_ends = float("inf")
            if self._order is None:
                self._stop(TERMINATE)

    def _check_halt(self) -> None:
        """Survivors have ended, and nobody else can make the ranks that stand still do so."""
        left = self._open_links()
        survived = any(exit.peer or not exit.failed for exit in self._exits.values())
        over = survived and left and all(link.halted for link in left)
        if not (over and self._fault_tolerant) or self._order is not None:
            self._halt_ends = float("inf")
            return
        now = time.monotonic()
        self._halt_ends = min(self._halt_ends, now + _HALT_S)
        if now > self._halt_ends:
            ranks = ", ".join(str(link.rank) for link in left)
            text = (
                f"bagua-run: ending rank {ranks}, which a signal has halted: all others have ended"
            )
            say(self._screens[STDERR], text)
            self._stop(KILL)

    def _signal_mpirun(self, number: int) -> None:
        if self._mpirun.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._mpirun.pid, number)

    def _kill_now(self) -> None:
        """A rank's wrapper kills all below it when its link closes; mpirun then has nobody left."""
        self._listener.close()
        for link in self._links:
            link.order(KILL)
            link.sock.close()
        if hasattr(self, "_mpirun"):
            deadline = time.monotonic() + _KILL_S
            while self._mpirun.poll() is None and time.monotonic() < deadline:
                time.sleep(_TICK_S)
            self._signal_mpirun(signal.SIGKILL)
            self._mpirun.wait()

    def _verdict(self) -> int:
        """Say what became of the job, last of all."""
        screen = self._screens[STDERR]
        if self._trouble:
            say(screen, f"bagua-run: {self._trouble}")
            return 1
        if self._signals:
            say(screen, f"bagua-run: stopped by {signal_name(self._signals[0])}")
            return 128 + self._signals[0]
        return Verdict(
            list(self._exits.values()),
            self._output,
            screen,
            mpirun_code=self._mpirun.returncode,
            mpirun_said=self._mpirun_said,
            fault_tolerant=self._fault_tolerant,
            script=self._plan.script,
        ).speak()
