"""`model.with_bagua(optimizers, algorithm)`: trains a model on all ranks together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from bagua import algorithms
from bagua.common.errors import UsageError
from bagua.common.process_set import ProcessSet
from bagua.common.together import together
from bagua.common.warn import warn
from bagua.common.world import world
from bagua.torch import broadcast_optimizer_state, broadcast_parameters
from bagua.torch.choice import resolved
from bagua.torch.own import is_own
from bagua.torch_api.algorithms.algorithm import Algorithm, AnyAlgorithm, made
from bagua.torch_api.attachment import AnyOptimizer, Attachment, attachment_of
from bagua.torch_api.own_tensors import check_lists, mark_own
from bagua.torch_api.process_group import from_torch_group, own_process_set
from bagua.torch_api.training import NAME, Training

Model = TypeVar("Model", bound=torch.nn.Module)
Optimizers = Sequence[torch.optim.Optimizer]
Names = dict[torch.Tensor, str]

_SHOWN = 5  # names in a warning


def with_bagua(
    self: Model,
    optimizers: Optimizers,
    algorithm: AnyAlgorithm,
    process_group: Any = None,
    do_flatten: bool = True,
) -> Model:
    """Makes these optimizers train the model together with those of the other ranks.

    Parameters, buffers and the optimizers' state become those of the group's first rank. Returns
    the model; go on with it and with the optimizers as before. Call it again to switch the
    algorithm; where that fails, the model trains on as before. On a rank outside of the group it
    does nothing.

    Args:
        optimizers: those that step the model's parameters. Without any, the one that QAdam was
            given, or gradients are exchanged all the same, for whichever optimizers there will be.
        algorithm: one of `bagua.torch_api.algorithms` or of `bagua.algorithms`.
        process_group: of `new_group`, `from_torch_group` or torch.distributed; all ranks if None.
        do_flatten: there for Bagua's sake; gradients lie in buckets in any case.
    """
    process_set = own_process_set(_group(process_group))
    wanted = made(algorithm)
    _check(optimizers)
    optimizers = list(optimizers)
    if not optimizers and isinstance(algorithm, Algorithm):
        optimizers = algorithm.optimizers()
    check_lists(self)
    mark_own(self)
    known = [_known(optimizer, process_set) for optimizer in optimizers]
    training = Training()
    fresh: list[Attachment] = []
    if process_set is not None:
        names = _names(self, optimizers)
        unknown = _check_choice(self, optimizers, wanted, process_set)
        agreed = [(old, old.distributed.agreed(wanted)) for old in known if old is not None]
        for old, how in agreed:
            old.switch(*how)
        _broadcast_weights(self, names, process_set)
        _broadcast_state(optimizers, known, process_set)
        if unknown is not None:
            optimizers, known = [unknown], [None]
        pairs = [(name, param) for param, name in names.items()]
        for optimizer, attachment in zip(optimizers, known):
            if attachment is None:
                attachment = Attachment(optimizer, pairs, wanted, process_set)
                fresh.append(attachment)
            training.attachments.append(attachment)
    # Now that nothing can fail. Attachments of before that are not among these end here.
    setattr(self, NAME, training)
    for attachment in fresh:
        attachment.attach()
    self.bagua_algorithm = algorithm  # type: ignore[assignment]
    return self


# The one thing that importing bagua.torch_api does to torch.
torch.nn.Module.with_bagua = with_bagua  # type: ignore[attr-defined]


def _group(process_group: Any) -> Any:
    """One of ours; making it of one of torch's needs every rank."""
    theirs = getattr(torch.distributed, "ProcessGroup", ())
    return from_torch_group(process_group) if isinstance(process_group, theirs) else process_group


def _check(optimizers: Optimizers) -> None:
    if isinstance(optimizers, torch.optim.Optimizer) or not isinstance(optimizers, Iterable):
        raise UsageError("with_bagua takes a list of optimizers: with_bagua([optimizer], ...)")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"with_bagua takes optimizers, not {type(optimizer).__name__}")
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise UsageError("with_bagua was given an optimizer twice; name each once")


def _check_choice(
    model: torch.nn.Module,
    optimizers: Optimizers,
    wanted: algorithms.Algorithm,
    process_set: ProcessSet,
) -> AnyOptimizer | None:
    """What stands for the optimizers, if there are none."""
    with together("with_bagua", "with_bagua.chosen", process_set):
        for optimizer in optimizers:
            resolved(wanted, optimizer)
        return None if optimizers else _any_optimizer(model, wanted)


def _known(optimizer: torch.optim.Optimizer, process_set: ProcessSet | None) -> Attachment | None:
    """What an earlier call has made of the optimizer, if it can go on."""
    attachment = attachment_of(optimizer)
    return attachment if attachment and attachment.process_set is process_set else None


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _names(model: torch.nn.Module, optimizers: Optimizers) -> Names:
    """Of all parameters of the model, and of those that the optimizers have from elsewhere."""
    names: Names = {param: name for name, param in model.named_parameters()}
    stepped = [param for optimizer in optimizers for param in _parameters(optimizer)]
    if optimizers:
        _warn_of_strangers(names, set(stepped))
    for number, param in enumerate(stepped):
        names.setdefault(param, f"optimizers.{number}")
    return names


def _warn_of_strangers(names: Names, stepped: set[torch.Tensor]) -> None:
    strangers = [
        name
        for param, name in names.items()
        if param.requires_grad and param not in stepped and not is_own(param)
    ]
    if strangers:
        shown = ", ".join(strangers[:_SHOWN]) + (", …" if len(strangers) > _SHOWN else "")
        warn(
            f"{len(strangers)} parameters belong to none of the optimizers ({shown}): they are "
            "made equal now, but their gradients are not exchanged",
        )


def _broadcast_weights(model: torch.nn.Module, names: Names, process_set: ProcessSet) -> None:
    tensors = [(name, param) for param, name in names.items()] + list(model.named_buffers())
    broadcast_parameters(tensors, process_set.ranks[0], process_set)


def _broadcast_state(
    optimizers: Optimizers, known: Sequence[Attachment | None], process_set: ProcessSet
) -> None:
    root = process_set.ranks[0]
    for optimizer, attachment in zip(optimizers, known):
        if attachment is None:
            broadcast_optimizer_state(optimizer, root, process_set=process_set)
        else:
            with attachment.aside():
                broadcast_optimizer_state(attachment.distributed, root, process_set=process_set)


def _any_optimizer(model: torch.nn.Module, algorithm: algorithms.Algorithm) -> AnyOptimizer:
    if algorithm.what != "grad":
        raise UsageError(
            f"{algorithm!r} exchanges when an optimizer steps, so it has to know which: "
            "with_bagua([optimizer], ...), or DistributedDataParallel(model, "
            "optimizers=[optimizer], ...)"
        )
    if world().config.check_finite == "skip":
        raise UsageError(
            "check_finite='skip' needs the optimizers: with_bagua([optimizer], ...), or "
            "DistributedDataParallel(model, optimizers=[optimizer], ...)"
        )
    return AnyOptimizer(param for param in model.parameters() if param.requires_grad)
