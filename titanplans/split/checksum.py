"""A number for the bytes of a tensor, by which ranks find out whether theirs are equal."""

import torch

PRIME = 2**61 - 1
"""A sum modulo a power of two would lose its highest bits, such as the sign of a number."""
_PIECE = 2**24
"""Bytes that are summed at a time."""


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> int:
    """Return the sum of all 8-byte words of `tensor`, each times an odd number of its place; 61 bits."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        # A copy, of whole words: a tensor may begin between two.
        words = torch.nn.functional.pad(piece, (0, -len(piece) % 8)).clone().view(torch.int64)
        place = torch.arange(start // 8, start // 8 + len(words), device=words.device) * 2 + 1
        total += int(words.mul_(place).sum())
    return total % PRIME
