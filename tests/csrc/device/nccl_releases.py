"""Checks what Bagua takes for NCCL's interface against its releases, headers and libraries.

    make test-nccl-releases NCCL="2.18.1 2.32.3"

Each is a wheel of some 200 MB from PyPI, which is gone afterwards. It takes no GPU.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
CACHE = ROOT / "build/extension/CMakeCache.txt"


def includes_of_cuda() -> str:
    """Where the extension's build found CUDA, which NCCL's header includes."""
    found = re.search(r"^cuda_include:PATH=(.+)$", CACHE.read_text(), re.MULTILINE)
    return found[1] if found else sys.exit("the extension was built without GPUs: BAGUA_CUDA=1")


def check(release: str, folder: Path) -> int:
    wheel = f"nvidia-nccl-cu12=={release}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    subprocess.run([*pip, "--no-deps", "-d", folder, wheel], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as packed:
        packed.extractall(folder)
    nccl, program = folder / "nvidia/nccl", folder / "interface"
    sources = [
        ROOT / "tests/csrc/device/nccl_interface.cc",
        ROOT / "csrc/device/nccl_library.cc",
    ]
    headers = [f"-I{ROOT / 'csrc'}", f"-I{includes_of_cuda()}", f"-I{nccl / 'include'}"]
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-std=c++17", *headers, *sources, "-ldl", "-o", program], check=True)
    return subprocess.run([program, nccl / "lib/libnccl.so.2"]).returncode


def main() -> None:
    failed = []
    for release in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                code = check(release, Path(folder))
            except subprocess.CalledProcessError as error:
                print(error, file=sys.stderr)
                code = 1
        if code != 0:
            failed.append(release)
    sys.exit(f"not as expected: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
