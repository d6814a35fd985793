"""Every setting: one dataclass field makes the keyword, the variable, the flag and the help.

Only this module of the library reads the environment; the launcher makes it.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, Union

from bagua.common.errors import UsageError

Value = Union[str, float, bool]

PREFIX = "BAGUA_"

# Variables that are no settings but may stand in the environment: the launcher's link to its ranks
# (removed again before the program starts, but a nested job may see it), and the build's switches.
RESERVED_VARIABLES = (
    "BAGUA_RUN_CHANNEL",
    "BAGUA_RUN_TOKEN",
    "BAGUA_RUN_VERDICT_FD",
    "BAGUA_CUDA",
    "BAGUA_PLACE",
)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")

_SHORTEST = 3  # what is shorter is part of too many names to mean one of them


def _setting(
    default: Value,
    help: str,
    *,
    agree: bool = False,
    choices: tuple[str, ...] = (),
    min: float = -math.inf,
    above: float = -math.inf,
    max: float = math.inf,
    whole: bool = False,
) -> Any:
    """A field and what it takes: `agree` means equal on all ranks, `above` an exclusive minimum."""
    limits = {"choices": choices, "min": min, "above": above, "max": max, "whole": whole}
    return field(default=default, metadata={"help": help, "agree": agree, **limits})


@dataclass(frozen=True)
class Config:
    """The settings of one process: a keyword of `bagua.init`, else a variable, else the default."""

    transport: str = _setting(
        "auto",
        "medium that moves the data: mpi alone, or shm, memory shared inside a machine, with mpi "
        "between machines (auto = shm where the system allows it)",
        agree=True,
        choices=("auto", "shm", "mpi"),
    )
    allreduce: str = _setting(
        "auto",
        "collective that an allreduce uses; after a +, the one that nodes use among themselves",
        agree=True,
        choices=(
            "auto",
            "shared",
            "hierarchical",
            "hierarchical+scatter_reduce",
            "hierarchical+ring",
            "hierarchical+halving",
            "gather_reduce",
            "scatter_reduce",
            "ring",
            "halving",
        ),
    )
    fusion_mb: float = _setting(
        16.0, "at most so many MB of small one-shot requests are fused", agree=True, min=0, max=4096
    )
    bucket_mb: float = _setting(
        10.0,
        "size of a gradient bucket in MB; the first ones are smaller",
        agree=True,
        above=0,
        max=65536,
    )
    overlap: str = _setting(
        "auto",
        "exchange while backward computes; auto: over a network, or with a core to spare",
        choices=("auto", "always", "never"),
    )
    stall_warn_s: float = _setting(
        60.0,
        "warn of what some ranks have not submitted, or not shut down, for so long, and of ranks "
        "that wait for each other after a sixth of it (0 = never)",
        min=0,
    )
    stall_fail_s: float = _setting(
        0.0,
        "fail what some ranks have not submitted, or not shut down, for so long (0 = never)",
        min=0,
    )
    peer_timeout_s: float = _setting(
        5.0, "a rank that leaves a ping unanswered for so long is declared dead (0 = never)", min=0
    )
    start_timeout_s: float = _setting(60.0, "how long init waits for all ranks", above=0)
    spin_us: float = _setting(
        50.0, "how long a waiting thread spins before it sleeps", min=0, max=1e6
    )
    inline_drive: bool = _setting(
        True, "a thread that waits for a handle may drive the engine itself"
    )
    keep_memory: bool = _setting(
        True,
        "memory that is freed stays for the next step, in blocks of less than 32 MB and up to 1 GB "
        "at the end of the heap, instead of going back to the system (glibc, unless its variables "
        "say when to trim or to map)",
    )
    helpers: float = _setting(
        -1.0,
        "threads that help with large reductions and copies while a rank waits (-1 = up to 3, on "
        "spare cores)",
        min=-1,
        max=64,
        whole=True,
    )
    nccl: bool = _setting(
        True, "let NCCL move what is on GPUs, where every rank has it and a GPU", agree=True
    )
    nccl_register: bool = _setting(
        False,
        "register what gradients on GPUs are gathered in with NCCL (2.19 or newer), which then "
        "makes no copies of it where NVLink or the network can do without",
        agree=True,
    )
    allow_shared_gpu: bool = _setting(
        False, "let several ranks use one GPU, which makes none of them faster", agree=True
    )
    carriers: str = _setting(
        "auto",
        "whether on machines without rank 0 one rank carries what the others report; auto: where "
        "more than 32 are carried",
        agree=True,
        choices=("auto", "always", "never"),
    )
    network_interfaces: str = _setting(
        "",
        "interfaces of the control connections, separated by commas (empty = any); bagua-run tells "
        "them MPI and NCCL, too",
    )
    log_level: str = _setting(
        "warning",
        "least important messages to show",
        choices=("trace", "debug", "info", "warning", "error"),
    )
    algorithm: str = _setting(
        "gradient_allreduce",
        "algorithm of a DistributedOptimizer that names none: bytegrad, topk, local_sgd or another "
        "of docs/algorithms.md",
        agree=True,
    )
    check_replicas_every: float = _setting(
        0.0,
        "compare the weights of all ranks every so many steps (0 = never), where an algorithm "
        "keeps them equal",
        agree=True,
        min=0,
        whole=True,
    )
    check_finite: str = _setting(
        "watch",
        "NaN and Inf in gradients: watch for what exchanges see of them, look at all before and "
        "after they are exchanged and report where one came from, or skip the step on all ranks, "
        "too",
        agree=True,
        choices=("off", "watch", "report", "skip"),
    )
    learn_bucket_order: bool = _setting(
        True, "order the buckets by the first backward pass", agree=True
    )

    @classmethod
    def resolve(cls, **keywords: Value) -> Config:
        """Keyword > environment > default; what is unknown or out of range is a `UsageError`.

        >>> Config.resolve(fusion_mb=32).fusion_mb
        32.0
        """
        values: dict[str, Any] = {}
        _refuse_unknown_variables(os.environ)
        for setting in fields(cls):
            text = os.environ.get(variable(setting.name))
            if text is not None:
                values[setting.name] = parse(
                    setting.name, text, f"variable {variable(setting.name)}"
                )
        for name, value in keywords.items():
            if name not in _BY_NAME:
                raise UsageError(f"unknown keyword {name!r}{nearest(name, _BY_NAME)}")
            values[name] = _checked(_BY_NAME[name], value, f"keyword {name}")
        return cls(**values)

    def agreeing(self) -> dict[str, Value]:
        """The settings that must be equal on all ranks, compared at init."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.metadata["agree"]}


_BY_NAME: dict[str, Field[Any]] = {setting.name: setting for setting in fields(Config)}


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def check_variable(name: str, text: str, source: str) -> None:
    """Refuses what a rank would refuse in its environment."""
    _refuse_unknown_variables([name])
    for known in _BY_NAME:
        if variable(known) == name:
            parse(known, text, source)


def parse(name: str, text: str, source: str) -> Value:
    """The value of a setting given as text; `source` names where it came from in the error."""
    setting = _BY_NAME[name]
    if isinstance(setting.default, bool):
        word = text.strip().lower()
        if word not in _TRUE + _FALSE:
            raise _refusal(setting, text, source)
        return word in _TRUE
    if isinstance(setting.default, float):
        try:
            return _checked(setting, float(text), source)
        except ValueError:  # a UsageError is one too: either way the text is what the user gave
            raise _refusal(setting, text, source) from None
    return _checked(setting, text, source)


def allowed(setting: Field[Any]) -> str:
    """What may be said in a setting, in words."""
    if setting.metadata["choices"]:
        return "one of " + ", ".join(setting.metadata["choices"])
    if isinstance(setting.default, bool):
        return "true or false"
    if isinstance(setting.default, str):
        return "text"
    limits = setting.metadata
    words = [f"≥ {limits['min']:g}"] if limits["min"] > -math.inf else []
    words += [f"> {limits['above']:g}"] if limits["above"] > -math.inf else []
    words += [f"≤ {limits['max']:g}"] if limits["max"] < math.inf else []
    number = "a whole number" if limits["whole"] else "a number"
    return " ".join([number, " and ".join(words)]).strip()


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a name misspelt or cut short, or nothing when none is near."""
    by_lower = {other.lower(): other for other in known}
    lower = name.lower()
    found = difflib.get_close_matches(lower, by_lower, n=1, cutoff=0.6)
    if not found and len(name) >= _SHORTEST:
        found = sorted((o for o in by_lower if lower in o), key=lambda o: o.find(lower))
    return f"; did you mean {by_lower[found[0]]!r}?" if found else ""


def check_one_of(what: str, value: Any, known: Iterable[str]) -> None:
    """Refuses a value that is none of these, and says which there are.

    >>> check_one_of("peers", "all", ["all", "ring"])
    """
    known = list(known)
    if value not in known:
        raise UsageError(
            f"{what}={value!r} is unknown; known: {', '.join(known)}{nearest(str(value), known)}"
        )


def _checked(setting: Field[Any], value: Any, source: str) -> Value:
    """The value as the setting's own type, in its range."""
    if isinstance(setting.default, bool):
        if isinstance(value, bool):
            return value
    elif isinstance(setting.default, float):
        limits = setting.metadata
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = float(value)
            inside = limits["min"] <= number <= limits["max"]
            inside = inside and limits["above"] < number < math.inf
            if inside and (number.is_integer() or not limits["whole"]):
                return number
    elif isinstance(value, str):
        return _checked_text(setting, value, source)
    raise _refusal(setting, value, source)


def _checked_text(setting: Field[Any], value: str, source: str) -> str:
    text = value.strip()
    choices = setting.metadata["choices"]
    if choices:
        text = text.lower()
        if text not in choices:
            raise _refusal(setting, value, source, nearest(text, choices))
    elif not text and setting.default:
        raise _refusal(setting, value, source)
    return text


def _refusal(setting: Field[Any], value: object, source: str, hint: str = "") -> UsageError:
    what = "text that is not empty" if allowed(setting) == "text" else allowed(setting)
    return UsageError(f"{source}: {value!r} is not allowed; give {what}{hint}")


def _refuse_unknown_variables(environment: Iterable[str]) -> None:
    known = [variable(name) for name in _BY_NAME]
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and name not in RESERVED_VARIABLES:
            raise UsageError(
                f"unknown variable {name} in the environment{nearest(name, known)}"
                " (bagua-run --help lists every setting)"
            )


def _place() -> str:
    names = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD")
    return " ".join(os.environ.get(name, "") for name in names).strip()


def claim_place() -> None:
    """Notes in the environment that this process is a rank; refuses if its parent is that rank.

    A launcher tells each rank its place by variables, which the children of the rank inherit.
    """
    place = _place()
    if not place:
        return
    claim = f"{os.getpid()} {place}"
    claimed = os.environ.setdefault("BAGUA_PLACE", claim)
    pid, _, theirs = claimed.partition(" ")
    if theirs == place and pid != str(os.getpid()):
        raise UsageError(
            f"this process is a child of process {pid}, which has the place in the job that the "
            "launcher gave; init() belongs into the rank itself, not into a worker of its own"
        )
    os.environ["BAGUA_PLACE"] = claim


def give_home() -> None:
    """Open MPI ends a process that has none, as a service's may."""
    if "HOME" not in os.environ:
        with contextlib.suppress(KeyError):  # of a user whom nobody knows
            os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir


# Settings of Open MPI's that are better than its own, unless somebody has chosen others by the same
# variable or by mpirun's --mca; its parameter files count less than variables. Between machines
# it asks before it sends messages of more than 64 KB, and an answer takes a while where all cores
# compute. Nobody has to be asked for the segments of an exchange: their receives are posted.
# bagua-run sets them, too: a program may start MPI before it comes to us.
OPEN_MPI = {"OMPI_MCA_btl_tcp_eager_limit": "600000"}


# Of a process alone: it has nobody to share memory with, and Open MPI would leave a file of 16 MB
# in /dev/shm that nobody removes.
_OPEN_MPI_ALONE = {"OMPI_MCA_btl": "^sm"}


@contextlib.contextmanager
def suggested() -> Iterator[None]:
    """Sets the above for a while, unless somebody has; no job that this process starts has them."""
    wanted = OPEN_MPI if _place() else OPEN_MPI | _OPEN_MPI_ALONE
    fresh = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(fresh)
    try:
        yield
    finally:
        for name in fresh:
            os.environ.pop(name, None)


def malloc_is_told() -> bool:
    """Whether the user has told glibc, by variables of its own, what to do with freed memory."""
    told = any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"))
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return told or any(f"glibc.malloc.{which}_threshold=" in tunables for which in ("trim", "mmap"))


def nccl_shares_gpu() -> bool:
    """Whether NCCL was told, by a variable of its own, that several ranks may have one GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "") not in ("", "0")


@contextlib.contextmanager
def gloo_told(interface: str, afterwards: bool) -> Iterator[None]:
    """Which network torch's gloo takes, and that it connects when it is first used.

    Unless somebody has told it. It reads this whenever a group is made; by itself it takes the
    interface of the host's name, which is that of the machine alone on many. What is told
    `afterwards` too holds for groups to come, and for processes that this one starts.
    """
    told = interface and "GLOO_SOCKET_IFNAME" not in os.environ
    if told:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        yield
    finally:
        if told and not afterwards:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


def tell_launcher(word: Literal["init", "peer"]) -> None:
    """Tells bagua-run that this rank has called init(), or that it ends because of another one."""
    number, _, pipe = os.environ.get("BAGUA_RUN_VERDICT_FD", "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        there = os.fstat(int(number))  # perhaps something else that the program has opened since
        if stat.S_ISFIFO(there.st_mode) and there.st_ino == int(pipe):
            os.write(int(number), f"{word}\n".encode())


def torchrun_size() -> int:
    """How many processes torchrun, which knows no MPI, has started; 1 without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))
