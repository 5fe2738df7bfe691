"""Marks for tests that need a newer torch than the oldest supported one. docs/parallel.md lists the differences."""

import pytest
import torch


def needs_torch_2_13(reason: str) -> pytest.MarkDecorator:
    """Skip a test on torch 2.11 and 2.12, for a `reason`."""
    return pytest.mark.skipif(torch.__version__ < "2.13", reason=f"needs torch 2.13: {reason}")
