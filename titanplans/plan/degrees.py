"""The degrees of parallelism, and their relation to the number of processes."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from titanplans.errors import ParallelError, either, near_multiples


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The degrees of parallelism; the product of all except `ep` is the number of processes.

    At most one may be -1: it is inferred from the number of processes. `as_sizes` returns the degrees in the order of the
    mesh's axes.
    """

    dp_replicate: int = 1
    """Replicas of the (sharded) model, each with different data."""
    dp_shard: int = -1
    """Ranks over which FSDP shards the parameters, each with different data."""
    cp: int = 1
    """Ranks over which the tokens of a sequence are sharded (context parallelism)."""
    tp: int = 1
    """Ranks over which the weights of a layer are sharded (tensor parallelism)."""
    pp: int = 1
    """Stages of consecutive layers (pipeline parallelism)."""
    ep: int = 1
    """Ranks that experts are distributed over, taken from tp, cp and dp_shard, in this order. 1: no expert parallelism; TP
    splits each expert's width instead."""

    def __post_init__(self) -> None:
        for name, degree in (*self._items(), ("ep", self.ep)):
            if not isinstance(degree, int) or isinstance(degree, bool):
                raise ParallelError(
                    f"{name} = {degree!r}: a degree is a whole number, 1 or more, or -1 to infer it"
                )
            if degree < 1 and (degree != -1 or name == "ep"):
                inferred = "" if name == "ep" else ", or -1 to infer it"
                raise ParallelError(f"{name} = {degree}: a degree is 1 or more{inferred}")
        to_infer = [name for name, degree in self._items() if degree == -1]
        if len(to_infer) > 1:
            raise ParallelError(
                f"{' and '.join(to_infer)} are -1, and only one degree can be inferred: "
                f"set {' and '.join(to_infer[1:])} to a number"
            )

    @property
    def tp_cp(self) -> int:
        """Number of tp x cp ranks, which work on the same batch and split the heads of a mixer."""
        return self.tp * self.cp

    def as_sizes(self) -> dict[str, int]:
        """Return the degrees by name, outermost axis of the mesh first."""
        return {name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}

    def resolve(self, world_size: int) -> "Degrees":
        """Return the degrees with a -1 replaced by the inferred degree, after checking their product.

        Raises:
            ParallelError: the product is not `world_size`, and no inferred degree can make it equal.
        """
        product = math.prod(degree for _, degree in self._items() if degree != -1)
        factors = f"{' x '.join(f'{n} {d}' for n, d in self._items() if d != -1)} = {product}"
        inferred = next((name for name, degree in self._items() if degree == -1), None)
        if inferred is not None:
            if world_size % product:
                raise ParallelError(
                    f"{inferred} = -1 can't be inferred: {_processes(world_size)} can't be divided by {factors}; "
                    f"start {near_multiples(world_size, product)}, or choose degrees whose product divides {world_size}"
                )
            return replace(self, **{inferred: world_size // product})
        if product != world_size:
            raise ParallelError(
                f"{factors}, but there are {_processes(world_size)}: {self._remedy(world_size)}"
            )
        return self

    def refuse_experts(self) -> None:
        """Refuse an `ep` that does not fit the other degrees; none of them may be -1.

        Raises:
            ParallelError: tp does not divide ep, or ep does not divide dp_shard x cp x tp.
        """
        ranks = self.dp_shard * self.cp * self.tp
        if self.ep == 1 or (ranks % self.ep == 0 and self.ep % self.tp == 0):
            return
        works = [n for n in range(1, ranks + 1) if ranks % n == 0 and n % self.tp == 0]
        raise ParallelError(
            f"ep = {self.ep} has to be 1, or a divisor of dp_shard x cp x tp = {self.dp_shard} x {self.cp} x {self.tp} "
            f"and a multiple of tp = {self.tp}: {either(sorted({1, *works}))} would work"
        )

    def __str__(self) -> str:
        cp, ep = f" x cp {self.cp}" if self.cp > 1 else "", f", ep {self.ep}" if self.ep > 1 else ""
        pp = f", pp {self.pp}" if self.pp > 1 else ""
        return f"tp {self.tp}{cp}{ep}{pp}"

    def _remedy(self, world_size: int) -> str:
        product = math.prod(degree for _, degree in self._items())
        ways = [
            f"set {name} to {world_size * degree // product}"
            for name, degree in self._items()
            if name in ("dp_shard", "tp") and world_size * degree % product == 0
        ]
        return ", or ".join([*ways, f"start {_processes(product)}"])

    def _items(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "ep"]


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
