"""What must be right, and alike on all ranks, before an optimizer's gradients mix."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from bagua.algorithms import Algorithm
from bagua.algorithms.answers import of_parameter
from bagua.common import numpy_ops
from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp
from bagua.common.objects import allgather_object, broadcast_object
from bagua.common.process_set import ProcessSet
from bagua.common.warn import warn
from bagua.common.world import world
from bagua.torch.arrays import device_of, dtype_name, is_on_device
from bagua.torch.own import is_own, is_own_of_mean


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
    compression, op = of_gradients["compression"], of_gradients["op"]
    compresses = compression.custom or compression.wire_dtype is not None
    plain = algorithm.codec == "raw" and not algorithm.low_rank
    if compresses and not (
        plain and algorithm.what == "grad" and not algorithm.momentum_correction
    ):
        raise UsageError(f"compression= is a codec of its own; leave it out with {algorithm!r}")
    averages = algorithm.what != "grad" or algorithm.low_rank or algorithm.momentum_correction
    if averages and op not in (None, ReduceOp.Average):
        raise UsageError(f"{algorithm!r} averages; leave op={op.name} out")
    mine = (repr(algorithm), steps, _settings(of_gradients, names), _choices(algorithm, names))
    everyone = allgather_object(mine, name, process_set)
    first, first_steps, first_settings, first_choices = everyone[0]
    root = process_set.ranks[0]
    for rank, (theirs, their_steps, settings, choices) in zip(process_set.ranks, everyone):
        if theirs != first:
            raise UsageError(
                f"algorithms differ between ranks: {first} on rank {root}, {theirs} on rank {rank}"
            )
        if in_step and their_steps != first_steps:
            raise UsageError(
                f"ranks change to {first} at different steps: after {first_steps} with the one "
                f"before on rank {root}, after {their_steps} on rank {rank}"
            )
        for param, (a, b) in _unlike(first_choices, choices):
            raise UsageError(
                f"algorithms differ between ranks: {param} travels by {a} on rank {root}, by {b} "
                f"on rank {rank}"
            )
        for what, (a, b) in _unlike(first_settings, settings):
            raise UsageError(
                f"{what} differs between ranks: {a} on rank {root}, {b} on rank {rank}"
            )
    return max(their_steps for _, their_steps, *_ in everyone)


def check_hyperparameters(
    optimizer: torch.optim.Optimizer, algorithm: Algorithm, name: str, process_set: ProcessSet
) -> None:
    """They differ between ranks that are about to train together."""
    root = process_set.ranks[0]
    try:
        everyone = allgather_object(hyperparameters(optimizer), name, process_set)
    except UsageError:
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
    """How each parameter travels, if functions choose: these cannot be compared."""
    if not any(callable(getattr(algorithm, field.name)) for field in fields(algorithm)):
        return {}

    def of(name: str, shape: tuple[int, ...]) -> str:
        one = of_parameter(algorithm, name, shape)
        return f"{one!r}{', exactly' if one.keeps_exact(name, shape) else ''}"

    shared = [(name, tuple(param.shape)) for param, name in names.items() if not is_own(param)]
    return {name: of(name, shape) for name, shape in shared}


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


def check_predivide(factor: Any, op: ReduceOp | None) -> None:
    if not isinstance(factor, Real) or not 0 < float(factor) < math.inf:
        raise UsageError(f"gradient_predivide_factor is a number above 0, not {factor!r}")
    if factor != 1.0 and op not in (None, ReduceOp.Average):
        raise UsageError("gradient_predivide_factor needs op=Average")


def checked_passes(passes: Any) -> int:
    if not isinstance(passes, Integral) or passes < 1:
        raise UsageError(f"backward_passes_per_step must be at least 1, not {passes!r}")
    return int(passes)


def check_own(
    named: Iterable[tuple[str, torch.Tensor]],
    algorithm: Algorithm,
    op: ReduceOp | None,
    name: str,
    process_set: ProcessSet,
) -> None:
    """Experts must not learn at another scale than what ranks have replicas of."""
    if process_set.size() == 1 or algorithm.what != "grad":
        return

    def sums(name: str, param: torch.Tensor) -> bool:
        of_this = of_parameter(algorithm, name, tuple(param.shape))
        return (of_this.op if op is None else op) == ReduceOp.Sum

    summed = [expert for expert, param in named if is_own_of_mean(param) and sums(expert, param)]
    everyone = allgather_object(summed[:1], name, process_set)
    for rank, names in zip(process_set.ranks, everyone):
        if names:
            raise UsageError(
                f"{names[0]} on rank {rank} is an expert's: its gradient is that of the mean of "
                "all ranks' losses, and those of the others would be of the sum. Average them "
                "(op=Average, or average=True), and multiply the learning rate by "
                f"{process_set.size()} for steps as large as by sums"
            )


def check_parameters(
    named: Iterable[tuple[str, torch.Tensor]],
    name: str,
    process_set: ProcessSet,
    asks: bool = False,
    wrong: str | None = None,
) -> bool:
    """Ranks whose models differ must hear so by name, before their numbers mix.

    Whether any rank asks, while they are at it. What is wrong with one rank's is an error on all.
    """
    named = list(named)
    mine = [(of, dtype_name(p.dtype), tuple(p.shape), p.stride()) for of, p in named]
    root = process_set.ranks[0]
    first = broadcast_object(mine, root, f"{name}.first", process_set)
    problem = None
    if repr(first) != repr(mine):
        problem = difference(first, mine, f"rank {root}", f"rank {world().rank}")
    devices = {device_of(param) for _, param in named if is_on_device(param)}
    gpus = {core.device_identity(device) for device in devices}
    everyone = allgather_object((problem, wrong, gpus, asks), name, process_set)
    for text, *_ in everyone:
        if text is not None:
            raise UsageError(f"parameters differ between ranks: {text}")
    for _, text, *_ in everyone:
        if text is not None:
            raise UsageError(text)
    _check_gpus(zip(process_set.ranks, (theirs for *_, theirs, _ in everyone)))
    return any(asked for *_, asked in everyone)


def other_gradients(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """What is wrong with parameters that take no gradients of their own type. Newer torch has such.

    An arena has the parameter's type, and its slots become the gradients.
    """
    for name, param in named:
        wanted = getattr(param, "grad_dtype", None)
        if wanted not in (None, param.dtype):
            return (
                f"{name} is {dtype_name(param.dtype)} and its grad_dtype {dtype_name(wanted)}, but "
                "gradients are exchanged, and given back, in the parameter's type: leave "
                "grad_dtype as it is, or keep the parameter in float32 and compute under "
                "torch.autocast"
            )
    return None


def _check_gpus(everyone: Iterable[tuple[int, set[bytes]]]) -> None:
    users: dict[bytes, int] = {}
    for rank, gpus in everyone:
        for gpu in gpus:
            other = users.setdefault(gpu, rank)
            if other != rank and not world().config.allow_shared_gpu:
                raise UsageError(
                    f"ranks {other} and {rank} train on one GPU, GPU-{UUID(bytes=gpu)} "
                    "of nvidia-smi -L: call torch.cuda.set_device(bagua.torch.local_rank()) before "
                    "the model is made, give each rank one by bagua-run --own-gpu, start fewer "
                    "ranks, or allow it with allow_shared_gpu (bagua-run --allow-shared-gpu)"
                )


def check_alike(named: Sequence[tuple[str, torch.Tensor]], process_set: ProcessSet) -> None:
    """Costs an exchange of 8 bytes, and of all names and shapes only where they differ."""
    these = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in named]
    mine = np.frombuffer(hashlib.blake2b(repr(these).encode(), digest_size=8).digest(), np.uint8)
    digests = numpy_ops.allgather(mine[None], process_set=process_set)
    if (digests == digests[0]).all():
        return
    everyone = allgather_object(these, process_set=process_set)
    root = process_set.ranks[0]
    for rank, theirs in zip(process_set.ranks, everyone):
        if theirs != everyone[0]:
            fields = "name, dtype, shape"
            text = difference(everyone[0], theirs, f"rank {root}", f"rank {rank}", fields)
            raise UsageError(f"broadcast_parameters: parameters differ between ranks: {text}")


def difference(
    theirs: Sequence[Any],
    mine: Sequence[Any],
    their_rank: str,
    my_rank: str,
    fields: str = "name, dtype, shape, strides",
) -> str:
    names = {their_rank: [name for name, *_ in theirs], my_rank: [name for name, *_ in mine]}
    alone = []
    for rank, other in ((their_rank, my_rank), (my_rank, their_rank)):
        if extra := [name for name in names[rank] if name not in names[other]]:
            more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
            alone.append(f"{rank} alone has {', '.join(extra[:3])}{more}")
    if alone:
        return "; ".join(alone)
    unlike = [(a, b) for a, b in zip(theirs, mine) if a != b]
    a, b = unlike[0]
    more = f", and {len(unlike) - 1} more" if len(unlike) > 1 else ""
    return f"{a} on {their_rank}, {b} on {my_rank} ({fields}){more}"


def checked_names(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> dict[torch.Tensor, str]:
    """A name for every parameter of the optimizer, or an error that says which is wrong."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(is_lazy(param) for param in params):
        raise UsageError(
            "the model has parameters without a shape yet: run it forward once before, on all ranks"
        )
    if named_parameters is None:
        return {param: f"parameter.{i}" for i, param in enumerate(params)}
    names: dict[torch.Tensor, str] = {}
    taken: dict[str, torch.Tensor] = {}
    for item in named_parameters:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
            raise UsageError(
                "named_parameters should be (name, parameter) pairs, as model.named_parameters() "
                f"gives; got {type(item).__name__}"
            )
        name, param = item
        if taken.setdefault(name, param) is not param:
            raise UsageError(f"named_parameters has two parameters named {name!r}")
        names.setdefault(param, name)
    missing = sum(param not in names for param in params)
    if missing:
        raise UsageError(
            f"named_parameters lacks {missing} of the optimizer's {len(params)} parameters; pass "
            "those of every model it trains, or leave named_parameters out"
        )
    return names
