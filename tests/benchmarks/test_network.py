"""What slow links are told to carry, against a count of messages."""

from __future__ import annotations

import pytest
import torch

from benchmarks.network import Figure, flat_ring, least, report, verify


def sent_over_ring(nbytes: int, hosts: int, ranks: int, dealt: bool) -> float:
    """By the first host: each rank sends a chunk to the right in each of 2 (n-1) steps."""
    n = hosts * ranks
    host_of = [rank % hosts if dealt else rank // ranks for rank in range(n)]
    leaving = [rank for rank in range(n) if host_of[rank] == 0 and host_of[(rank + 1) % n] != 0]
    return len(leaving) * 2 * (n - 1) * nbytes / n


@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize(("hosts", "ranks"), [(1, 3), (2, 1), (2, 2), (3, 2), (4, 1)])
def test_a_flat_ring_sends_what_leaves_a_host(hosts, ranks, dealt):
    sent = sent_over_ring(1200, hosts, ranks, dealt)
    assert flat_ring(1200, hosts, ranks, dealt) == pytest.approx(sent)


def test_two_hosts_must_send_the_vector_once():
    assert [least(1200, hosts) for hosts in (1, 2, 3)] == pytest.approx([0, 1200, 1600])


def test_a_link_that_carried_all_it_could_was_busy():
    # In 2 s, and 100 at once that it had saved.
    assert Figure(2.0, 1100, 500, 100).busy() == pytest.approx(1)
    assert Figure(4.0, 1050, 500, 100).busy() == pytest.approx(0.5)


def test_a_report_tells_bytes_and_the_busy_share():
    row = {"ring": Figure(0.2, 1.5e6, 1e7, 0)}
    lines = report({"1000000": row}, 2, 2).splitlines()
    assert "must send 1.00 MB, in 100.00 ms; a flat ring of 4 ranks: 1.50 MB" in lines[0]
    told = "200.00 ms 1.50 MB 1.50 x the least 75.0% busy"
    assert lines[1].split() == ["ring", *told.split()]


def test_a_wrong_sum_is_no_figure():
    def as_of_three(tensor: torch.Tensor) -> None:
        tensor.mul_(3).add_(1 + 2)  # of rank 0, and what ranks 1 and 2 have more than it

    tensor = torch.empty(3000)
    verify(as_of_three, tensor, 0, 3)
    assert not tensor.any()
    with pytest.raises(RuntimeError, match="rank 0: 3000 of 3000 sums are wrong"):
        verify(lambda tensor: None, tensor, 0, 3)
    with pytest.raises(RuntimeError, match="1 of 3000"):
        verify(lambda tensor: (as_of_three(tensor), tensor[7].add_(1)), tensor, 0, 3)
