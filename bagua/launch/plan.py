"""From what was asked for to the one command that mpirun is started with."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua.common.config import nearest, variable
from bagua.common.errors import UsageError
from bagua.launch import rank as rank_process
from bagua.launch.flags import Options, flag_environment
from bagua.launch.flavour import Flavour, told
from bagua.launch.hosts import Host, core_count, parse_hosts, read_hostfile, under_scheduler

# What belongs to this host or this login, and what mpirun sets anew for every rank.
_STAYS_HERE = re.compile(
    r"BASH_FUNC_.*|_|PWD|OLDPWD|SHLVL|HOSTNAME|HOST|HOME|USER|LOGNAME|SHELL|MAIL|DISPLAY|LS_COLORS"
    r"|SSH_.*|XDG_.*|DBUS_.*|OMPI_COMM_.*|OMPI_MCA_.*|PMIX_.*|PMI_.*|PRTE_.*|HYDI?_.*|SLURM_.*"
)


@dataclass(frozen=True)
class Plan:
    """One job: how many ranks, the command, and the variables mpirun itself gets."""

    rank_count: int
    remote: bool  # whether ranks may be on other hosts
    script: bool  # whether Python runs it, from a file or a module
    command: list[str]
    environment: dict[str, str]
    notes: list[str]

    def __str__(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join((["env", *variables] if variables else []) + self.command)


def make_plan(options: Options, mpirun: str, flavour: Flavour) -> Plan:
    """Decide everything there is to decide; nothing has been started when this raises."""
    hosts = _hosts(options)
    count = _rank_count(options, hosts)
    remote = any(not host.is_local for host in hosts) or (not hosts and under_scheduler())
    program = _program(options.command, check=not hosts or any(host.is_local for host in hosts))
    words = told(flavour.count, count=count)
    if hosts:
        words += _told_hosts(flavour, hosts)
    notes = list(options.notes)
    if os.geteuid() == 0 and flavour.as_root:
        words += flavour.as_root
        if options.verbose:
            notes.append(f"running as root, so mpirun gets {' '.join(flavour.as_root)}")
    if not hosts and not under_scheduler() and count > core_count() and flavour.oversubscribe:
        words += flavour.oversubscribe
        if options.verbose:
            notes.append(
                f"{count} ranks on {core_count()} cores, so mpirun gets"
                f" {' '.join(flavour.oversubscribe)}"
            )
    words += _binding(options, flavour)
    environment = _ssh(options, flavour, words)
    if remote and (interfaces := _interfaces(options)):
        words += told(flavour.interfaces, all=interfaces, first=interfaces.partition(",")[0])
    if options.fault_tolerant:
        if flavour.fault_tolerant is None:
            raise UsageError(
                f"--fault-tolerant needs Open MPI 5 or MPICH; {mpirun} is {flavour.name}"
            )
        words += flavour.fault_tolerant
    words += _variables(options, flavour, remote)
    words += _split("--mpi-args", options.mpi_args)
    words += _wrapped(program, options, flavour)
    script = _script(program) != ""
    return Plan(count, remote, script, [mpirun, *words], environment, notes)


def _interfaces(options: Options) -> str:
    """As the ranks will read it: separated by commas alone."""
    environment = {**os.environ, **flag_environment(options)}
    names = environment.get(variable("network_interfaces"), "").split(",")
    return ",".join(filter(None, map(str.strip, names)))


def _wrapped(program: list[str], options: Options, flavour: Flavour) -> list[str]:
    flags = [rank_process.FAULT_TOLERANT] if options.fault_tolerant else []
    flags += [rank_process.OWN_GPU] if options.own_gpu else []
    suggested = dict(flavour.suggested)
    if interfaces := _interfaces(options):
        suggested["NCCL_SOCKET_IFNAME"] = f"={interfaces}"
    for name, value in suggested.items():
        flags += [rank_process.SUGGEST, f"{name}={value}"]
    return [sys.executable, "-IS", os.path.abspath(rank_process.__file__), *flags, *program]


def _hosts(options: Options) -> list[Host]:
    if options.hosts and options.hostfile:
        raise UsageError("give -H or --hostfile, not both")
    if options.hosts:
        return parse_hosts(options.hosts)
    return read_hostfile(options.hostfile) if options.hostfile else []


def _rank_count(options: Options, hosts: list[Host]) -> int:
    slots = sum(host.slots for host in hosts)
    if options.num_proc is None:
        if not hosts:
            raise UsageError(
                "how many ranks? Give -np N, or hosts with slots (-H h1:2,h2:2 or --hostfile)"
            )
        return slots
    if hosts and options.num_proc > slots:
        raise UsageError(
            f"-np {options.num_proc} asks for more ranks than the {slots} slots of"
            f" {','.join(map(str, hosts))}; raise the numbers of slots or lower -np"
        )
    return options.num_proc


def _told_hosts(flavour: Flavour, hosts: list[Host]) -> list[str]:
    if "{slots_each}" in flavour.hosts and len({host.slots for host in hosts}) > 1:
        raise UsageError(
            f"{flavour.name} takes equal numbers of slots only, not {','.join(map(str, hosts))};"
            " use --mpi-args='-machinefile FILE' in place of -H and --hostfile"
        )
    return told(
        flavour.hosts,
        hosts=",".join(map(str, hosts)),
        names=",".join(host.name for host in hosts),
        slots_each=hosts[0].slots,
    )


def _binding(options: Options, flavour: Flavour) -> list[str]:
    if options.binding_args:
        return _split("--binding-args", options.binding_args)
    if options.bind_to == "none":
        return list(flavour.unbound)
    return told(
        flavour.bind, bind=flavour.package if options.bind_to == "socket" else options.bind_to
    )


def _split(flag: str, texts: Sequence[str]) -> list[str]:
    """Words, as a shell would find them."""
    words = []
    for text in texts:
        try:
            words += shlex.split(text)
        except ValueError as error:
            raise UsageError(f"{flag} {text}: {str(error).lower()}") from None
    return words


def _ssh(options: Options, flavour: Flavour, words: list[str]) -> dict[str, str]:
    """Adds ssh's arguments to the words, or returns the variable that takes them."""
    arguments = ["-p", str(options.ssh_port)] if options.ssh_port else []
    arguments += ["-i", options.ssh_identity_file] if options.ssh_identity_file else []
    if not arguments:
        return {}
    if flavour.ssh_variable:
        return {flavour.ssh_variable: shlex.join(arguments)}
    words += told(flavour.ssh, ssh=shlex.join(arguments))
    return {}


def _variables(options: Options, flavour: Flavour, remote: bool) -> list[str]:
    """What is set on every rank; other hosts also get this environment, less what belongs here."""
    # Python would hold back the output of a rank, and lose it if the rank is killed.
    given = {} if "PYTHONUNBUFFERED" in os.environ else {"PYTHONUNBUFFERED": "1"}
    given.update(flag_environment(options))
    words: list[str] = []
    for name, value in given.items():
        words += told(flavour.set_variable, name=name, value=value)
    if remote and flavour.pass_variable:
        own = [rank_process.CHANNEL, rank_process.TOKEN]
        for name in own + sorted(os.environ):
            if name not in given and not _STAYS_HERE.fullmatch(name):
                words += told(flavour.pass_variable, name=name)
    return words


def _program(command: list[str], check: bool) -> list[str]:
    """What to run on every rank; a script.py that is no program itself runs with this Python."""
    if not command:
        raise UsageError(
            "what shall run? Give a program after the flags: bagua-run -np 2 python train.py"
        )
    program = command[0]
    if program == "-m":
        if len(command) == 1:
            raise UsageError("flag -m needs the name of a module, as in python -m package.module")
        return [sys.executable, *command]
    if not check:
        return command
    path = Path(program)
    if path.suffix == ".py":
        if not path.is_file():
            raise UsageError(f"there is no script {program}{_neighbour(path)}")
        if "/" not in program or not os.access(program, os.X_OK):
            return [sys.executable, *command]
    if shutil.which(program) is None:
        raise UsageError(_why_not(program))
    script = _script(command)
    if script.endswith(".py") and not Path(script).is_file():
        raise UsageError(f"there is no script {script}{_neighbour(Path(script))}")
    return command


def _script(command: list[str]) -> str:
    """The file that Python runs, or -m; empty if it runs words of the command line, or nothing."""
    program, *rest = command
    if re.fullmatch(r"(.*/)?python[0-9.]*[td]*", program) is None:
        return program if program.endswith(".py") else ""
    words = iter(rest)
    for word in words:
        if not word.startswith("-"):
            return word
        # Letters may share a word: of those that take something, the first takes the rest of it,
        # or the next word.
        found = re.search("[cmWX].*", "" if word.startswith("--") else word, re.DOTALL)
        taking = found.group() if found else ""
        if taking.startswith("m"):
            return "-m"
        if taking.startswith("c") or word == "-":
            return ""
        if len(taking) == 1 or word == "--check-hash-based-pycs":
            next(words, None)
    return ""


def _why_not(program: str) -> str:
    path = Path(program)
    if path.is_dir():
        return f"{program} is a folder, not a program"
    if path.is_file():
        mode = "" if os.access(path, os.X_OK) else f"chmod +x {shlex.quote(program)}"
        # Without a slash it is looked for on PATH alone.
        place = "" if "/" in program else f"write ./{program}"
        remedy = " and ".join(filter(None, (mode, place)))
        return (
            f"{program} is a file but not a program that can be run; {remedy},"
            " or name the interpreter before it"
        )
    if path.name.startswith("python"):
        return f"there is no program {path}; this Python is {sys.executable}"
    return f"there is no program {path}" + _neighbour(path)


def _neighbour(path: Path) -> str:
    folder: Path | None = path.parent if path.parent.is_dir() else None
    return nearest(path.name, [entry.name for entry in folder.iterdir()]) if folder else ""
