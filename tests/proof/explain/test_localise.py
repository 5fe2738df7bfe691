"""A wrong tensor's error is diagnosed from its values."""

import torch

from titanplans.proof.explain.localise import diagnose


def test_errors_are_diagnosed_from_values():
    right = torch.randn(6, dtype=torch.float64)
    summands = [torch.randn_like(right), torch.randn_like(right)]
    summands.append(right - sum(summands))

    def reason(value, local_tensors=None):
        return diagnose(value, local_tensors, right, 1e-12, 3)

    assert "not summed" in reason(summands[0], summands)
    assert "exactly 3 times too large: once for each rank" in reason(right * 3)
    assert "exactly 1/3 of the right one" in reason(right / 3)
    assert "exactly 2 times the right one" in reason(right * 2)
    assert "exactly -1 times" in reason(-right)
    assert reason(torch.zeros(6)) == "all zeros"
    assert "of shape (5,), not (6,)" in reason(right[:5])
    assert reason(right * 3 + 1e-6) == "", "almost 3 times is not exactly 3 times"
    assert reason(right.flip(0)) == ""
