"""`MoE`: rows go to the experts that a gate chooses for them, and come back.

Cost: two alltoalls forward and two backward, of the capacity's rows each: about k *
capacity_factor times the input.
"""

from __future__ import annotations

from typing import Any

import torch

from bagua.common.errors import UsageError
from bagua.torch import alltoall
from bagua.torch_api.model_parallel.moe.experts import Experts
from bagua.torch_api.model_parallel.moe.gate import Routing, TopKGate
from bagua.torch_api.process_group import Communicator, own_process_set, process_set_of


class MoE(torch.nn.Module):
    """A layer of experts, spread over all ranks of a group.

    Each rank has `num_local_experts` of them; rank r has the experts from r * num_local_experts on.
    `with_bagua` and `DistributedOptimizer` leave their parameters to the rank that has them, whose
    gradients are those of the mean of all ranks' losses, like everybody's; so an optimizer that
    sums gradients of ranks is an error. All ranks run the layer equally often, in training and in
    evaluation; they may have different numbers of rows, or none.

    Returns the output, the auxiliary loss and how many rows chose each expert first. Add the loss,
    times something like 0.01, to that of the model: it is least where experts are used evenly.

    A norm over all gradients differs between ranks here, so clip those of experts by themselves.

    Args:
        hidden_size: the width of a row; everything before is the batch.
        expert: a module that keeps the width, and treats each row by itself. Every expert begins as
            a copy of it.
        num_local_experts: on each rank.
        k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy: of `TopKGate`.
        output_dropout_prob: dropout of the output.
        process_group: the ranks that share the experts; all ranks if None.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: torch.nn.Module,
        num_local_experts: int = 1,
        k: int = 1,
        output_dropout_prob: float = 0.0,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
        process_group: Communicator = None,
    ) -> None:
        super().__init__()
        if num_local_experts < 1 or num_local_experts != int(num_local_experts):
            raise UsageError(f"num_local_experts is at least 1, not {num_local_experts}")
        ranks = own_process_set(process_group)
        if ranks is None:
            raise UsageError("this rank is not in the layer's process_group")
        self.num_local_experts = num_local_experts
        self.num_experts = num_local_experts * ranks.size()
        self.process_group = process_group
        self.gate = TopKGate(
            hidden_size,
            self.num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
        )
        self.experts = Experts(expert, num_local_experts)
        self.dropout = torch.nn.Dropout(output_dropout_prob)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing: Routing = self.gate(rows, used_token)
        answers = self._asked(_dispatched(rows, routing, self.num_experts), routing.capacity)
        output = _combined(answers, routing).to(hidden_states.dtype).view_as(hidden_states)
        return self.dropout(output), routing.auxiliary_loss, routing.counts

    def _asked(self, mine: torch.Tensor, capacity: int) -> torch.Tensor:
        """What the experts of all ranks make of the rows in my slots."""
        ranks = process_set_of(self.process_group)
        if self.num_local_experts * ranks.size() != self.num_experts:
            raise UsageError(
                f"this layer's {self.num_experts} experts were made on "
                f"{self.num_experts // self.num_local_experts} ranks, here are {ranks.size()}"
            )
        local, width = self.num_local_experts, mine.shape[1]
        rows, counts = alltoall(mine, [local * capacity] * ranks.size(), process_set=ranks)
        blocks = [
            block.view(local, len(block) // local, width) for block in rows.split(counts.tolist())
        ]
        # The loss of every rank is a part of their mean: parameters get so much less, rows do not.
        asked = _gradient_times(torch.cat(blocks, 1), ranks.size())
        answers = _gradient_times(self.experts(asked), 1.0 / ranks.size())
        if answers.shape != asked.shape:
            raise UsageError(
                f"an expert keeps the shape of its rows; of {tuple(asked.shape[1:])} it made "
                f"{tuple(answers.shape[1:])}"
            )
        back = torch.split(answers, [block.shape[1] for block in blocks], 1)
        rows = torch.cat([block.reshape(-1, width) for block in back])
        returned: torch.Tensor = alltoall(rows, counts.tolist(), process_set=ranks)[0]
        return returned


def _dispatched(rows: torch.Tensor, routing: Routing, experts: int) -> torch.Tensor:
    """The rows in their slots, zeros in those that are free."""
    slots = rows.new_zeros(experts * routing.capacity + 1, rows.shape[1])
    for places in routing.slots:
        slots.index_copy_(0, places, rows)
    return slots[:-1]


def _combined(answers: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The weighted sum of what each row was answered."""
    padded = torch.nn.functional.pad(answers, (0, 0, 0, 1))
    parts = [
        padded.index_select(0, places) * weights.unsqueeze(1).to(answers.dtype)
        for places, weights in zip(routing.slots, routing.weights)
    ]
    return torch.stack(parts).sum(0)


def _gradient_times(values: torch.Tensor, factor: float) -> torch.Tensor:
    """The same values; gradients are multiplied."""
    same: torch.Tensor = _GradientTimes.apply(values, factor)  # type: ignore[no-untyped-call]
    return same


class _GradientTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None
