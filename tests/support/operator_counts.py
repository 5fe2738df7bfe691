"""Count the operators that run, by name."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorCounts(TorchDispatchMode):
    """Counts operators within the context by the name of their schema, e.g. "c10d::allreduce_".

    If the model runs on a CPU, the operators of a backward are counted, too.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    def of(self, *names: str) -> int:
        """Return the count of operators that have one of `names`, which are names without namespace."""
        return sum(count for name, count in self.counts.items() if name.partition("::")[2] in names)

    def take(self) -> Counter[str]:
        """Return the counts since the last call, and reset them."""
        counts, self.counts = self.counts, Counter()
        return counts
