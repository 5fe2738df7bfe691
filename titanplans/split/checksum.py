"""A checksum of a tensor's bytes, with which ranks compare their tensors."""

import torch

PRIME = 2**61 - 1
"""A prime, because a sum modulo a power of two would lose the highest bits, such as signs."""
_CHUNK = 2**24
"""Bytes that are summed at a time."""


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> int:
    """Return the sum modulo `PRIME` of the 8-byte words of `tensor`, each times an odd number that grows with its index."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, len(data), _CHUNK):
        chunk = data[start : start + _CHUNK]
        # A copy, because `mul_` works in place and a tensor's storage may not begin at a word boundary.
        words = torch.nn.functional.pad(chunk, (0, -len(chunk) % 8)).clone().view(torch.int64)
        factor = torch.arange(start // 8, start // 8 + len(words), device=words.device) * 2 + 1
        total += int(words.mul_(factor).sum())
    return total % PRIME
