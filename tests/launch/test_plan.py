"""The exact command for every flavour of mpirun, and what is refused before anything starts."""

import os
import sys

import pytest

from bagua.common.errors import UsageError
from bagua.launch import plan as plan_module
from bagua.launch import rank
from bagua.launch.flags import parse_command_line
from bagua.launch.flavour import FLAVOURS, detect, find_mpirun, recognise
from bagua.launch.plan import make_plan

WRAPPER = [sys.executable, "-IS", os.path.abspath(rank.__file__)]
SUGGESTED = ["--suggest", "OMPI_MCA_btl_tcp_eager_limit=600000"]
BY_NAME = {flavour.name: flavour for flavour in FLAVOURS}
VERSIONS = {
    "Open MPI 5": "mpirun (Open MPI) 5.0.11\n",
    "Open MPI 4": "mpirun (Open MPI) 4.1.4\n",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619\n",
    "MPICH": "HYDRA build details:\n    Version:   4.2.1\n",
}


@pytest.fixture(autouse=True)
def two_cores_and_no_root(monkeypatch):
    monkeypatch.setattr(plan_module, "core_count", lambda: 2)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(plan_module, "under_scheduler", lambda: False)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")


def plan(line, flavour="Open MPI 5"):
    return make_plan(parse_command_line(line.split()), "mpirun", BY_NAME[flavour])


def words(line, flavour="Open MPI 5"):
    """mpirun's own words, without the wrapped program."""
    command = plan(line, flavour).command
    return " ".join(command[1 : command.index(sys.executable)])


@pytest.mark.parametrize(("name", "answer"), VERSIONS.items())
def test_flavours_are_recognised(name, answer):
    assert recognise(answer).name == name


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("echo strange 1.0", r"'strange 1.0', which is none of Open MPI 5"),
        ("echo; echo no home >&2; exit 3", r"fails, with 3: no home$"),
    ],
)
def test_an_unknown_mpirun_is_refused(tmp_path, does, says):
    fake = tmp_path / "mpirun"
    fake.write_text(f"#!/bin/sh\n{does}\n")
    fake.chmod(0o755)
    with pytest.raises(UsageError, match=says):
        detect(find_mpirun(str(fake)))


def test_the_mpirun_beside_this_python_is_preferred(tmp_path, monkeypatch):
    for folder in ("venv", "system"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpirun").write_text("#!/bin/sh\n")
        (tmp_path / folder / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    assert find_mpirun() == str(tmp_path / "venv" / "mpirun")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_mpirun() == str(tmp_path / "system" / "mpirun")
    with pytest.raises(UsageError, match="found no program 'nompirun'"):
        find_mpirun("nompirun")


LINE = "-np 3 -H localhost:4 --bind-to socket -x A=1 -p 22 --mpi-args=--extra -- true"
GOLDEN = {
    "Open MPI 5": "-np 3 -H localhost:4 --bind-to package:overload-allowed"
    " --prtemca plm_ssh_args -p 22 -x A=1 --extra",
    "Open MPI 4": "-np 3 -H localhost:4 --bind-to socket:overload-allowed"
    " --mca plm_rsh_args -p 22 -x A=1 --extra",
    "Intel MPI": "-np 3 -hosts localhost -ppn 4 -genv I_MPI_PIN_DOMAIN socket -genv A 1 --extra",
    "MPICH": "-np 3 -hosts localhost:4 -bind-to socket -genv A 1 --extra",
}


@pytest.mark.parametrize(("flavour", "golden"), GOLDEN.items())
def test_golden_commands(flavour, golden):
    made = plan(LINE, flavour)
    assert words(LINE, flavour) == golden
    suggested = SUGGESTED if flavour.startswith("Open MPI") else []
    assert made.command[made.command.index(sys.executable) :] == [*WRAPPER, *suggested, "true"]
    variable = BY_NAME[flavour].ssh_variable
    assert made.environment == ({variable: "-p 22"} if variable else {})


@pytest.mark.parametrize("flavour", GOLDEN)
def test_nccl_is_told_the_same_network_interfaces(flavour):
    made = plan("-np 2 --network-interfaces lo,eth0 true", flavour)
    assert made.command[-3:] == ["--suggest", "NCCL_SOCKET_IFNAME==lo,eth0", "true"]


def test_nccl_is_told_what_a_variable_says(monkeypatch):
    monkeypatch.setenv("BAGUA_NETWORK_INTERFACES", "lo, eth0")
    assert "NCCL_SOCKET_IFNAME==lo,eth0" in plan("-np 2 true").command
    set_here = plan("-np 2 -x BAGUA_NETWORK_INTERFACES=lo true").command
    assert "NCCL_SOCKET_IFNAME==lo" in set_here


@pytest.mark.parametrize(
    ("program", "script"),
    [
        ("{python} -u -X dev -W ignore {here} --lr 1", True),
        ("{python} -Xpycache_prefix=/X -Wignore::m.W {here}", True),
        ("{python} --check-hash-based-pycs never {here}", True),
        ("-m http.server", True),
        ("{here}", True),
        ("{python} -um http.server", True),
        ("{python} -c pass {here}", False),
        ("{python} -uc pass {here}", False),
        ("{python} -ucpass {here}", False),
        ("{python} -Xdev -Wignore", False),
        ("{python} -u - {here}", False),
        ("{python}", False),
        ("true {here}", False),
    ],
)
def test_what_is_a_script(program, script):
    words = program.format(here=__file__, python=sys.executable)
    assert plan(f"-np 2 {words}").script == script


@pytest.mark.parametrize(
    "flags", ["-u", "-X dev -Wonce", "-Xpycache_prefix=/X", "--check-hash-based-pycs never"]
)
def test_a_script_that_is_not_there_is_told_behind_flags(flags):
    with pytest.raises(UsageError, match=r"there is no script absent\.py"):
        plan(f"-np 2 {sys.executable} {flags} absent.py")
    assert plan(f"-np 2 {sys.executable} {flags} - absent.py").script is False


def test_oversubscribe_above_the_cores_only():
    assert words("-np 2 true") == "-np 2 --bind-to none"
    assert words("-np 3 true") == "-np 3 --oversubscribe --bind-to none"
    assert words("-np 3 true", "MPICH") == "-np 3 -bind-to none"


def test_root_is_allowed_and_noted_when_verbose(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in words("-np 2 true")
    assert plan("-np 2 true").notes == []
    assert "running as root" in plan("-np 2 --verbose -- true").notes[0]


def test_settings_travel_as_variables():
    assert words("-np 2 --fusion-mb 3 --no-inline-drive -- true") == (
        "-np 2 --bind-to none -x BAGUA_FUSION_MB=3 -x BAGUA_INLINE_DRIVE=false"
    )


def test_other_hosts_get_the_environment_but_what_belongs_here(monkeypatch):
    monkeypatch.setattr(
        os, "environ", {"PATH": os.environ["PATH"], "PWD": "/", "SSH_TTY": "1", "MINE": "2"}
    )
    made = plan("-H far:2 --network-interfaces eth0,eth1 true")
    assert made.remote
    assert " ".join(made.command[1 : made.command.index(sys.executable)]) == (
        "-np 2 -H far:2 --bind-to none --prtemca oob_tcp_if_include eth0,eth1"
        " --mca btl_tcp_if_include eth0,eth1 -x PYTHONUNBUFFERED=1"
        " -x BAGUA_NETWORK_INTERFACES=eth0,eth1"
        " -x BAGUA_RUN_CHANNEL -x BAGUA_RUN_TOKEN -x MINE -x PATH"
    )


def test_fault_tolerance_where_there_is_any():
    assert "--with-ft ulfm" in words("-np 2 --fault-tolerant -- true")
    tolerant = plan("-np 2 --fault-tolerant -- true").command
    assert tolerant[-4:] == ["--fault-tolerant", *SUGGESTED, "true"]
    with pytest.raises(UsageError, match="Open MPI 4"):
        plan("-np 2 --fault-tolerant -- true", "Open MPI 4")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("true", "how many ranks"),
        ("-np 2", "what shall run"),
        ("-np 5 -H h1:2,h2:2 true", "-np 5 asks for more ranks than the 4 slots of h1:2,h2:2"),
        ("-np 2 -H h1:2 --hostfile f true", "not both"),
        ("-np 2 no-such-program", "there is no program no-such-program"),
        ("-np 2 python tran.py", "no script tran.py; did you mean 'train.py'?"),
        ("-np 2 python -u -X dev tran.py", "no script tran.py; did you mean 'train.py'?"),
        ("-np 2 tran.py", "no script tran.py; did you mean 'train.py'?"),
        ("-np 2 ./notes.txt", "not a program that can be run; chmod +x ./notes.txt, or"),
        ("-np 2 notes.txt", "; chmod +x notes.txt and write ./notes.txt, or name the interpreter"),
        ("-np 2 -m", "-m needs the name of a module"),
        ("-np 2 .", "is a folder"),
        ("-np 2 --mpi-args=' -m pkg", "--mpi-args ': no closing quotation"),
        ("-np 2 --binding-args=' -m pkg", "--binding-args ': no closing quotation"),
    ],
)
def test_refusals(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))  # has a program named python
    (tmp_path / "train.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UsageError) as caught:
        plan(line)
    assert message in str(caught.value)


def test_a_module_runs_with_this_python():
    made = plan("-np 2 -m pkg.mod --lr 1")
    assert made.command[-5:] == [sys.executable, "-m", "pkg.mod", "--lr", "1"]


def test_unequal_slots_on_intel():
    with pytest.raises(UsageError, match="equal numbers of slots"):
        plan("-H h1:2,h2:3 true", "Intel MPI")


def test_the_number_of_ranks_comes_from_the_slots():
    assert plan("-H h1:2,h2:3 true").rank_count == 5


def test_a_script_runs_with_this_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert plan("-np 2 train.py --lr 1").command[-4:] == [sys.executable, "train.py", "--lr", "1"]
