"""Runs tests marked `ranks` over MPI processes (see parallel/plugin.py); settings of hypothesis."""

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
