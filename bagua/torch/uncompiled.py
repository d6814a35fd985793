"""What torch.compile is not to look into: it runs as it is, and what is around it is compiled."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """A function or method, with all that it calls.

    By what torch's own optimizers use: it imports the compiler, a second and 70 MB, when first
    called, as making an optimizer does. torch.compiler.disable does so here, also in the workers of
    a loader, which call nothing. A wrapper of our own would be compiled, and again for each use.
    """
    if isinstance(function, types.MethodType):
        bound = types.MethodType(uncompiled(function.__func__), function.__self__)
        return cast(_Function, bound)
    return cast(_Function, torch._disable_dynamo(function))
