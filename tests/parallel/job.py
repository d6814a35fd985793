"""A job as the main pytest sees it: n ranks under one mpirun that run a list of items."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from .processes import Layout, MpiProcesses, count, kill, world_command

DIRECTORY = "PYTEST_RANKS_DIRECTORY"  # set in the ranks of a job
START_TIMEOUT_S = 120  # from mpirun to all items collected, in a program that imports torch
EXIT_TIMEOUT_S = 60  # of a program that imports torch, where others have the cores
GRACE_S = 5  # for the other ranks, once one has failed at an item


@dataclass
class ItemResult:
    """Reports of the ranks that finished an item; `trouble` tells why others did not."""

    reports: dict[int, list[pytest.TestReport]]
    trouble: str = ""


class Job:
    def __init__(
        self,
        config: pytest.Config,
        layout: Layout,
        items: list[tuple[str, float]],
        env: dict[str, str],
    ) -> None:
        """`items` are node ids and their timeouts, in the order in which they will be asked for."""
        self.config, self.layout, self.n = config, layout, count(layout)
        self.nodeids = [nodeid for nodeid, _ in items]
        self.timeouts = [timeout_s for _, timeout_s in items]
        self.scratch = tempfile.TemporaryDirectory(prefix="pytest-ranks-")
        self.directory = Path(self.scratch.name)
        (self.directory / "items.json").write_text(json.dumps(items))
        self.output = self.directory / "output"
        self.ready = False
        self.world = contextlib.ExitStack()
        command = self.world.enter_context(world_command(layout))
        with self.output.open("wb") as output:
            self.processes = MpiProcesses.start(
                command + self.pytest_command(),
                None if config.getoption("rank_output") else output,
                {**env, DIRECTORY: str(self.directory)},
            )

    def pytest_command(self) -> list[str]:
        command = [sys.executable, "-m", "pytest", f"--rootdir={self.config.rootpath}"]
        command += ["-c", str(self.config.inipath)] if self.config.inipath else []
        command += [
            "-qq",
            "--no-header",
            "--no-summary",
            f"--tb={self.config.getoption('tbstyle')}",
        ]
        command += [f"--hosts={self.config.getoption('hosts')}"]
        command += ["-p", "no:cacheprovider", "-o", "timeout=0"]
        command += ["--capture=no"] if self.config.getoption("rank_output") else []
        files = [str(self.config.rootpath / nodeid.split("::")[0]) for nodeid in self.nodeids]
        return command + list(dict.fromkeys(files))

    def result(self, nodeid: str) -> ItemResult:
        """Waits for an item. After trouble the job is over, and the next item needs another one."""
        if not self.ready:
            trouble = self.wait_for([f"ready.{rank}" for rank in range(self.n)], START_TIMEOUT_S)
            if trouble:
                return ItemResult({}, f"{self.n} ranks did not get ready: {trouble}")
            self.ready = True
        index = self.nodeids.index(nodeid)
        names = [f"{index}.{rank}.json" for rank in range(self.n)]
        trouble = self.wait_for(names, self.timeouts[index])
        result = ItemResult(self.reports(names), trouble)
        if not trouble and nodeid == self.nodeids[-1]:
            result.trouble = self.wait_for_exit()
        return result

    def wait_for(self, names: list[str], timeout_s: float) -> str:
        """Waits for files of all ranks; returns what went wrong, after having ended the job."""
        deadline = time.monotonic() + timeout_s
        failed_early = False
        while not all((self.directory / name).exists() for name in names):
            if (code := self.processes.wait(0.01)) is not None:
                if all((self.directory / name).exists() for name in names):
                    break
                self.stop()
                return f"the job ended with exit code {code}\n{self.printed()}"
            if not failed_early and self.any_failed(names):
                failed_early = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                after = (
                    f"{GRACE_S} s after another rank had failed"
                    if failed_early
                    else f"{timeout_s:g} s"
                )
                missing = [
                    r for r, name in enumerate(names) if not (self.directory / name).exists()
                ]
                stacks = self.stacks(missing)
                self.stop()
                return f"ranks {missing} were not done after {after}\n{stacks}\n{self.printed()}"
        return ""

    def wait_for_exit(self) -> str:
        """A job whose items all passed must also end well."""
        code = self.processes.wait(EXIT_TIMEOUT_S)
        stacks = self.stacks(list(range(self.n))) if code is None else ""
        self.stop()
        if code == 0:
            return ""
        how = f"exit code {code}" if code is not None else f"no end after {EXIT_TIMEOUT_S} s"
        return f"all items ran, but the job ended with {how}\n{stacks}\n{self.printed()}"

    def any_failed(self, names: list[str]) -> bool:
        reports = self.reports(names).values()
        return any(report.failed for of_rank in reports for report in of_rank)

    def reports(self, names: list[str]) -> dict[int, list[pytest.TestReport]]:
        parse = self.config.hook.pytest_report_from_serializable
        found = {}
        for rank, name in enumerate(names):
            file = self.directory / name
            if name.endswith(".json") and file.exists():
                found[rank] = [
                    parse(config=self.config, data=d) for d in json.loads(file.read_text())
                ]
        return found

    def stacks(self, ranks: list[int]) -> str:
        """Where the ranks are, by their own word; a stopped one says nothing."""
        ready = [self.directory / f"ready.{rank}" for rank in range(self.n)]
        pids = {int(file.read_text()) for file in ready if file.exists()}
        kill(pids.intersection(self.processes.pids()), signal.SIGUSR1)
        files = [self.directory / f"stacks.{rank}" for rank in ranks]
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline and not all(
            f.exists() and f.stat().st_size for f in files
        ):
            time.sleep(0.01)
        time.sleep(0.1)  # for the rest of a stack
        texts = []
        for rank, file in zip(ranks, files):
            stack = file.read_text() if file.exists() else ""
            texts.append(f"--- stacks of rank {rank}\n{stack or '(it did not answer)'}")
        return "\n".join(texts)

    def printed(self) -> str:
        """The end of what mpirun and the ranks printed outside of any test's capture."""
        text = self.output.read_text(errors="replace").strip()
        return f"--- output of the job\n{text[-20000:]}" if text else ""

    def stop(self) -> None:
        self.processes.stop()

    @property
    def over(self) -> bool:
        return self.processes.process.returncode is not None

    def close(self) -> None:
        self.stop()
        self.world.close()
        self.scratch.cleanup()
