"""Finding NCCL where it is, and saying why not where it is not; which GPU a process has."""

import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

from bagua.common.config import nccl_shares_gpu
from bagua.common.core import core
from bagua.common.nccl import library_path

HAS_CUDA = core.build_info()["cuda"] != "not built"
FUNCTIONS = [
    "GetErrorString",
    "GetUniqueId",
    "CommInitRankConfig",
    "CommGetAsyncError",
    "CommCount",
    "CommFinalize",
    "CommAbort",
    "CommDestroy",
    "GroupStart",
    "GroupEnd",
    "AllReduce",
    "Broadcast",
    "AllGather",
    "Reduce",
    "ReduceScatter",
    "Send",
    "Recv",
    "RedOpCreatePreMulSum",
    "RedOpDestroy",
]


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Where a wheel would have the library, and nothing yet."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def found(library: str) -> str:
    """What a fresh process says of NCCL: each looks for it once."""
    program = (
        "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI; "
        f"from bagua.common.core import core; print(core.nccl_found({library!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def built(folder, version: int, functions=FUNCTIONS) -> str:
    """A library with these functions that says it is that version."""
    source = folder / "nccl.c"
    source.write_text(
        f"int ncclGetVersion(int* version) {{ *version = {version}; return 0; }}\n"
        + "".join(f"int nccl{name}(void) {{ return 0; }}\n" for name in functions)
    )
    library = folder / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def test_the_wheel_is_found(wheel):
    assert library_path() == ""
    (wheel / "libnccl.so.2").touch()
    assert library_path() == str(wheel / "libnccl.so.2")


def test_a_version_is_told(tmp_path):
    assert found(built(tmp_path, 22304)) == "2.23.4"


@pytest.mark.parametrize(
    ("version", "functions", "words"),
    [
        (21705, FUNCTIONS, "no NCCL: NCCL 2.18 or newer is needed, not 2.17.5"),
        (22304, FUNCTIONS[:-1], "no NCCL: libnccl.so.2 has no ncclRedOpDestroy"),
    ],
)
def test_what_will_not_do(tmp_path, version, functions, words):
    assert found(built(tmp_path, version, functions)) == words


def test_without_a_library_the_remedy_is_told(tmp_path):
    text = found(str(tmp_path / "libnccl.so.2"))
    if find_library("nccl"):  # the system's
        assert text[0].isdigit()
    else:
        assert text.startswith("no NCCL: ")
        assert "pip install 'bagua[cuda]'" in text


def test_a_process_has_one_gpu():
    program = (
        "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI\n"
        "from bagua.common.core import core\n"
        "for number in (0, 1):\n"
        "    try: core.nccl_memory(number, '', 8)\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = (done.stdout.splitlines() or [done.stderr])[-1]
    assert last.startswith("UsageError a process has one GPU: this one began with cuda:0, and here")
    assert "on cuda:1; call torch.cuda.set_device(local_rank())" in last


@pytest.mark.parametrize(
    ("text", "shares"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_nccl_s_own_variable(monkeypatch, text, shares):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    if text is not None:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", text)
    assert nccl_shares_gpu() == shares


@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("version", [22304, 21705])
def test_which_way_gpus_go_is_logged_when_it_starts(tmp_path, wheel, version, nccl):
    """With no more of a driver than that it is there: it is not woken up."""
    built(wheel, version)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", "-x", "c", "/dev/null"],
        check=True,
    )
    told = start_alone(nccl, PYTHONPATH=tmp_path, LD_LIBRARY_PATH=tmp_path)
    if not HAS_CUDA:
        assert "info: built without CUDA\n" in told
    elif version < 21800 or not nccl:
        why_not = "NCCL 2.18 or newer is needed, not 2.17.5" if nccl else "nccl=False"
        assert f"info: tensors on GPUs go by the host's memory: {why_not}\n" in told
    else:
        assert "info: tensors on GPUs go by NCCL 2.23.4, or where ranks cannot" in told


def outside_a_job() -> dict[str, str]:
    job = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "BAGUA_")
    return {name: value for name, value in os.environ.items() if not name.startswith(job)}


def start_alone(nccl: bool, **first: Path) -> str:
    """What a rank logs that starts by itself, where some paths come before others."""
    environment = outside_a_job()
    for name, path in first.items():
        environment[name] = f"{path}:{environment.get(name, '')}"
    program = f"import bagua; bagua.init(log_level='info', nccl={nccl})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_that_there_is_no_gpu_is_logged_when_it_starts():
    expected = "no cuda device" if HAS_CUDA else "built without CUDA"
    assert find_library("cuda") or f"info: {expected}\n" in start_alone(True)


TWO_DEVICES = """
from bagua.common.core import core
import bagua

def refusal(number):
    try:
        core.nccl_memory(number, "", 8)
    except bagua.UsageError as error:
        return str(error)

bagua.init()
refusal(0)  # also where there is none
assert "began with cuda:0, and here is a tensor on cuda:1" in refusal(1)
bagua.init()
assert "began with cuda:0" in refusal(1)
bagua.shutdown()
bagua.init()
assert "began with" not in str(refusal(1))
"""


def test_a_process_may_have_another_gpu_after_another_init():
    subprocess.run([sys.executable, "-c", TWO_DEVICES], env=outside_a_job(), check=True)
