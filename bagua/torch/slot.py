"""A *slot*: one parameter's place in a bucket.

Its `view` looks at the bucket's arena with the parameter's shape and strides. After an exchange the
parameter's gradient is another tensor that does, with a storage of its own: users may make theirs
look elsewhere (`grad.data = ...`), or move it with everything that has its storage
(`grad.share_memory_()`). On a device, where nothing moves it, the storage is the arena's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bagua.algorithms import Algorithm

if TYPE_CHECKING:
    from bagua.torch.buckets import Bucket


class Slot:
    """One parameter's place in a bucket."""

    __slots__ = (
        "algorithm",
        "bucket",
        "exact",
        "given",
        "index",
        "made_dense",
        "may_be_sparse",
        "name",
        "notice",
        "number",
        "param",
        "residuals",
        "twice",
        "view",
    )

    def __init__(self, name: str, param: torch.Tensor, number: int) -> None:
        self.name = name
        self.number = number  # in the order of the optimizer's parameters
        self.param = param
        self.bucket: Bucket | None = None  # None: this gradient travels alone, see loose.py
        self.index = -1
        self.view: torch.Tensor = torch.empty(0)
        self.given = self.view  # the same memory, as users get it
        self.notice: Any = None  # the engine's hook
        self.algorithm = Algorithm()  # of this parameter
        self.exact = True  # it travels as it is, whatever the algorithm
        # What encoding has lost of this rank's values, and of the means that it encodes; or what
        # the bucket keeps instead.
        self.residuals: list[torch.Tensor] = []
        self.twice = False  # one backward pass has contributed to it more than once
        self.made_dense = False  # if its gradient is sparse
        self.may_be_sparse = False  # then its gradient is none of the bucket's business

    def dense_gradient(self) -> torch.Tensor | None:
        """What backward has left; where it is sparse and shall not be, it becomes dense."""
        grad = self.param.grad
        if self.made_dense and grad is not None and grad.is_sparse:
            grad = self.param.grad = grad.to_dense()
        return grad

    def enter(self, bucket: Bucket, index: int, view: torch.Tensor) -> None:
        self.bucket, self.index, self.view = bucket, index, view
        self._give()

    def _give(self) -> None:
        place = self.bucket.alias(self.index)  # type: ignore[union-attr]
        self.given = place.as_strided(self.view.shape, self.view.stride()).detach()
        self.notice.bind(self.bucket.arena, self.index, self.given)  # type: ignore[union-attr]

    def is_in_arena(self, grad: torch.Tensor | None) -> bool:
        """Whether what is written to this gradient is written there."""
        return (
            grad is not None
            and grad.layout == torch.strided
            and in_memory_like(self.view, grad)
            and grad.data_ptr() == self.view.data_ptr()
        )

    def deliver(self) -> None:
        """Makes what is in the arena the parameter's gradient."""
        if not self.is_in_arena(self.given):
            self._give()
        self.param.grad = self.given

    def leave(self) -> None:
        self.bucket = None
        self.notice.unbind()


def in_memory_like(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether bytes mean the same in the other tensor's memory."""
    return (
        tensor.dtype == view.dtype
        and tensor.device == view.device
        and tensor.shape == view.shape
        and tensor.stride() == view.stride()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def view_like(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The slice with the parameter's shape, and its strides where they have no gaps."""
    strided = torch.empty_strided(param.shape, param.stride(), device="meta")
    dense = param.numel() == 0 or strided.untyped_storage().size() == (
        param.numel() * strided.element_size()
    )
    return flat.as_strided(param.shape, param.stride()) if dense else flat.view(param.shape)
