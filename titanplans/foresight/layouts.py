"""`JobLayout` and `candidates`: the layouts of a job on a number of GPUs.

A layout is a choice of degrees, of what is recomputed, and of the batch of a rank.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from titanplans.plan.degrees import Degrees

MODES = ("none", "selective", "full")
"""What is recomputed, from the fastest and largest to the slowest and smallest."""


class JobLayout(NamedTuple):
    """A layout of a job."""

    degrees: Degrees
    mode: str
    """What is recomputed: activation_checkpoint.mode."""
    batch: int
    """training.local_batch_size"""
    sequences: int
    """training.global_batch_size"""

    @property
    def batches(self) -> int:
        """The number of batches whose gradients a step accumulates."""
        return self.sequences // (self.batch * self.degrees.dp_replicate * self.degrees.dp_shard)

    def with_batches(self, batches: int) -> "JobLayout":
        """Return the layout with this number of batches in a step."""
        sequences = batches * self.batch * self.degrees.dp_replicate * self.degrees.dp_shard
        return self._replace(sequences=sequences)

    def settings(self) -> dict[str, dict[str, int | str]]:
        """Return the keys of a job that set this layout, by section."""
        degrees = self.degrees
        recomputation: dict[str, int | str] = {"mode": self.mode}
        if self.mode == "selective":
            recomputation["selective_ac_option"] = "op"
        return {
            "training": {"local_batch_size": self.batch, "global_batch_size": self.sequences},
            "parallelism": {
                "data_parallel_shard_degree": degrees.dp_shard,
                "tensor_parallel_degree": degrees.tp,
                "context_parallel_degree": degrees.cp,
                "expert_parallel_degree": degrees.ep,
                "pipeline_parallel_degree": degrees.pp,
            },
            "activation_checkpoint": recomputation,
        }

    def __str__(self) -> str:
        return f"fsdp {self.degrees.dp_shard}, {self.degrees}, batch {self.batch}, recomputation {self.mode}"

    def options(self) -> list[str]:
        """Return the options of a job that set this layout, such as "training.local_batch_size=2"."""
        return [
            f"{section}.{key}={value}"
            for section, keys in self.settings().items()
            for key, value in keys.items()
        ]


class Excluded(NamedTuple):
    """Degrees or layouts that are not among the best, and why."""

    degrees: Degrees
    why: str
    mode: str | None = None
    """What is recomputed; None: they are excluded whatever is recomputed."""

    @property
    def what(self) -> str:
        """What is excluded, in words."""
        return str(self.degrees) if self.mode is None else f"{self.degrees}, recomputation {self.mode}"

    @property
    def has_one_axis(self) -> bool:
        """Whether at most one of the degrees besides data parallelism is above 1."""
        degrees = self.degrees
        return sum(each > 1 for each in (degrees.tp, degrees.cp, degrees.ep, degrees.pp)) < 2


def candidates(gpus: int, sequences: int, replicas: int = 1) -> Iterator[Degrees | Excluded]:
    """Yield all degrees whose product is `gpus`, without expert parallelism; those that do not suit the batch as `Excluded`.

    Args:
        gpus: the number of GPUs.
        sequences: the sequences of a step.
        replicas: parallelism.data_parallel_replicate_degree.
    """
    shared = gpus // replicas
    for tp, cp, pp in product(divisors(shared), repeat=3):
        if shared % (tp * cp * pp):
            continue
        degrees = Degrees(dp_replicate=replicas, dp_shard=shared // (tp * cp * pp), tp=tp, cp=cp, pp=pp)
        batches = degrees.dp_replicate * degrees.dp_shard
        if sequences % batches:
            yield Excluded(
                degrees, f"{sequences} sequences can't be divided by {batches} data-parallel ranks"
            )
        elif pp > sequences // batches:
            yield Excluded(
                degrees,
                f"a data-parallel rank has only {sequences // batches} sequences for {pp} stages",
            )
        else:
            yield degrees


def with_experts(degrees: Degrees, experts: bool) -> Iterator[Degrees]:
    """Yield `degrees` with each possible degree of expert parallelism; `experts`: whether the model has experts."""
    for ep in divisors(degrees.dp_shard * degrees.cp * degrees.tp) if experts else (1,):
        if ep == 1 or ep % degrees.tp == 0:
            yield replace(degrees, ep=ep)


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, the smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]
