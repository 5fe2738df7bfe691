"""What a loader counts for the log: tokens of each source, documents longer than a row, and padding."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from titanplans.split.objects import of_all
from titanplans.training.data.dataset import StepBatch


class Figures:
    """What a rank has read since it was last asked.

    Args:
        names: of the sources.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._found = names, Counter[str]()

    def count(self, share: StepBatch) -> None:
        """Add what the rank has read of a step."""
        self._found["places"] += share.tokens.numel()
        for source, tokens in share.lengths:
            self._found[f"tokens/{self._names[source]}"] += tokens
        for source, number in enumerate(share.long):
            self._found[f"long_documents/{self._names[source]}"] += number

    def take(self, readers: int) -> dict[str, float]:
        """Return what all ranks have read, `readers` of them different data. Collective."""
        every = of_all(self._found)
        self._found = Counter()
        of = {name: n * readers // len(every) for name, n in sum(every, Counter[str]()).items()}
        tokens = {f"data/tokens/{name}": of.get(f"tokens/{name}", 0) for name in self._names}
        long = {f"data/{name}": n for name, n in of.items() if name.startswith("long_documents/")}
        padding = 100 * (1 - sum(tokens.values()) / max(of.get("places", 0), 1))
        return {"data/padding(%)": padding, **tokens, **long}


class Flag:
    """Combines a yes or no of each rank, without waiting for accelerators. Collective."""

    def __init__(self) -> None:
        self._asks = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if self._asks and dist.get_backend() != "gloo" else None

    def __call__(self, own: bool) -> bool:
        """Return whether any rank says yes."""
        flag = torch.tensor(own, dtype=torch.int32)
        if self._asks:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)
