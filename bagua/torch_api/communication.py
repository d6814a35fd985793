"""Collective operations on tensors that the caller has allocated, as in torch.distributed.

What counts is the number of elements, not the shape: the result of `allgather` may have the shape
(ranks, *shape) as well as (ranks * rows, ...). `src` and `dst` are ranks of `comm`, which is a
group or None for the world; ranks outside of it may make the call, too, and it does nothing.
Autograd does not see these operations; those of `bagua.torch` are differentiable.

Costs are of `bagua.torch`'s operations, with these exceptions: `reduce` costs an allreduce, and the
bitwise reductions, which the engine does not have, gather everything everywhere: n - 1 times the
bytes of the tensor per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua.common.errors import UsageError
from bagua.common.kinds import Kind
from bagua.common.world import barrier as _barrier
from bagua.torch import functions, ops
from bagua.torch_api.messages import recv, send
from bagua.torch_api.parts import flat, part, places, put, put_at, share
from bagua.torch_api.process_group import (
    BaguaProcessGroup,
    Communicator,
    _get_default_group,  # noqa: F401 - scripts have it from here
    from_torch_group,
    new_group,
    own_process_set,
    world_rank,
)
from bagua.torch_api.reduce_op import AnyOp, ReduceOp, bitwise, engines
from bagua.torch_api.requests import (
    from_all,
    gathered,
    kind_of,
    reduced,
    reduced_part,
    scattered,
    target_of,
    told_to_all,
)
from bagua.torch_api.world import (
    destroy_process_group,
    get_local_rank,
    get_local_size,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)

__all__ = [
    "BaguaProcessGroup",
    "ReduceOp",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "destroy_process_group",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]


def barrier(comm: Communicator = None) -> None:
    """Returns when every rank has called it."""
    if ranks := own_process_set(comm):
        _barrier(ranks)


# ---- one to all --------------------------------------------------------------------------------


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Communicator = None) -> None:
    """Copies `tensor` of rank `src` into everyone's."""
    broadcast_coalesced([tensor], src, comm)


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], src: int = 0, comm: Communicator = None
) -> None:
    """`broadcast` of several tensors as one request."""
    if ranks := own_process_set(comm):
        with told_to_all(Kind.BROADCAST, ranks):
            root = world_rank(ranks, src)
        ops.grouped_broadcast_(list(tensors), root, process_set=ranks)


def broadcast_object(obj: Any = None, src: int = 0, comm: Communicator = None) -> Any:
    """The object of rank `src` on every rank; it is pickled."""
    if ranks := own_process_set(comm):
        with told_to_all(Kind.BROADCAST, ranks):
            root = world_rank(ranks, src)
        return functions.broadcast_object(obj, root, process_set=ranks)
    return None


def scatter(
    send_tensor: torch.Tensor | None,
    recv_tensor: torch.Tensor,
    src: int,
    comm: Communicator = None,
) -> None:
    """Cuts `send_tensor` of rank `src` into equal parts, one for each rank.

    On other ranks it may be None.
    """
    if ranks := own_process_set(comm):
        put(recv_tensor, scattered(send_tensor, recv_tensor, recv_tensor.numel(), src, ranks))


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: Communicator = None) -> None:
    """`scatter` of parts of `count` elements: `src` has them all and keeps them, others get one."""
    if ranks := own_process_set(comm):
        mine = scattered(tensor, tensor, count, src, ranks)
        if ranks.rank() != src:
            put_at(tensor, 0, mine)


# ---- all to one --------------------------------------------------------------------------------


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor | None,
    dst: int,
    op: AnyOp = ReduceOp.SUM,
    comm: Communicator = None,
) -> None:
    """`allreduce` whose result only rank `dst` keeps; on other ranks `recv_tensor` may be None."""
    if ranks := own_process_set(comm):
        with told_to_all(kind_of(op), ranks):
            target = target_of(recv_tensor, dst, ranks)
        result = reduced(send_tensor, op, ranks)
        if target is not None:
            put(target, result)


def reduce_inplace(
    tensor: torch.Tensor, dst: int, op: AnyOp = ReduceOp.SUM, comm: Communicator = None
) -> None:
    """`reduce` in place; `tensor` changes on rank `dst` only."""
    reduce(tensor, tensor, dst, op, comm)


def gather(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor | None,
    dst: int,
    comm: Communicator = None,
) -> None:
    """Everyone's tensors, one after the other, on rank `dst`; elsewhere `recv_tensor` may be None.

    They have equal numbers of elements.
    """
    if ranks := own_process_set(comm):
        with told_to_all(Kind.ALLTOALL, ranks):
            target = target_of(recv_tensor, dst, ranks)
        everyone = gathered(flat(send_tensor), dst, ranks)
        if target is not None:
            put(target, everyone)


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: Communicator = None) -> None:
    """`gather` of `count` elements: on `dst`, part i is rank i's, its own is there already."""
    if ranks := own_process_set(comm):
        with told_to_all(Kind.ALLTOALL, ranks):
            target = target_of(tensor, dst, ranks)
            mine = part(tensor, 0 if target is None else count * dst, count)
        everyone = gathered(mine, dst, ranks)
        if target is not None:
            put(target, everyone)


# ---- all to all --------------------------------------------------------------------------------


def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: AnyOp = ReduceOp.SUM,
    comm: Communicator = None,
) -> None:
    """The reduction of everyone's `send_tensor`, the same bits on every rank."""
    if ranks := own_process_set(comm):
        put(recv_tensor, reduced(send_tensor, op, ranks))


def allreduce_inplace(
    tensor: torch.Tensor, op: AnyOp = ReduceOp.SUM, comm: Communicator = None
) -> None:
    """`allreduce` in place."""
    allreduce_coalesced_inplace([tensor], op, comm)


def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor], op: AnyOp = ReduceOp.SUM, comm: Communicator = None
) -> None:
    """`allreduce_inplace` of several tensors as one request."""
    if ranks := own_process_set(comm):
        if bitwise(op):
            for tensor in tensors:
                put(tensor, reduced(tensor, op, ranks))
        else:
            with told_to_all(Kind.ALLREDUCE, ranks):
                reduction = engines(op)
            ops.grouped_allreduce_(list(tensors), op=reduction, process_set=ranks)


def allgather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Communicator = None
) -> None:
    """Everyone's tensors, one after the other; they have equal numbers of elements."""
    if ranks := own_process_set(comm):
        put(recv_tensor, from_all(flat(send_tensor), ranks))


def allgather_inplace(tensor: torch.Tensor, comm: Communicator = None) -> None:
    """`allgather` into a tensor whose part i is rank i's."""
    if ranks := own_process_set(comm):
        with told_to_all(Kind.ALLGATHER, ranks):
            count = share(tensor, ranks)
        put(tensor, from_all(part(tensor, count * ranks.rank(), count), ranks))


def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: AnyOp = ReduceOp.SUM,
    comm: Communicator = None,
) -> None:
    """Part i of the reduction on rank i; the parts are equal."""
    if ranks := own_process_set(comm):
        put(recv_tensor, reduced_part(send_tensor, op, ranks))


def reduce_scatter_inplace(
    tensor: torch.Tensor, op: AnyOp = ReduceOp.SUM, comm: Communicator = None
) -> None:
    """`reduce_scatter`, with this rank's part at the beginning of `tensor`, the rest as before."""
    if ranks := own_process_set(comm):
        put_at(tensor, 0, reduced_part(tensor, op, ranks))


def alltoall(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Communicator = None
) -> None:
    """Part i of `send_tensor` goes to rank i, part i of `recv_tensor` came from it."""
    if ranks := own_process_set(comm):
        with told_to_all(Kind.ALLTOALL, ranks):
            share(send_tensor, ranks)
        put(recv_tensor, ops.alltoall(flat(send_tensor), process_set=ranks))


def alltoall_inplace(tensor: torch.Tensor, comm: Communicator = None) -> None:
    """`alltoall` in place."""
    alltoall(tensor, tensor, comm)


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Communicator = None,
) -> None:
    """`alltoall` of unequal parts: so many elements from this place on, for or from each rank."""
    if ranks := own_process_set(comm):
        with told_to_all(Kind.ALLTOALL, ranks):
            send = places(send_tensor, send_counts, send_displs, ranks, "send")
            receive = places(recv_tensor, recv_counts, recv_displs, ranks, "recv")
        blocks = [part(send_tensor, begin, count) for begin, count in send]
        splits = torch.tensor([count for _, count in send])
        out, received = ops.alltoall(torch.cat(blocks), splits, process_set=ranks)
        wanted = [count for _, count in receive]
        if received.tolist() != wanted:
            raise UsageError(f"alltoall_v: recv_counts are {wanted}, came {received.tolist()}")
        for (begin, _), block in zip(receive, out.split(wanted)):
            put_at(recv_tensor, begin, block)


def alltoall_v_inplace(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: Communicator = None
) -> None:
    """`alltoall_v` in place: what goes to a rank is replaced by as many elements that come."""
    alltoall_v(tensor, counts, displs, tensor, counts, displs, comm)
