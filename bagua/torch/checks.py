"""What must be right, and parameters alike on all ranks, before gradients mix."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any
from uuid import UUID

import numpy as np
import torch

from bagua.algorithms import Algorithm
from bagua.algorithms.answers import of_parameter
from bagua.common import numpy_ops
from bagua.common.core import core
from bagua.common.errors import UsageError
from bagua.common.kinds import ReduceOp
from bagua.common.objects import allgather_object, broadcast_object
from bagua.common.process_set import ProcessSet
from bagua.common.world import world
from bagua.torch.arrays import device_of, dtype_name, is_on_device
from bagua.torch.own import is_own_of_mean


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
