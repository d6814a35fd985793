"""Finding NCCL where it is, and saying why not where it is not; which GPU a process has."""

import os
import subprocess
import sys
from ctypes.util import find_library
from typing import Any

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


def start_alone(loads_later: str = "", log_level: str = "info", **settings: Any) -> str:
    """What a rank logs and prints that starts by itself, and then loads a library."""
    program = (
        f"import bagua, ctypes; bagua.init(log_level={log_level!r}, **{settings!r})\n"
        "from bagua.common.core import core; from bagua.common.nccl import library_path\n"
        f"if {loads_later!r}: ctypes.CDLL({loads_later!r})\n"
        "print(core.nccl_found(library_path()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=outside_a_job(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr + done.stdout


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """No more of one than that it is there: nobody wakes it up."""
    if not HAS_CUDA:
        pytest.skip("built without CUDA")
    source = ["-x", "c", "/dev/null"]
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", *source], check=True)
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        monkeypatch.setenv(name, str(tmp_path), prepend=":")


def test_which_way_gpus_go_is_logged_when_it_starts(driver, wheel):
    path = built(wheel, 22304)
    assert f"info: tensors on GPUs go by NCCL ({path}), and where ranks cannot" in start_alone()


def test_that_nccl_is_not_wished_is_logged_when_it_starts(driver):
    told = start_alone(nccl=False)
    assert "info: tensors on GPUs go by the host's memory: nccl=False\n" in told


def test_what_has_no_nccl_yet_may_load_one(driver, wheel, tmp_path):
    """Whatever is logged."""
    for level in ("info", "warning"):
        told = start_alone(built(tmp_path, 22304), level)
        assert ("unless an NCCL is found when the first comes" in told) == (level == "info")
        assert told.endswith("2.23.4\n")


def test_that_there_is_no_gpu_is_logged_when_it_starts():
    if find_library("cuda"):
        pytest.skip("there is a driver")
    why = "cuda device: no driver of NVIDIA's" if HAS_CUDA else "GPUs: built without CUDA"
    assert f"info: no {why}\n" in start_alone()


def outside_a_job() -> dict[str, str]:
    job = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "BAGUA_")
    return {name: value for name, value in os.environ.items() if not name.startswith(job)}


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
