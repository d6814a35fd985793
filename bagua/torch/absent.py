"""Names that Horovod has and this does not, and what to do instead."""

from __future__ import annotations

_TIMELINE = "there is no timeline yet; torch.profiler tells where the time goes"

INSTEAD = {
    "elastic": "a job has a fixed number of ranks; save checkpoints and start another one",
    "run": "start ranks from the shell: bagua-run -np 4 train.py",
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
    "check_extension": "leave it out: bagua-run --check-build tells what is built in",
    "check_installed_version": "leave it out; see bagua.__version__",
    "gpu_available": "see torch.cuda.is_available()",
    "num_rank_is_power_2": "Adasum takes any number of ranks",
    "mpi_ops": "its functions are in bagua.torch itself",
}


def absent(module: str, name: str) -> AttributeError:
    """What to raise where somebody asks for the name."""
    if name in INSTEAD:
        return AttributeError(f"{module} has no {name}: {INSTEAD[name]}")
    return AttributeError(f"module {module!r} has no attribute {name!r}")
