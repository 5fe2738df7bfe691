"""The tiny model and its batches, for tests of a user's training loop."""

import torch

from tests.support.tiny_model import Tiny

STEPS, MICRO, ROWS, LENGTH = 2, 2, 8, 8


def build(seed=0):
    torch.manual_seed(seed)
    return Tiny().double()


def batches():
    """Return tokens and labels [STEPS, ROWS, LENGTH]; the count of ignored labels differs between sequences."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (STEPS, ROWS, LENGTH + 1), generator=generator)
    labels = tokens[:, :, 1:].clone()
    for row in range(ROWS):
        labels[:, row, : row % 4] = -100
    return tokens[:, :, :-1], labels
