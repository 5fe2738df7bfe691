"""What a loader counts for the log: tokens of each source, documents longer than a row, and padding."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from titanplans.training.data.dataset import StepBatch


class Figures:
    """What a rank has read since it was last asked.

    Args:
        names: of the sources.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._forget()

    def _forget(self) -> None:
        self._places = 0
        self._tokens, self._long = [0] * len(self._names), [0] * len(self._names)

    def count(self, share: StepBatch) -> None:
        """Add what the rank has read of a step."""
        self._places += share.tokens.numel()
        for source, tokens in share.lengths:
            self._tokens[source] += tokens
        for source, number in enumerate(share.long):
            self._long[source] += number

    def take(self, readers: int) -> dict[str, float]:
        """Return what all ranks have read, of whom so many have read something else than the others; all ask together."""
        every = of_all_ranks([self._places, *self._tokens, *self._long])
        places, *counted = (sum(numbers) * readers // len(every) for numbers in zip(*every, strict=True))
        self._forget()
        tokens, long = counted[: len(self._names)], counted[len(self._names) :]
        found = {"data/padding(%)": 100 * (1 - sum(tokens) / max(places, 1))}
        found |= {f"data/tokens/{name}": number for name, number in zip(self._names, tokens, strict=True)}
        return found | {
            f"data/long_documents/{name}": n for name, n in zip(self._names, long, strict=True) if n
        }


class Flag:
    """Asks all ranks for a yes or no, each the same number of times, without waiting for their accelerators."""

    def __init__(self) -> None:
        self._group = None
        if _size() > 1 and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")

    def __call__(self, own: bool) -> bool:
        """Return whether any rank says yes."""
        flag = torch.tensor(own, dtype=torch.int32)
        if _size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)


def of_all_ranks(value: Any) -> list[Any]:
    """Return the ranks' values; all ask together."""
    gathered: list[Any] = [value] * _size()
    if len(gathered) > 1:
        dist.all_gather_object(gathered, value)
    return gathered


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
