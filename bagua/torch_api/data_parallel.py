"""`DistributedDataParallel`: torch's, with Bagua's two arguments more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bagua.algorithms import find
from bagua.common.config import Config
from bagua.common.errors import UsageError
from bagua.common.world import world
from bagua.torch import grouped_broadcast_
from bagua.torch.own import is_own
from bagua.torch_api.algorithms.algorithm import AnyAlgorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.own_tensors import mark_own_buffers
from bagua.torch_api.training import Training, training_of
from bagua.torch_api.with_bagua import with_bagua

# Arguments of newer versions of torch's: about how torch exchanges, and those that do more.
_WITHOUT_EFFECT = ("skip_all_reduce_unused_params", "bucket_cap_mb_list", "batched_grad_copy")
_REFUSED = {
    "delay_all_reduce_named_params": "give such parameters an optimizer of their own",
    "param_to_hook_all_reduce": "give such parameters an optimizer of their own",
    "mixed_precision": "use torch.autocast",
    "device_mesh": "pass process_group=new_group(ranks)",
    "forward_sync_buffers": "say broadcast_buffers",
}


def _check_rest(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name in _REFUSED and value is not None:
            raise UsageError(f"{name} is torch's own: leave it out, and {_REFUSED[name]}")
        if name not in (*_REFUSED, *_WITHOUT_EFFECT):
            raise TypeError(f"DistributedDataParallel has no argument {name!r}")


class DistributedDataParallel(torch.nn.Module):
    """A module around `module`, which trains as under `module.with_bagua(optimizers, algorithm)`.

    Parameters that get no gradient are no trouble, so `find_unused_parameters` and `static_graph`
    have nothing to do. Nor have `bucket_cap_mb` (see the setting `bucket_mb`), `init_sync` (ranks
    begin equal in any case) and the others that are about how torch exchanges. What torch has for
    itself alone, a mixed precision, a mesh of devices, hooks of one parameter, is refused.

    Args:
        module: the module to train.
        device_ids: None, or the one device that the module is on.
        broadcast_buffers: in training, each forward pass begins with the first rank's buffers.
        process_group: of `new_group`, `from_torch_group` or torch.distributed.
        optimizers: those that step the module's parameters; an algorithm that exchanges something
            else than gradients needs them.
        algorithm: how replicas communicate; if not given, as the setting of this name says.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: AnyAlgorithm | None = None,
        *,
        init_sync: bool = True,
        static_graph: bool = False,
        **of_torch: Any,
    ) -> None:
        super().__init__()
        _check_rest(of_torch)
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"DistributedDataParallel wraps a module, not {module!r:.100}")
        if isinstance(module, DistributedDataParallel):
            raise UsageError("this module is distributed already; give the one inside, .module")
        if device_ids is not None and len(device_ids) > 1:
            raise UsageError(f"a rank has one device, not {len(device_ids)}: {device_ids}")
        if not any(param.requires_grad for param in module.parameters()):
            raise UsageError("no parameter of the module requires a gradient")
        self.module = with_bagua(module, optimizers, algorithm or _default(), process_group)
        self.broadcast_buffers = broadcast_buffers is not False
        self.require_backward_grad_sync = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.training and self.broadcast_buffers and self.require_backward_grad_sync:
            self._broadcast_buffers()
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In it `backward()` only accumulates; the next one outside exchanges."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            with contextlib.ExitStack() as stack:
                for attachment in training_of(self.module).attachments:
                    stack.enter_context(attachment.distributed.no_sync())
                yield
        finally:
            self.require_backward_grad_sync = before

    def _broadcast_buffers(self) -> None:
        attachments = training_of(self.module).attachments
        mark_own_buffers(self.module)
        buffers = [buffer for buffer in self.module.buffers() if not is_own(buffer)]
        if attachments and buffers:
            process_set = attachments[0].process_set
            grouped_broadcast_(buffers, process_set.ranks[0], process_set=process_set)

    @property
    def bagua_algorithm(self) -> Any:
        return self.module.bagua_algorithm

    @property
    def bagua_training(self) -> Training:
        return training_of(self.module)


def _default() -> AnyAlgorithm:
    wanted = world().config.algorithm
    return GradientAllReduceAlgorithm() if wanted == Config.algorithm else find(wanted)
