"""Whether ranks that share a GPU go by NCCL: that takes a newer one than torch may bring.

`python -m gpu.sharing`, in tests/, fails with the remedy where what is found will not do.
"""

import sys
from typing import Optional

import torch

from bagua.common.config import nccl_shares_gpu
from bagua.common.core import core
from bagua.common.nccl import FIRST_THAT_SHARES, library_path, nccl_version
from bagua.common.world import world
from gpu.own import has_own


def missing() -> Optional[str]:
    if nccl_version() >= FIRST_THAT_SHARES:
        return None
    major = (torch.version.cuda or "13").partition(".")[0]
    return (
        "two ranks that share a GPU go by NCCL 2.30 or newer, and here is "
        f"{core.nccl_found(library_path())}: {sys.executable} -m pip install --upgrade --no-deps "
        f"'nvidia-nccl-cu{major}>=2.30', though torch may have been built with another"
    )


def has_nccl(hvd) -> bool:
    """Whether these ranks go by NCCL, which those who share a GPU have to tell it."""
    if not world().config.nccl:
        return False
    if hvd.size() == 1 or has_own():
        return nccl_version() != ()
    return nccl_shares_gpu() and missing() is None


if __name__ == "__main__":
    sys.exit(missing())
