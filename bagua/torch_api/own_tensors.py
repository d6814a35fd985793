"""What of a model is each rank's own: experts, and what a list on the model names.

Marks are on tensors, and a module may put another one in a buffer's place, as by `self.ema = 0.5 *
self.ema + ...`. So what has a mark is asked of names and modules before each use of marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from bagua.common.config import nearest
from bagua.common.errors import UsageError
from bagua.torch.own import keep_own
from bagua.torch_api.model_parallel.moe.experts import Experts

_LISTS = ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore")
_Named = Iterable[tuple[str, torch.Tensor]]


def mark_own(model: torch.nn.Module) -> None:
    """Marks parameters and buffers."""
    known = dict(model.named_parameters(remove_duplicate=False))
    _mark(model, [*known.items(), *model.named_buffers(remove_duplicate=False)])


def mark_own_buffers(model: torch.nn.Module) -> None:
    """The same, where parameters have not changed."""
    _mark(model, model.named_buffers(remove_duplicate=False))


def check_lists(model: torch.nn.Module) -> None:
    tensors = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for attribute in _LISTS:
        for name in getattr(model, attribute, ()):
            if name not in tensors:
                raise UsageError(
                    f"{attribute}: there is no parameter or buffer {name!r}{nearest(name, tensors)}"
                )


def _mark(model: torch.nn.Module, named: _Named) -> None:
    ignored = set(_ignored(model))
    if ignored:
        keep_own(tensor for name, tensor in named if name in ignored)
    # Afterwards, since somebody may name experts in a list, too.
    for module in model.modules():
        if isinstance(module, Experts):
            module.mark()


def _ignored(model: torch.nn.Module) -> Iterator[str]:
    for attribute in _LISTS:
        yield from getattr(model, attribute, ())
