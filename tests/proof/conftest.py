"""Models of these tests are drawn from the default generator: the same whatever ran before."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
