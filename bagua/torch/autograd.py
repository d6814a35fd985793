"""Gradients of the out-of-place operations.

One function per kind of operation, over any number of tensors; `ops` is the `TorchOperations` that
runs it. Backward uses the differentiable operations again, so gradients have gradients. Scales are
those of Horovod, whose users combine them with a loss that is averaged over ranks: see each class.

The in-place operations have none: autograd does not see them. See `note_in_place`.

A backward of a named operation is named too. That of an unnamed one is matched by its order, which
is the same on all ranks if their graphs are.
"""

from __future__ import annotations

from typing import Any

import torch

from bagua.common.errors import UsageError
from bagua.common.kinds import Average, Kind, Sum, Urgency
from bagua.common.warn import warn
from bagua.common.world import rank


class Allreduce(torch.autograd.Function):
    """Gradient: the same allreduce of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, ops: Any, name: Any, op: Any, scales: Any, process_set: Any, *tensors: Any
    ) -> Any:
        ctx.ops, ctx.name, ctx.op, ctx.scales, ctx.process_set = ops, name, op, scales, process_set
        handle = ops.grouped_allreduce_async(
            tensors, None, name, op, *scales, process_set, urgency=Urgency.WAITED
        )
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _check_linear("allreduce", ctx.op)
        results = ctx.ops.grouped_allreduce(
            _wanted(grads),
            name=_grad_name(ctx.name),
            op=ctx.op,
            prescale_factor=ctx.scales[0],
            postscale_factor=ctx.scales[1],
            process_set=ctx.process_set,
        )
        return (None,) * 5 + _in_place_of(grads, results)


class Allgather(torch.autograd.Function):
    """Gradient: this rank's rows of the gradients, averaged over ranks."""

    @staticmethod
    def forward(ctx: Any, ops: Any, name: Any, process_set: Any, *tensors: Any) -> Any:
        ctx.ops, ctx.name, ctx.process_set = ops, name, process_set
        ctx.shapes = [tensor.shape for tensor in tensors]
        results, ctx.rows = ops.allgather_with_rows(tensors, name, process_set)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        results: list[Any] = []
        for i, (grad, shape, rows) in enumerate(zip(grads, ctx.shapes, ctx.rows)):
            if not _is_wanted(grad):
                results.append(None)
                continue
            # Everyone sends everyone their rows: the bytes of a reduce-scatter of unequal parts.
            blocks, _ = ctx.ops.alltoall(
                grad, rows, _grad_name(ctx.name, i), process_set=ctx.process_set
            )
            results.append(blocks.view(len(rows), *shape).mean(0))
        return None, None, None, *results


class Broadcast(torch.autograd.Function):
    """Gradient: on the root the gradients' average over ranks, zeros elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, ops: Any, name: Any, root_rank: int, process_set: Any, tensor: Any
    ) -> Any:
        ctx.ops, ctx.name, ctx.root_rank, ctx.process_set = ops, name, root_rank, process_set
        handle = ops.broadcast_async(tensor, root_rank, name, process_set, urgency=Urgency.WAITED)
        return handle.wait()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        average = ctx.ops.allreduce(
            grad, name=_grad_name(ctx.name), op=Average, process_set=ctx.process_set
        )
        here = average if rank() == ctx.root_rank else torch.zeros_like(average)
        return None, None, None, None, here


class Alltoall(torch.autograd.Function):
    """Gradient: the alltoall the other way round."""

    @staticmethod
    def forward(ctx: Any, ops: Any, name: Any, splits: Any, process_set: Any, tensor: Any) -> Any:
        ctx.ops, ctx.name, ctx.process_set = ops, name, process_set
        handle = ops.alltoall_async(tensor, splits, name, process_set, urgency=Urgency.WAITED)
        if splits is None:
            ctx.received = None
            return handle.wait()
        result, received = handle.wait()
        ctx.received = received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        back = ctx.ops.alltoall(
            grad, ctx.received, _grad_name(ctx.name), process_set=ctx.process_set
        )
        return None, None, None, None, back if ctx.received is None else back[0]


class Reducescatter(torch.autograd.Function):
    """Gradient: the allgather of the gradients after Average, times the set's size after Sum."""

    @staticmethod
    def forward(
        ctx: Any, ops: Any, name: Any, op: Any, scales: Any, process_set: Any, *tensors: Any
    ) -> Any:
        ctx.ops, ctx.name, ctx.op, ctx.scales, ctx.process_set = ops, name, op, scales, process_set
        handle = ops.grouped_reducescatter_async(
            tensors, name, op, process_set, *scales, urgency=Urgency.WAITED
        )
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _check_linear("reducescatter", ctx.op)
        factor = ctx.scales[0] * ctx.scales[1] * (ctx.process_set.size() if ctx.op == Sum else 1)
        results = ctx.ops.grouped_allgather(
            _wanted(grads), name=_grad_name(ctx.name), process_set=ctx.process_set
        )
        if factor != 1:
            results = [result * factor for result in results]
        return (None,) * 5 + _in_place_of(grads, results)


def note_in_place(kind: Kind, tensors: Any, is_mean: bool) -> None:
    """An operation replaces the values of a tensor, or of each of a list.

    Who only looks at them is right, as scripts do that average a loss in place to print it. Not so
    who runs backward through them, which is when this tells. Of a mean it warns: where all ranks go
    on alike, as with a loss, and gradients are averaged, they come out the same.
    """
    for tensor in tensors if isinstance(tensors, list) else [tensors]:
        if not tensor.requires_grad or tensor.is_leaf:
            continue
        # Autograd makes a view anew out of what it is of, since values there have changed.
        changed = tensor._base if tensor._is_view() else tensor
        if changed.is_leaf:
            continue

        def tell(_: Any) -> None:
            name = kind.name.lower()
            problem = (
                f"backward goes through a tensor that {name}_ has changed in place, of which "
                "autograd knows nothing, as if it had not been changed; use "
                f"{name}() without the underscore, or {name}_(tensor.detach().clone()) to look at"
            )
            if not is_mean:
                raise UsageError(problem)
            warn(problem)

        changed.register_hook(tell)


def _check_linear(kind: str, op: Any) -> None:
    if op not in (Average, Sum):
        raise UsageError(
            f"{kind} with op={op.name} has no gradient here; use Average or Sum, or detach() the "
            "tensor first"
        )


def _grad_name(name: str | None, index: int | None = None) -> str | None:
    if not name:
        return None
    return f"{name}.grad" if index is None else f"{name}.grad.{index}"


def _is_wanted(grad: Any) -> bool:
    """A gradient of integers means nothing; every rank leaves it out."""
    return bool(grad.is_floating_point() or grad.is_complex())


def _wanted(grads: Any) -> list[Any]:
    return [grad for grad in grads if _is_wanted(grad)]


def _in_place_of(grads: Any, results: Any) -> tuple[Any, ...]:
    """The results, and None where `_wanted` left a gradient out."""
    rest = iter(results)
    return tuple(next(rest) if _is_wanted(grad) else None for grad in grads)
