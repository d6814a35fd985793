"""What README.md and docs/ show works: code runs, commands parse, names exist, links resolve."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from docs.document import FILES, ROOT, Block, anchors, blocks, both_sides, links, prose, tables

from bagua import algorithms
from bagua.algorithms import Algorithm, find, names
from bagua.common.config import Config, variable
from bagua.common.errors import UsageError
from bagua.launch.flags import parse_command_line

BLOCKS = [block for path in FILES for block in blocks(path)]
LANGUAGES = {"python", "diff", "bash", "text"}
MIGRATING = sorted((ROOT / "docs").glob("migrating-from-*.md"))


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted({block.path for block in of("python")}), ids=name)
def test_python_blocks_run(path, run_ranks):
    result = run_ranks(2, Path(__file__).with_name("run_blocks.py"), str(path), timeout_s=120)
    assert result.exit_code == 0, str(result)


WRONG = """
```python
1 / 0
```
```python raises=ValueError
pass
```
```python raises=ValueError
1 / 0
```
```python
here = 1
```
```python
here
```
```python continues
here
```
```python continues raises=ArithmeticError
1 / 0
```
"""


@pytest.mark.slow
def test_wrong_blocks_are_found(tmp_path, run_ranks):
    path = tmp_path / "wrong.md"
    path.write_text("<!-- prelude\nimport bagua\nbagua.init()\n-->" + WRONG)
    result = run_ranks(2, Path(__file__).with_name("run_blocks.py"), str(path))
    assert result.exit_code != 0
    assert "5 blocks of" in result.stderr[0]
    for line in (6, 9, 12, 18, 21):
        assert f"wrong.md:{line} should" in result.stdout[0]
    assert "wrong.md:24 ok" in result.stdout[0]


@pytest.mark.slow
@pytest.mark.parametrize("block", of("diff"), ids=str)
def test_both_sides_of_a_diff_run(block, run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where they may write
    before, after = both_sides(block.body)
    plain = subprocess.run([sys.executable, "-c", before], capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    result = run_ranks(2, after)
    assert result.exit_code == 0, str(result)
    assert result.stdout[0].strip()
    assert not result.stdout[1].strip()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=name)
def test_examples_run(path, run_ranks):
    result = run_ranks(2, path, "--epochs", "2")
    assert result.exit_code == 0, str(result)
    assert "replicas are bitwise equal" in result.stdout[0]
    assert not result.stdout[1].strip()


@pytest.mark.slow
def test_an_example_runs_without_a_launcher():
    command = [sys.executable, ROOT / "examples" / "digits.py", "--epochs", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "ranks: 1" in result.stdout


def commands() -> list[tuple[Block, list[str]]]:
    """The command lines of all shell blocks, without prompts and variables before them."""
    found = []
    for block in of("bash"):
        for line in block.body.replace("\\\n", "").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words:
                found.append((block, words))
    return found


@pytest.mark.parametrize(
    ("block", "words"), commands(), ids=lambda v: " ".join(v) if isinstance(v, list) else str(v)
)
def test_commands_are_right(block, words):
    program, *arguments = words
    if program == "bagua-run":
        options = parse_command_line(arguments)
        assert options.check_build or options.version or options.command
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= {*targets, *[a for a in arguments if "=" in a]}
    elif words[:3] == ["python", "-m", "benchmarks"]:
        about = subprocess.run([sys.executable, *words[1:3], "-h"], capture_output=True, cwd=ROOT)
        assert set(arguments[2:]) <= set(re.findall(r"[\w-]+", about.stdout.decode()))
    else:
        assert program in {"git", "cd", "pip", "python", "python3", "mpirun", "srun"}
    for word in arguments:
        if word.startswith("examples/"):
            assert (ROOT / word).is_file()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_links_resolve(path):
    for link in links(path):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_that_are_named_exist(path):
    pattern = r"`((?:bagua|csrc|tests|benchmarks|examples|docs|cmake)/[\w./-]+)`"
    named = re.findall(pattern, prose(path))
    assert [word for word in named if not (ROOT / word).exists()] == []


@pytest.mark.parametrize("path", FILES, ids=name)
def test_settings_that_are_named_exist(path):
    known = {variable(field) for field in Config.__dataclass_fields__}
    known.add("BAGUA_CUDA")  # of an installation
    assert set(re.findall(r"BAGUA_[A-Z_]+", path.read_text())) <= known


def test_operations_that_are_listed_exist():
    rows = tables(ROOT / "README.md") + tables(ROOT / "docs" / "operations.md")
    listed = {word for row in rows for word in re.findall(r"`(\w+)\(", row[0])}
    assert {"allreduce", "join"} <= listed
    assert listed <= exported("bagua/torch/__init__.py")


def exported(path: str) -> set[str]:
    """A module's `__all__`, read rather than imported: this process stays without MPI."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{path} has no __all__")


def test_algorithms_that_are_listed_have_these_defaults():
    def said(kind: type) -> dict[str, str]:
        of_all = {} if kind is Algorithm else {f.name: f.default for f in fields(Algorithm)}
        return {
            f.name: getattr(f.default, "name", repr(f.default)).replace("'", '"')
            for f in fields(kind)
            if f.name not in of_all or f.default != of_all[f.name]
        }

    rows = tables(ROOT / "docs" / "algorithms.md")
    begin = next(i for i, row in enumerate(rows) if row[:2] == ["name", "class"]) + 1
    listed = {
        row[0].strip("`"): (row[1].strip("`"), dict(re.findall(r"`(\w+)=([^`]*)`", row[2])))
        for row in rows[begin : begin + 1 + len(names())]
    }
    kinds = {"none": Algorithm, **{known: type(find(known)) for known in names()}}
    assert listed == {known: (kind.__name__, said(kind)) for known, kind in kinds.items()}
    assert {kind.__name__ for kind in kinds.values()} <= set(algorithms.__all__)


@pytest.mark.parametrize("path", MIGRATING, ids=name)
def test_launcher_flags_that_are_listed_are_known(path):
    first = [row[0] for row in tables(path)]
    flags = [flag for cell in first for flag in re.findall(r"`(-[\w-]+)", cell)]
    assert len(flags) > 10
    assert [flag for flag in flags if not is_known(flag)] == []


def is_known(flag: str) -> bool:
    try:
        parse_command_line([flag, "1"])
    except UsageError as error:
        return "unknown flag" not in str(error)
    return True


def test_every_block_is_of_a_language_that_is_checked():
    assert {block.language for block in BLOCKS} <= LANGUAGES
