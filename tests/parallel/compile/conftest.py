"""Reset dynamo before each test, so that its counts start at zero."""

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
