"""Children of ranks: they import the package, but have no place in the job."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import subprocess, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import bagua.torch as bagua


def main():
    bagua.init()
    data = TensorDataset(torch.arange(64.0))
    total = torch.zeros(1)
    for (x,) in DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context={context!r}):
        total += bagua.allreduce(x.sum(), op=bagua.Sum)
    assert total.item() == bagua.size() * 2016, total
    child = subprocess.run(
        [sys.executable, "-c", "import bagua; bagua.init()"], capture_output=True, text=True
    )
    assert child.returncode == 1 and "is a child of process" in child.stderr, child.stderr
    print("fine")


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("context", ["spawn", "forkserver", "fork"])
def test_workers_and_other_children(tmp_path, context):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(context=context)))
    done = subprocess.run(
        [sys.executable, "-m", "bagua.launch", "-np", "2", sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2
