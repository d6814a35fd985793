"""The command bagua-run."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Sequence

from bagua.common.config import Config, give_home, parse
from bagua.common.errors import UsageError
from bagua.launch.channel import checked_interfaces
from bagua.launch.check_build import report
from bagua.launch.flags import Options, parse_command_line
from bagua.launch.flavour import detect, find_mpirun
from bagua.launch.job import Job
from bagua.launch.output import Output, Screen, standard_screens
from bagua.launch.plan import make_plan
from bagua.version import __version__

USAGE_CODE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run bagua-run's command line and return its exit code."""
    give_home()
    try:
        return _run(parse_command_line(sys.argv[1:] if arguments is None else arguments))
    except UsageError as error:
        print(f"bagua-run: {error}", file=sys.stderr)
        return USAGE_CODE
    except BrokenPipeError:  # whoever read what we print has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        print(
            f"bagua-run: {error.strerror}: this shell allows {most} in a process (ulimit -n), and "
            "a job needs some for itself and for each rank; allow more, as by ulimit -n 1024",
            file=sys.stderr,
        )
        return USAGE_CODE


def _run(options: Options) -> int:
    if options.version:
        print(f"bagua-run {__version__}")
        return 0
    if options.check_build:
        text, fit = report(options.mpirun)
        print(text)
        return 0 if fit else 1
    # Bad settings are told here once, rather than by every rank.
    config = Config.resolve(
        **{name: parse(name, text, name) for name, text in options.settings.items()}
    )
    mpirun = find_mpirun(options.mpirun)
    plan = make_plan(options, mpirun, detect(mpirun))
    for note in plan.notes:
        print(f"bagua-run: {note}", file=sys.stderr)
    if options.dry_run:
        print(plan)
        return 0
    if options.verbose:
        print(f"bagua-run: {plan}", file=sys.stderr, flush=True)
    checked_interfaces(config.network_interfaces)
    screens = standard_screens()
    job = Job(
        plan,
        _output(options, plan.rank_count, screens),
        screens,
        fault_tolerant=options.fault_tolerant,
        verbose=options.verbose,
        start_timeout_s=config.start_timeout_s,
        interfaces=config.network_interfaces,
    )
    return job.run()


def _output(options: Options, rank_count: int, screens: dict[str, Screen]) -> Output:
    folder = options.output_filename
    try:
        if folder:
            os.makedirs(folder, exist_ok=True)
        return Output(rank_count, screens, timestamp=options.prefix_timestamp, folder=folder)
    except OSError as error:
        raise UsageError(f"--output-filename {folder}: {error.strerror}") from None
