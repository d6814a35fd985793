"""Whether all ranks were told the same: algorithm, what it plans, how the optimizer steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from bagua.algorithms import Algorithm
from bagua.algorithms.answers import at_step, of_parameter, planned
from bagua.common.errors import JoinedError, UsageError
from bagua.common.kinds import ReduceOp
from bagua.common.objects import allgather_object
from bagua.common.process_set import ProcessSet
from bagua.common.ranks_text import ranks_text
from bagua.common.together import together
from bagua.common.warn import warn
from bagua.common.world import world
from bagua.torch.bucket_plan import info_alone
from bagua.torch.own import is_own
from bagua.torch.safety import checksum_of


def check_algorithm(
    algorithm: Algorithm,
    steps: int,
    in_step: bool,
    of_gradients: dict[str, Any],
    names: Mapping[torch.Tensor, str],
    name: str,
    process_set: ProcessSet,
) -> int:
    """Ranks that communicate in other ways, or from another step on, must hear so by name.

    Those that were not `in_step` go on where the first of them is: after so many steps.
    """
    with together(repr(algorithm), f"{name}.asked", process_set):
        _check_combination(algorithm, of_gradients["compression"], of_gradients["op"])
        choices, begins = _choices(algorithm, names), at_step(algorithm, 0)
        if begins != algorithm:
            begun = _choices(begins, names).items()
            choices |= {f"{param}, in the first step,": how for param, how in begun}
    settings, begin = _settings(of_gradients, names), repr(begins)
    mine = (repr(algorithm), begin, steps, settings, checksum_of(repr(choices)))
    everyone = allgather_object(mine, name, process_set)
    first, first_begin, first_steps, first_settings, _ = everyone[0]
    root = process_set.ranks[0]
    for rank, (theirs, begin, their_steps, settings, _) in zip(process_set.ranks, everyone):
        if theirs != first:
            raise UsageError(
                f"algorithms differ between ranks: {first} on rank {root}, {theirs} on rank {rank}"
            )
        if begin != first_begin:
            raise UsageError(
                f"algorithms differ between ranks: at(0) of {first} is {first_begin} on rank "
                f"{root}, {begin} on rank {rank}"
            )
        if in_step and their_steps != first_steps:
            raise UsageError(
                f"ranks change to {first} at different steps: after {first_steps} with the one "
                f"before on rank {root}, after {their_steps} on rank {rank}"
            )
        for what, (a, b) in _unlike(first_settings, settings):
            raise UsageError(
                f"{what} differs between ranks: {a} on rank {root}, {b} on rank {rank}"
            )
    if len({checksum for *_, checksum in everyone}) > 1:
        _tell_choices(allgather_object(choices, f"{name}.choices", process_set), process_set)
    return max(their_steps for _, _, their_steps, *_ in everyone)


def check_change(
    algorithm: Algorithm,
    steps: int | None,
    names: Mapping[torch.Tensor, str],
    name: str,
    process_set: ProcessSet,
) -> None:
    """Ranks that go on with it, as at() says after so many steps, must hear of others that do not.

    None: each rank has taken steps of its own.
    """
    with together(repr(algorithm), f"{name}.asked", process_set):
        choices = _choices(algorithm, names)
    mine = (repr(algorithm), steps, checksum_of(repr(choices)))
    try:
        everyone = allgather_object(mine, name, process_set)
    except JoinedError:
        return  # those that have not joined are not compared
    (first, first_steps, checksum), root = everyone[0], process_set.ranks[0]
    for rank, (theirs, their_steps, _) in zip(process_set.ranks, everyone):
        if theirs != first:
            odd = f"to {first} on rank {root}, to {theirs} on rank {rank}"
        elif their_steps != first_steps:
            odd = (
                f"to {first} after {first_steps} steps on rank {root}, after {their_steps} on rank "
                f"{rank}, counted from when the algorithm was chosen"
            )
        else:
            continue
        raise UsageError(f"at() changes {odd}; it must say the same on every rank")
    if any(theirs != checksum for *_, theirs in everyone):
        _tell_choices(allgather_object(choices, f"{name}.choices", process_set), process_set)


def check_progress(mine: tuple[int, int] | None, name: str, process_set: ProcessSet) -> None:
    """Ranks must have taken as many steps, and as many before the algorithm was chosen.

    Else they would exchange at other times, and wait for each other. None: each counts its own.
    """
    try:
        everyone = allgather_object(mine, name, process_set)
    except JoinedError:
        return  # they meet when that is over
    ranks: dict[tuple[int, int] | None, list[int]] = {}
    for rank, theirs in zip(process_set.ranks, everyone):
        ranks.setdefault(theirs, []).append(rank)
    if len(ranks) == 1:
        return
    told = "; ".join(f"{_progress_text(at)} on {ranks_text(those)}" for at, those in ranks.items())
    root = process_set.ranks[0]
    raise UsageError(
        f"ranks go on from different steps, as by checkpoints of different times: {told}. Load "
        f"those of one step on all of them, or load one on rank {root} and have the others get it "
        f"by broadcast_parameters(model.state_dict(), {root}) and "
        f"broadcast_optimizer_state(optimizer, {root})"
    )


def _progress_text(progress: tuple[int, int] | None) -> str:
    if progress is None:
        return "each at its own pace"
    step, since = progress
    return f"after {step}" + (f", of which {since} by another algorithm," if since else "")


@contextlib.contextmanager
def changing_to(algorithm: object) -> Iterator[None]:
    """A rank has joined that would be needed: whoever changes hears when all are there."""
    try:
        yield
    except JoinedError as error:
        raise JoinedError(
            f"to change to {algorithm!r} takes all ranks: {error}; do so before any calls join(), "
            "or when that has returned everywhere"
        ) from None


def _check_combination(algorithm: Algorithm, compression: Any, op: ReduceOp | None) -> None:
    compresses = compression.custom or compression.wire_dtype is not None
    plain = algorithm.codec == "raw" and not algorithm.low_rank
    if compresses and not (
        plain and algorithm.what == "grad" and not algorithm.momentum_correction
    ):
        raise UsageError(f"compression= is a codec of its own; leave it out with {algorithm!r}")
    averages = algorithm.what != "grad" or algorithm.low_rank or algorithm.momentum_correction
    if averages and op not in (None, ReduceOp.Average):
        raise UsageError(f"{algorithm!r} averages; leave op={op.name} out")


def _tell_choices(everyones: Sequence[dict[str, str]], process_set: ProcessSet) -> None:
    for rank, choices in zip(process_set.ranks, everyones):
        for param, (a, b) in _unlike(everyones[0], choices):
            raise UsageError(
                f"algorithms differ between ranks: {param} travels by {a} on rank "
                f"{process_set.ranks[0]}, by {b} on rank {rank}"
            )


def check_hyperparameters(
    optimizer: torch.optim.Optimizer, algorithm: Algorithm, name: str, process_set: ProcessSet
) -> None:
    """They differ between ranks that are about to train together."""
    root = process_set.ranks[0]
    try:
        everyone = allgather_object(hyperparameters(optimizer), name, process_set)
    except JoinedError:
        return  # a rank has joined, and steps no more
    for rank, rules in zip(process_set.ranks, everyone):
        for what, (a, b) in _unlike(everyone[0], rules):
            text = f"{what} differs between ranks: {a} on rank {root}, {b} on rank {rank}"
            if algorithm.what == "momentum":
                raise UsageError(f"the optimizer's {text}")
            if world().rank == root:
                apart = "replicas will not stay equal unless that is mended"
                meant = "mend that unless each rank is meant to step by its own"
                told = apart if algorithm.what == "grad" else meant
                warn(f"the optimizer's {text}; {told}")


def _unlike(first: dict[str, Any], theirs: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, value in first.items():
        if theirs.get(name, value) != value:
            yield name, (value, theirs[name])


def _choices(algorithm: Algorithm, names: Mapping[torch.Tensor, str]) -> dict[str, str]:
    """How each parameter travels, if somebody's code chooses: that cannot be compared."""
    kind = type(algorithm)
    calls = any(callable(getattr(algorithm, field.name)) for field in fields(algorithm))
    if not calls and kind.of is Algorithm.of and kind.plan is Algorithm.plan:
        return {}

    def of(name: str, param: torch.Tensor) -> str:
        shape = tuple(param.shape)
        one = of_parameter(algorithm, name, shape)
        how = f"{one!r}{', exactly' if one.keeps_exact(name, shape) else ''}"
        if type(one).plan is Algorithm.plan:
            return how
        return f"{how} with {planned(one, info_alone(name, param), world(), 0)!r}"

    return {name: of(name, param) for param, name in names.items() if not is_own(param)}


def _settings(of_gradients: dict[str, Any], names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    """What else was said of gradients, in what can be compared."""
    compression, groups = of_gradients["compression"], of_gradients["groups"]
    lists = [", ".join(names.get(p, "one of others") for p in group) for group in groups or ()]
    op = of_gradients["op"] or ReduceOp.Average
    return {
        "op": op.name,
        "compression": str(compression.wire_dtype),
        "gradient_predivide_factor": of_gradients["scales"][1],
        "num_groups": of_gradients["num_groups"],
        "groups": None if groups is None else f"{len(groups)} lists",
        **{f"groups[{number}]": text for number, text in enumerate(lists)},
        "sparse_as_dense": of_gradients["sparse_as_dense"],
        "backward_passes_per_step": of_gradients["backward_passes_per_step"],
    }


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Those that are numbers, of every group of parameters."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return all(map(is_plain, value))
        return value is None or isinstance(value, (bool, int, float, str))

    groups = optimizer.param_groups
    return {
        f"{name} of parameter group {number}" if len(groups) > 1 else name: value
        for number, group in enumerate(groups)
        for name, value in group.items()
        if name != "params" and is_plain(value)
    }
