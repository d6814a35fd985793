from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def hvd():
    import bagua.torch

    bagua.torch.init()
    return bagua.torch
