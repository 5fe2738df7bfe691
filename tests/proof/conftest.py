"""Seed the default generator, from which these tests draw models: other tests have no influence."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
