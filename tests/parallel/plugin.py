"""The main pytest process: the marker `ranks`, and one result out of all ranks' reports."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import TerminalRepr  # the type of a traceback that can print itself

from .job import DIRECTORY, ItemResult, Job
from .processes import Layout, count, make_run_ranks, name_of


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "tests over MPI processes")
    group.addoption("--rank-output", action="store_true", help="show the ranks' output as it comes")
    group.addoption(
        "--rank-timeout", type=float, default=60, help="seconds for one test over ranks"
    )
    group.addoption("--hosts", type=int, default=1, help="among which ranks are dealt out")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(*counts, timeout_s=60): run the test on each of these numbers of MPI ranks; a tuple "
        "has those of several hosts, which are network namespaces",
    )
    config.addinivalue_line(
        "markers", "rank_env(NAME='value'): variables of the ranks' environment"
    )
    if directory := os.environ.get(DIRECTORY):
        from .worker import Worker

        config.pluginmanager.register(Worker(Path(directory)), "ranks-worker")
    else:
        config.pluginmanager.register(Jobs(config), "ranks-jobs")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if mark := metafunc.definition.get_closest_marker("ranks"):
        if not mark.args or not all(map(is_layout, mark.args)):
            raise pytest.UsageError(
                f"ranks{mark.args}: give the numbers of ranks, as in ranks(1, 2), or those of each "
                "host, as in ranks((2, 1))"
            )
        if "ranks" not in metafunc.fixturenames:
            metafunc.fixturenames.append("ranks")
        layouts = [spread(n, metafunc.config.getoption("hosts")) for n in mark.args]
        metafunc.parametrize("ranks", layouts, ids=map(name_of, layouts))


def spread(layout: Layout, hosts: int) -> Layout:
    """A number of ranks over so many hosts, if there are enough for all."""
    if hosts == 1 or not isinstance(layout, int) or layout < hosts:
        return layout
    return tuple((layout + host) // hosts for host in reversed(range(hosts)))


def is_layout(given: object) -> bool:
    """A number of ranks, or one for each host."""
    numbers = given if isinstance(given, tuple) and given else (given,)
    return all(isinstance(n, int) and n > 0 for n in numbers)


@pytest.fixture
def run_ranks(tmp_path: Path):
    """run_ranks(layout, source_or_path, *args, timeout_s=60, fault_tolerant=False, env=None)

    For tests that themselves start a program under mpirun, to kill or stop some of its ranks.
    """
    return make_run_ranks(tmp_path)


def layout_of(item: pytest.Item) -> Layout:
    """The ranks that the item runs on; 0 for one that runs in this process."""
    return item.callspec.params["ranks"] if item.get_closest_marker("ranks") else 0  # type: ignore


def env_of(item: pytest.Item) -> dict[str, str]:
    env: dict[str, str] = {}
    for mark in reversed(list(item.iter_markers("rank_env"))):  # the closest one comes first
        env |= mark.kwargs
    return env


def order_of(item: pytest.Item) -> tuple[int, tuple[int, ...], list[tuple[str, str]]]:
    layout = layout_of(item)
    return count(layout), () if isinstance(layout, int) else layout, sorted(env_of(item).items())


class Jobs:
    """Runs the marked items. They are sorted by jobs, so one of those at a time is alive."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.job: Job | None = None
        self.unusable: dict[str, str] = {}  # job: why none like it gets ready

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=order_of)
        on_hosts = [item for item in items if isinstance(layout_of(item), tuple)]
        if on_hosts and (reason := missing_for_hosts()):
            for item in on_hosts:
                item.add_marker(pytest.mark.skip(reason=reason))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        layout = layout_of(item)
        if layout == 0 or (isinstance(layout, tuple) and missing_for_hosts()):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in merged(item, count(layout), self.result(item, layout)):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def result(self, item: pytest.Item, layout: Layout) -> ItemResult:
        env, order = env_of(item), order_of(item)
        kind = repr(order)
        if kind in self.unusable:
            return ItemResult({}, self.unusable[kind])
        if self.job is None or self.job.over or item.nodeid not in self.job.nodeids:
            self.close()
            rest = item.session.items[item.session.items.index(item) :]
            items = [
                (other.nodeid, self.timeout_s(other)) for other in rest if order_of(other) == order
            ]
            try:
                self.job = Job(self.config, layout, items, env)
            except subprocess.CalledProcessError as error:  # of `ip` or `tc`
                self.unusable[kind] = f"hosts could not be made: {error}"
                return ItemResult({}, self.unusable[kind])
        result = self.job.result(item.nodeid)
        if not self.job.ready:
            self.unusable[kind] = result.trouble
        return result

    def timeout_s(self, item: pytest.Item) -> float:
        mark = item.get_closest_marker("ranks")
        return mark.kwargs.get("timeout_s", self.config.getoption("rank_timeout"))  # type: ignore

    def close(self) -> None:
        if self.job is not None:
            self.job.close()
            self.job = None

    def pytest_unconfigure(self) -> None:
        self.close()


@functools.cache
def missing_for_hosts() -> str:
    """Why this machine cannot have hosts; empty if it can."""
    from benchmarks.hosts import missing

    return missing()


class RankTracebacks(TerminalRepr):
    """What went wrong, rank by rank; ranks that failed alike are shown once."""

    def __init__(self, failures: list[tuple[str, Any]]) -> None:
        self.texts: dict[str, tuple[list[str], Any]] = {}
        for label, longrepr in failures:
            self.texts.setdefault(str(longrepr), ([], longrepr))[0].append(label)
        self.reprcrash = next(
            (crash for _, r in failures if (crash := getattr(r, "reprcrash", None))), None
        )

    def toterminal(self, tw: Any) -> None:
        for labels, longrepr in self.texts.values():
            tw.sep("-", ", ".join(labels), bold=True)
            if hasattr(longrepr, "toterminal"):
                longrepr.toterminal(tw)
            else:
                tw.line(str(longrepr))


def as_skipped(longrepr: object) -> object:
    """A skip's (path, line, reason), which has become a list on its way here."""
    return tuple(longrepr) if isinstance(longrepr, list) else longrepr


def merged(item: pytest.Item, n: int, result: ItemResult) -> list[pytest.TestReport]:
    """One report per phase: failed if any rank failed, skipped if all were, else passed."""
    phases = []
    for when in ("setup", "call", "teardown"):
        reports = {
            rank: report
            for rank, of_rank in result.reports.items()
            for report in of_rank
            if report.when == when
        }
        failures = [(f"rank {r} of {n}", rep.longrepr) for r, rep in reports.items() if rep.failed]
        if when == "call" and result.trouble:
            failures.append((f"{n} ranks", result.trouble))
        if not reports and not failures:
            continue
        outcomes = {report.outcome: report for report in reversed(reports.values())}
        like = outcomes.get("failed") or outcomes.get("passed") or outcomes.get("skipped")
        phases.append(
            pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords=dict.fromkeys(item.keywords, 1),
                outcome="failed" if failures else like.outcome,  # type: ignore[union-attr]
                longrepr=RankTracebacks(failures) if failures else as_skipped(like.longrepr),  # type: ignore
                when=when,  # type: ignore[arg-type]
                sections=[
                    (f"rank {rank}: {title}", text)
                    for rank, report in reports.items()
                    for title, text in report.sections
                ],
                duration=max((report.duration for report in reports.values()), default=0),
                **({"wasxfail": like.wasxfail} if hasattr(like, "wasxfail") else {}),
            )
        )
    return phases
