"""bagua-run's flags: its own, one for every setting, and those of launchers that people know."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from bagua.common.config import Config, allowed, check_variable, nearest, parse, variable
from bagua.common.errors import UsageError
from bagua.launch.config_file import read_flags
from bagua.launch.familiar import NO_EFFECT, NOT_YET, ONLY

BINDINGS = ("none", "hwthread", "core", "socket", "numa")

# Other names of settings.
_ALIASES = {
    "start_timeout_s": ("--start-timeout",),
    "network_interfaces": ("--network-interface", "--nics"),
    "fusion_mb": ("--fusion-threshold-mb",),
    "stall_warn_s": ("--stall-check-warning-time-seconds",),
    "stall_fail_s": ("--stall-check-shutdown-time-seconds",),
}

# What nobody calls a program, but may write after a switch.
_ANSWERS = ("true", "false", "yes", "no", "on", "off", "1", "0")

# What says what to do with a command line, rather than how to start a job.
_LINE_ONLY = ("--config-file", "-v", "--version", "-h", "--help")


@dataclass
class Options:
    """What the command line says."""

    num_proc: int | None = None
    hosts: str = ""
    hostfile: str = ""
    check_build: bool = False
    version: bool = False
    verbose: bool = False
    dry_run: bool = False
    fault_tolerant: bool = False
    own_gpu: bool = False
    output_filename: str = ""
    prefix_timestamp: bool = False
    ssh_port: str = ""
    ssh_identity_file: str = ""
    bind_to: str = "none"
    mpirun: str = ""
    mpi_args: list[str] = field(default_factory=list)
    binding_args: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)  # NAME or NAME=VALUE, as given to -x
    settings: dict[str, str] = field(default_factory=dict)  # field of Config: the text given
    notes: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def parse_command_line(arguments: Sequence[str]) -> Options:
    """Flags up to the program, or to `--`; those of --config-file come first: the line wins."""
    parser, takes_value = _parser()
    flags, command = _split(arguments, takes_value)
    options = Options(command=command)
    for flag in flags:
        if flag.startswith("--config-file="):
            path = flag.partition("=")[2]
            more, rest = _split(read_flags(path, list(takes_value)), takes_value)
            for word in more:
                if word.partition("=")[0] in _LINE_ONLY:
                    raise UsageError(
                        f"--config-file {path}: {word.partition('=')[0]} belongs on the command "
                        "line; leave it out here"
                    )
            if rest:
                raise UsageError(f"--config-file {path}: {rest[0]!r} is a value too many")
            try:
                parser.parse_args(more, namespace=options)
            except UsageError as error:
                raise UsageError(f"--config-file {path}: {error}") from None
    parser.parse_args(flags, namespace=options)
    return options


def _split(arguments: Sequence[str], takes_value: dict[str, bool]) -> tuple[list[str], list[str]]:
    """The flags, each with its value as `flag=value`, and what follows them."""
    flags: list[str] = []
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return flags, list(arguments[position + 1 :])
        if not word.startswith("-") or word == "-m":  # `-m module` is a program: python -m module
            break
        word = re.sub(r"^-(np?)(\d+)$", r"-\1=\2", word)
        name, equals, _ = word.partition("=")
        if name not in takes_value:
            raise UsageError(f"unknown flag {name}{nearest(name, takes_value)}")
        if takes_value[name] and not equals:
            position += 1
            if position == len(arguments):
                raise UsageError(f"flag {name} needs a value")
            word = f"{name}={arguments[position]}"
        elif not equals and position + 1 < len(arguments):
            _refuse_answer(name, arguments[position + 1])
        flags.append(word)
        position += 1
    return flags, list(arguments[position:])


def _refuse_answer(switch: str, next_word: str) -> None:
    if next_word in _ANSWERS:
        raise UsageError(
            f"{switch} {next_word}: what follows {switch} would be the program; settings that are "
            "on or off are told =true or =false, other switches nothing (a program called "
            f"{next_word} comes after --)"
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _Setting(argparse.Action):
    """Stores a setting as text, checked."""

    def __call__(self, parser: Any, namespace: Any, value: Any, flag: str | None = None) -> None:
        text = self.const if value is None or self.nargs == 0 else value
        if self.dest == "log_level" and text.lower() == "fatal":
            text = "error"
        parse(self.dest, text, f"flag {flag}")
        namespace.settings[self.dest] = text


class _NoEffect(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, flag: str | None = None) -> None:
        if self.const:
            namespace.notes.append(f"{flag} has no effect: {self.const}")


class _Only(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, flag: str | None = None) -> None:
        known, why = self.const
        if value != known:
            raise UsageError(f"{flag} {value} is not in this version: {why}")


class _NotYet(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, flag: str | None = None) -> None:
        raise UsageError(f"{flag} is not in this version: {self.const}")


def _parser() -> tuple[argparse.ArgumentParser, dict[str, bool]]:
    """The parser, and for every flag whether it takes a value."""
    parser = _Parser(
        prog="bagua-run",
        usage="bagua-run [flags] [--] program [arguments]",
        description="Start a program on every rank, show what they print and end them together.",
        epilog="A script given as script.py is run with this Python, and so is -m package.module."
        " On every host Python, the program and the files it needs must lie where they lie here."
        " Rank 0 reads bagua-run's standard input unless that is a terminal; the other ranks read"
        " /dev/null. Where OMP_NUM_THREADS is not set, a rank gets its share of its host's cores.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    _add_job_flags(parser.add_argument_group("job"))
    _add_output_flags(parser.add_argument_group("output"))
    _add_mpi_flags(parser.add_argument_group("hosts and MPI"))
    _add_settings(parser.add_argument_group("settings (also keywords of bagua.init)"))
    for rows, action in ((NO_EFFECT, _NoEffect), (NOT_YET, _NotYet)):
        for flag, has_value, why in rows:
            parser.add_argument(
                flag,
                action=action,
                nargs=None if has_value else 0,
                const=why,
                help=argparse.SUPPRESS,
            )
    for flag, known, why in ONLY:
        parser.add_argument(flag, action=_Only, const=(known, why), help=argparse.SUPPRESS)
    takes_value = {
        name: action.nargs not in (0, "?")  # a switch, and one that may be told =false
        for action in parser._actions
        for name in action.option_strings
    }
    return parser, takes_value


def _add_job_flags(group: Any) -> None:
    group.add_argument(
        "-np", "-n", "--np", "--num-proc", "--nproc_per_node",
        dest="num_proc", type=_count, metavar="N", help="number of ranks",
    )  # fmt: skip
    group.add_argument(
        "-x",
        dest="environment",
        action="append",
        metavar="NAME[=VALUE]",
        help="variable to set or pass on; repeatable",
    )
    group.add_argument(
        "--fault-tolerant",
        action="store_true",
        help="survivors of a dead rank are not ended; they get its PeerError (Open MPI 5, MPICH)",
    )
    group.add_argument(
        "--own-gpu",
        action="store_true",
        help="let a rank see one GPU of its host, as `cuda`: that of its local rank; for programs "
        "that do not choose theirs",
    )
    group.add_argument(
        "--config-file", metavar="FILE", help="flags in YAML, JSON or TOML; the command line wins"
    )
    group.add_argument("--dry-run", action="store_true", help="print the exact command and leave")
    group.add_argument(
        "-cb", "--check-build", action="store_true", help="print what this installation can do"
    )
    group.add_argument("-v", "--version", action="store_true", help="print the version")


def _add_output_flags(group: Any) -> None:
    group.add_argument(
        "--verbose", action="store_true", help="show the command and all that mpirun says"
    )
    group.add_argument(
        "--output-filename",
        "--logdir",
        metavar="DIR",
        help="also write DIR/rank.N/stdout and stderr",
    )
    group.add_argument(
        "--prefix-output-with-timestamp", "--prefix-timestamp", "-prefix-timestamp",
        dest="prefix_timestamp", action="store_true", help="begin every line with the time",
    )  # fmt: skip


def _add_mpi_flags(group: Any) -> None:
    group.add_argument(
        "-H", "--hosts", metavar="H1:2,H2:4", help="hosts and how many ranks each takes"
    )
    group.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="lines of 'host slots=N' or 'host:N'"
    )
    group.add_argument(
        "-p", "--ssh-port", type=_count, metavar="PORT", help="port of ssh on the hosts"
    )
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh")
    group.add_argument(
        "--bind-to", choices=BINDINGS, help="what a rank is bound to (default: none)"
    )
    group.add_argument(
        "--mpirun", metavar="PATH", help="mpirun to use (default: beside this Python, else on PATH)"
    )
    group.add_argument(
        "--mpi-args", action="append", metavar="'ARGS'", help="more arguments for mpirun"
    )
    group.add_argument(
        "--binding-args",
        action="append",
        metavar="'ARGS'",
        help="arguments for mpirun in place of --bind-to",
    )


def _add_settings(group: Any) -> None:
    for setting in fields(Config):
        name = "--" + setting.name.replace("_", "-")
        brackets = (allowed(setting), _shown(setting.default), variable(setting.name))
        help = f"{setting.metadata['help']} [{'; '.join(brackets)}]"
        help = help.replace("%", "%%")
        aliases = _ALIASES.get(setting.name, ())
        if isinstance(setting.default, bool):
            group.add_argument(
                name, action=_Setting, dest=setting.name, nargs="?", const="true",
                metavar="=false", help=help,
            )  # fmt: skip
            no = name.replace("--", "--no-", 1)
            group.add_argument(
                no, action=_Setting, dest=setting.name, nargs=0, const="false",
                help=f"same as {name}=false",
            )  # fmt: skip
        else:
            metavar = "N" if isinstance(setting.default, float) else "TEXT"
            group.add_argument(
                name, *aliases, action=_Setting, dest=setting.name, metavar=metavar, help=help
            )
    group.add_argument(
        "--no-stall-check",
        action=_Setting,
        dest="stall_warn_s",
        nargs=0,
        const="0",
        help="same as --stall-warn-s 0",
    )


def _shown(default: Any) -> str:
    text = (
        str(default).lower()
        if isinstance(default, bool)
        else f"{default:g}"
        if isinstance(default, float)
        else default
    )
    return f"default {text}" if text else "default empty"


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def flag_environment(options: Options) -> dict[str, str]:
    """The variables that the flags ask for."""
    variables = {variable(name): text for name, text in options.settings.items()}
    for word in options.environment:
        name, equals, value = word.partition("=")
        if not name or (not equals and name not in os.environ):
            raise UsageError(
                f"-x {word}: there is no variable {name!r} here to pass on; write -x NAME=VALUE"
            )
        variables[name] = value if equals else os.environ[name]
        check_variable(name, variables[name], f"-x {name}")
    return variables
