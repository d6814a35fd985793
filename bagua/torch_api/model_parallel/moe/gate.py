"""Which expert gets which row.

Each expert has *capacity* places for the rows of one rank, so that what is exchanged has the same
size whatever the gate says. First choices take places before second ones, rows in their order; a
choice that finds no place is dropped. Expert e's place p is *slot* e * capacity + p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bagua.common.config import check_one_of
from bagua.common.errors import UsageError

_NOISES = ("RSample", "Jitter")
_JITTER = 1e-2


@dataclass(frozen=True)
class Routing:
    """Where the rows go; the first dimension of slots and weights is that of the choices."""

    slots: torch.Tensor  # (k, rows); of a choice that was dropped: one behind the last
    weights: torch.Tensor  # (k, rows), of the expert's output; 0 of a choice that was dropped
    capacity: int
    auxiliary_loss: torch.Tensor  # 1 where experts are used evenly, up to their number where not
    counts: torch.Tensor  # first choices for each expert, dropped ones included


class TopKGate(torch.nn.Module):
    """Chooses one or two experts for each row, by a linear layer and softmax in float32.

    With one, its output is weighted by the expert's probability (Switch, Fedus et al. 2021, sec.
    2); with two, by both probabilities over their sum (GShard, Lepikhin et al. 2020, sec. 2.2).

    Args:
        model_dim: the width of a row.
        num_experts: of all ranks.
        k: 1 or 2.
        capacity_factor: places for k choices of every row, times this, are spread over the experts.
        eval_capacity_factor: the same when not training.
        min_capacity: at least so many places for each expert.
        noisy_gate_policy: in training, `"Jitter"` multiplies what the gate sees by about 1, and
            `"RSample"` draws the last choice in proportion to the probabilities.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
    ) -> None:
        super().__init__()
        if k not in (1, 2) or k > num_experts:
            raise UsageError(f"k={k} of {num_experts} experts: a gate chooses 1 or 2 of them")
        for name, factor in (
            ("capacity_factor", capacity_factor),
            ("eval_capacity_factor", eval_capacity_factor),
        ):
            if not factor > 0:
                raise UsageError(f"{name} is above 0, not {factor}")
        if min_capacity < 0 or min_capacity != int(min_capacity):
            raise UsageError(f"min_capacity is a number of rows, 0 or more, not {min_capacity}")
        if noisy_gate_policy is not None:
            check_one_of("noisy_gate_policy", noisy_gate_policy, _NOISES)
        self.wg = torch.nn.Linear(model_dim, num_experts, bias=False)
        self.num_experts = num_experts
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy

    def forward(self, rows: torch.Tensor, used: torch.Tensor | None = None) -> Routing:
        """`used` says which rows count, as of a padded batch; the others go nowhere."""
        kept = rows.new_ones(len(rows), dtype=torch.bool) if used is None else used.bool().flatten()
        if len(kept) != len(rows):
            raise UsageError(f"used_token is of {len(kept)} rows, there are {len(rows)}")
        noise = self.noisy_gate_policy if self.training else None
        with torch.autocast(rows.device.type, enabled=False):
            # What pads may be anything, and 0 * NaN is NaN.
            seen = rows.float().masked_fill(~kept.unsqueeze(1), 0)
            if noise == "Jitter":
                seen = seen * torch.empty_like(seen).uniform_(1 - _JITTER, 1 + _JITTER)
            logits = torch.nn.functional.linear(seen, self.wg.weight.float())
        probabilities = logits.softmax(1)
        chosen = self._choices(logits, drawn=noise == "RSample")
        return self._routing(probabilities, chosen, kept)

    def capacity(self, rows: int) -> int:
        """Places of each expert for so many rows of this rank."""
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        return max(math.ceil(self.k * factor * rows / self.num_experts), self.min_capacity)

    def _choices(self, logits: torch.Tensor, drawn: bool) -> torch.Tensor:
        """(k, rows): numbers of experts."""
        chosen: list[torch.Tensor] = []
        for choice in range(self.k):
            scores = logits.detach()
            if drawn and choice == self.k - 1:  # the largest after Gumbel's noise is a sample
                scores = scores - torch.empty_like(scores).exponential_().log()
            for before in chosen:
                scores = scores.scatter(1, before.unsqueeze(1), -math.inf)
            chosen.append(scores.argmax(1))
        return torch.stack(chosen)

    def _routing(
        self, probabilities: torch.Tensor, chosen: torch.Tensor, kept: torch.Tensor
    ) -> Routing:
        experts, rows = self.num_experts, len(kept)
        capacity = self.capacity(rows)
        one_hot = torch.nn.functional.one_hot(chosen, experts) * kept.view(1, rows, 1)
        # One after the other: all first choices, then all second ones.
        places = one_hot.view(-1, experts).cumsum(0).view_as(one_hot) - one_hot
        place = (places * one_hot).sum(2)
        fits = kept & (place < capacity)
        slots = torch.where(fits, chosen * capacity + place, experts * capacity)
        weights = probabilities.t().gather(0, chosen) * fits
        if self.k == 2:
            weights = weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)
        counts = one_hot[0].sum(0)
        # Of each expert the share of rows and the mean probability (GShard, sec. 2.2).
        total = kept.sum().clamp(min=1)
        mean = (probabilities * kept.unsqueeze(1)).sum(0) / total
        return Routing(slots, weights, capacity, experts * (mean * counts / total).sum(), counts)
