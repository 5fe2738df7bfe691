"""Each test counts what dynamo does from nothing."""

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
