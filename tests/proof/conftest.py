"""Seed torch's default generator before each test, so that random models do not depend on other tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
