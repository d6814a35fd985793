"""The algorithm a user chooses: what it may be given as, and what is worth telling about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Optional, Union

from bagua.algorithms import Algorithm, PerParameter, QAdam, find
from bagua.common.config import Config
from bagua.common.errors import UsageError
from bagua.common.process_set import ProcessSet
from bagua.common.warn import warn
from bagua.common.world import world
from bagua.torch.bucket_plan import fold_of
from bagua.torch.compression import CodecCompressor

_One = Union[str, Algorithm]
# For all parameters, or by patterns of names, or by name and shape.
Choice = Union[_One, Mapping[str, _One], Callable[[str, tuple[int, ...]], Optional[_One]]]


def resolved(choice: Choice, optimizer: Any) -> Algorithm:
    """The algorithm, with what the optimizer, which must be able to, has been told already."""
    if isinstance(choice, Mapping) or (callable(choice) and not isinstance(choice, type)):
        choice = PerParameter(choice)
    found = find(choice)  # type: ignore[arg-type]  # which says so of a class
    warmup = getattr(optimizer, "warmup_steps", found.warmup_steps)
    if isinstance(found, QAdam) and warmup != found.warmup_steps:
        if not isinstance(choice, str):
            raise UsageError(
                f"warmup_steps is {found.warmup_steps} in {found!r} and {warmup} in the "
                f"optimizer; give it to the optimizer, bagua.torch.QAdam(..., warmup_steps="
                f"{found.warmup_steps}), and leave it out of the algorithm"
            )
        found = replace(found, warmup_steps=warmup)
    fold_of(optimizer, found)  # is an error now and not after a warm-up
    return found


def with_codec(algorithm: Algorithm, compression: Any) -> Algorithm:
    """The algorithm, and the codec of `compression=`, if it is one."""
    if not isinstance(compression, CodecCompressor) or algorithm.codec == compression.codec:
        return algorithm
    kind = type(algorithm)
    plain = kind.plan is Algorithm.plan and kind.of is Algorithm.of and kind.at is Algorithm.at
    if not plain or algorithm.what != "grad" or algorithm.codec != "raw" or algorithm.low_rank:
        raise UsageError(f"compression={compression!r} is a codec; leave it out with {algorithm!r}")
    return replace(algorithm, codec=compression.codec)


def tell_what_is_used(algorithm: Algorithm, by: str, step: int, process_set: ProcessSet) -> None:
    """To who asks for it by log_level info."""
    if world().rank == process_set.ranks[0]:
        begins = f", from step {step} on" if step else ""
        world().engine.tell(f"{by} communicates by {algorithm!r}{begins}")


def tell_what_is_overruled(by: Choice, chosen: Algorithm, process_set: ProcessSet) -> None:
    wanted = world().config.algorithm
    same = isinstance(by, (str, Algorithm)) and find(by) == find(wanted)
    overruled = wanted != Config.algorithm and not same
    if overruled and world().rank == process_set.ranks[0]:
        warn(f"the script's choice, {chosen!r}, overrules the setting {wanted!r}")


def tell_what_matches_nothing(
    chosen: Algorithm, names: Iterable[str], process_set: ProcessSet
) -> None:
    names = list(names)
    unmatched = chosen.unmatched(names)
    if unmatched and world().rank == process_set.ranks[0]:
        more = ", ..." if len(names) > 3 else ""
        warn(
            f"algorithm= has patterns that match no parameter: {', '.join(map(repr, unmatched))}. "
            f"Names are those of named_parameters, here {', '.join(names[:3])}{more}; what no "
            "pattern matches is averaged exactly, but travels coded where exact= has the pattern"
        )


def tell_what_is_exact(chosen: Algorithm, process_set: ProcessSet) -> None:
    """Who tries an algorithm on one machine should know that it is another one there."""
    counts = chosen.hierarchical and (chosen.codec != "raw" or chosen.peers != "all")
    if not counts or process_set.size() < 2 or world().rank != process_set.ranks[0]:
        return
    if len(set(world().nodes(process_set))) == 1:
        warn(
            f"all ranks share a machine, where {chosen.name or 'this algorithm'} is an exact "
            "average over all of them: codec and peers are for what goes between machines. "
            "hierarchical=False, or bagua-run --transport mpi, takes them here, too",
        )
