"""Runs tests marked `ranks` over MPI processes (see parallel/plugin.py); settings of hypothesis.

With PRETEND_GPU=1 torch's tensors are taken for those of a device that takes its time, so that what
is for GPUs is tested where there is none: see csrc/device/pretend.h.
"""

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ("parallel.plugin", "pytester")

# All ranks of a test must draw the same examples: none from chance, a clock or an earlier run.
settings.register_profile(
    "ranks",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ranks")


def pytest_runtest_setup() -> None:
    if os.environ.get("PRETEND_GPU"):
        from bagua.common.core import core
        from bagua.torch import arrays

        if arrays._host != 0:
            arrays._host = 0
            core.pretend(200)
