"""What autograd is given of an optimizer, and holds on to no longer than it must."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from bagua.torch.uncompiled import uncompiled

if TYPE_CHECKING:
    from bagua.torch.gradients import Gradients


def on_gradient(gradients: Gradients) -> Any:
    """The hook of every parameter; refers to nothing, since torch sees no cycles through hooks."""
    reference = weakref.ref(gradients)

    @uncompiled
    def decide(param: torch.Tensor) -> None:
        self = reference()
        if self is not None:
            self.decide(param)

    return decide


class End:
    """Called at the end of one backward pass, and forgotten there, or when the pass has raised."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients

    @uncompiled
    def __call__(self) -> None:
        self._gradients.end_backward()


def on_forgotten(gradients: Gradients) -> Any:
    """Called when an `End` has been forgotten."""
    reference = weakref.ref(gradients)

    @uncompiled
    def call(_: Any) -> None:
        self = reference()
        if self is not None:
            self.notice_failure()

    return call
