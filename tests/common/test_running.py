"""What a rank makes of its share of a machine."""

from types import SimpleNamespace

import pytest

from bagua.common.running import World


@pytest.mark.parametrize(
    ("ranks_here", "ranks", "cores", "busy", "overlaps"),
    [
        (2, 2, 2, 1, True),
        (2, 2, 2, 2, False),  # an exchange would take what computes
        (2, 4, 2, 2, True),  # other machines are waited for
        (8, 8, 8, 0, True),  # devices compute
        (8, 8, 0, 0, False),  # more ranks than cores
    ],
)
def test_whether_an_exchange_pays_while_the_model_computes(
    ranks_here, ranks, cores, busy, overlaps
):
    def asked(overlap):
        config = SimpleNamespace(overlap=overlap)
        rank = SimpleNamespace(config=config, local_size=ranks_here, size=ranks, core_count=cores)
        return World.overlaps(rank, busy)

    assert [asked("auto"), asked("always"), asked("never")] == [overlaps, True, False]
