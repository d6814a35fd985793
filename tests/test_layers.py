"""Includes of csrc/ and imports of bagua/ point one way, and few files know the outside."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What the files of a folder may include or import, besides their own folder.
CSRC = {
    "common": set(),
    "kernel": {"common"},
    "device": {"common"},
    "codec": {"common", "kernel", "device"},
    "transport": {"common", "kernel", "device"},
    "control": {"common"},
    "collective": {"common", "kernel", "device", "codec", "transport"},
}
CSRC["engine"] = {*CSRC["collective"], "collective", "control"}
CSRC["python"] = {*CSRC["engine"], "engine"}

PYTHON = {
    "version.py": set(),
    "common": {"_core", "version.py"},
    "algorithms": {"common"},
    "torch": {"algorithms", "common", "version.py"},
    "torch_api": {"torch", "algorithms", "common", "version.py"},
    "launch": {"common", "_core", "version.py"},
    "distributed": {"launch"},
    "__init__.py": {"common", "algorithms", "version.py"},
}

CC_FILES = sorted(
    path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cc", ".cu")
)
PY_FILES = sorted((ROOT / "bagua").rglob("*.py"))


def part(path: Path, top: str) -> str:
    """The layer of a file: the folder below `top`, or the file's own name where it has none."""
    return path.relative_to(ROOT / top).parts[0]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code(path: Path) -> str:
    """C++ without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def imported(path: Path) -> set[str]:
    """Absolute names of all modules a Python file imports, at any depth."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def layers(modules: set[str]) -> set[str]:
    """The parts of bagua/ that these modules belong to."""
    parts = set()
    for module in modules:
        root, _, rest = module.partition(".")
        first = rest.split(".")[0]
        if root == "bagua" and first:
            if (ROOT / "bagua" / first).is_dir() or first == "_core":
                parts.add(first)
            elif (ROOT / "bagua" / f"{first}.py").exists():
                parts.add(f"{first}.py")
            else:  # a name out of bagua/__init__.py
                parts.add("__init__.py")
    return parts


def wrong(used: set[str], here: str, allowed: dict[str, set[str]]) -> set[str]:
    assert here in allowed, f"{here} is no layer yet: add it to {Path(__file__).name}"
    return used - allowed[here] - {here}


@pytest.mark.parametrize("path", CC_FILES, ids=name)
def test_includes_point_one_way(path):
    here = part(path, "csrc")
    includes = re.findall(r'#\s*include\s*"([^"]+)"', code(path))
    for include in includes:
        assert (ROOT / "csrc" / include).is_file(), f"{include} is not relative to csrc/"
    assert not wrong({include.split("/")[0] for include in includes}, here, CSRC)


@pytest.mark.parametrize("path", CC_FILES, ids=name)
def test_only_one_folder_knows_python_and_only_its_transport_knows_mpi(path):
    included = set(re.findall(r"#\s*include\s*[<\"]([^>\"]+)[>\"]", code(path)))
    foreign = {
        file for file in included if re.match(r"Python\.h|pybind11/|torch/|ATen/|c10/", file)
    }
    if part(path, "csrc") != "python":
        assert not foreign
    if path.stem != "mpi":
        assert "mpi.h" not in included


@pytest.mark.parametrize("path", CC_FILES, ids=name)
def test_two_files_know_cuda(path):
    if name(path) not in ("csrc/device/cuda.cc", "csrc/codec/gpu_kernels.h"):
        assert not re.search(r"#\s*include\s*[<\"]cuda|\bcuda[A-Z]", code(path))


@pytest.mark.parametrize("path", CC_FILES, ids=name)
def test_csrc_reads_no_environment(path):
    assert not re.search(r"\b(secure_)?getenv\b|\benviron\b", code(path))


@pytest.mark.parametrize("path", PY_FILES, ids=name)
def test_imports_point_one_way(path):
    assert not wrong(layers(imported(path)), part(path, "bagua"), PYTHON)


@pytest.mark.parametrize("path", PY_FILES, ids=name)
def test_torch_is_imported_by_the_torch_layers_alone(path):
    if part(path, "bagua") not in ("torch", "torch_api"):
        assert "torch" not in {module.split(".")[0] for module in imported(path)}


@pytest.mark.parametrize("path", PY_FILES, ids=name)
def test_config_alone_reads_the_environment(path):
    if name(path) == "bagua/common/config.py" or part(path, "bagua") == "launch":
        return  # the launcher passes the environment on
    tree = ast.parse(path.read_text())
    names = {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(tree)}
    assert not names & {"environ", "environb", "getenv", "getenvb"}
    assert not {"os.environ", "os.getenv"} & imported(path)


def test_the_engine_and_the_frontend_were_found():
    assert CC_FILES
    assert PY_FILES


def test_a_wrong_edge_is_seen(tmp_path):
    assert wrong({"common", "engine"}, "transport", CSRC) == {"engine"}
    assert wrong({"common", "torch"}, "algorithms", PYTHON) == {"torch"}
    assert layers({"bagua.common.config", "bagua.version", "os.path"}) == {"common", "version.py"}
