"""One rank of a job: runs the items it is told to, writes a report of each, meets the others.

The job's directory holds, for this rank R:
  items.json      in:  node ids, and timeouts in seconds, in the order to run them
  ready.R         out: this rank's pid, once it has collected the items
  I.R.json        out: the reports of item number I
  stacks.R        out: the stacks of all threads, when SIGUSR1 asks for them
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from pathlib import Path

import pytest


class Worker:
    def __init__(self, directory: Path) -> None:
        from mpi4py import MPI  # here: the main process stays without MPI

        self.directory = directory
        items = json.loads((directory / "items.json").read_text())
        self.items = {nodeid: (i, timeout_s) for i, (nodeid, timeout_s) in enumerate(items)}
        self.comm = MPI.COMM_WORLD.Dup()  # tests use the world as they like
        self.rank = self.comm.rank
        self.reports: list[pytest.TestReport] = []
        self.errors: list[str] = []
        self.stacks = (directory / f"stacks.{self.rank}").open("w")
        faulthandler.register(signal.SIGUSR1, file=self.stacks, all_threads=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        collected = {item.nodeid: item for item in items}
        if missing := self.items.keys() - collected.keys():
            raise pytest.UsageError("\n".join([f"not collected: {sorted(missing)}", *self.errors]))
        items[:] = [collected[nodeid] for nodeid in self.items]
        self.write(f"ready.{self.rank}", str(os.getpid()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self.barrier()
        index, timeout_s = self.items[item.nodeid]
        # Should the main process be gone, nobody else would end a rank that hangs.
        faulthandler.dump_traceback_later(3 * timeout_s + 60, exit=True, file=self.stacks)
        result = yield
        serialise = item.config.hook.pytest_report_to_serializable
        reports = [serialise(config=item.config, report=report) for report in self.reports]
        self.reports.clear()
        self.write(f"{index}.{self.rank}.json", json.dumps(reports))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self) -> tuple[str, str, str]:
        return "", "", ""  # the main process shows the progress

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        self.barrier()
        self.comm.Free()
        # The failures are in the reports; for another exit code mpirun would end the other ranks.
        session.exitstatus = 0

    def barrier(self) -> None:
        """Nobody begins an item while another rank is still at the one before."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(0.001)  # a rank that spins would slow those that work

    def write(self, name: str, text: str) -> None:
        """Whoever sees the file sees all of it."""
        partial = self.directory / f"{name}.partial"
        partial.write_text(text)
        partial.replace(self.directory / name)
