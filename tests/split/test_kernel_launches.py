"""A split step launches the kernels of the unsplit step, collectives, a copy for each gather or scatter, and `EXTRAS`."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch.distributed.tensor import Shard

from tests import zoo
from tests.support.kernel_launches import COLLECTIVES, count, step
from titanplans import apply_plan
from titanplans.plan.resolve import ResolvedPlan
from titanplans.proof.ranks.threads import Pool
from titanplans.split.layout import Layout
from titanplans.styles.base import direct_parameters
from titanplans.styles.rowwise import Rowwise
from titanplans.styles.rowwise_in_region import RowwiseInRegion
from titanplans.styles.split_norm import SplitNorm
from titanplans.styles.unsplit import Unsplit

DEGREE = 2


class Split(NamedTuple):
    """A split model after its step, and the launches in it."""

    model: torch.nn.Module
    plan: ResolvedPlan
    layouts: dict[str, Layout]
    counts: Counter


class Extra(NamedTuple):
    """Kernels that a split step launches beyond those of the unsplit step, with the reason."""

    why: str
    launches: Callable[[Split], int]


def of_layout(launches: Callable[[Layout], int]) -> Callable[[Split], int]:
    return lambda split: sum(map(launches, split.layouts.values()))


def rows_of_replicas(layout: Layout) -> int:
    """Return the launches for a rank's rows of a replica: a slice for one run of rows; for more, also copies and zeros."""
    if layout.rows is None or isinstance(layout.placement, Shard):
        return 0
    runs = len(layout.rows.runs)
    return 1 if runs == 1 else runs + 2


def exchanged_rows(layout: Layout) -> int:
    if layout.rows is None or not isinstance(layout.placement, Shard):
        return 0
    return 2 + sum(run.ranks_per_slice > 1 for run in layout.rows.runs) * DEGREE // 2


def norms(split: Split) -> int:
    split_norms = [style for style in split.plan.styles.values() if isinstance(style, SplitNorm)]
    fused = sum(n for (name, caller), n in split.counts.items() if name == "aten::sqrt_" and caller in RATIOS)
    return 19 * fused + 6 * sum(style.statistic is not None for style in split_norms)


def biases(split: Split) -> int:
    kinds = (Rowwise, RowwiseInRegion)
    rowwise = (entry for entry in split.plan.entries if isinstance(entry.style, kinds))
    return sum(entry.parameter is None and "bias" in direct_parameters(entry.module) for entry in rowwise)


def embedded(split: Split) -> int:
    calls = sum(
        n for (name, caller), n in split.counts.items() if (name, caller) == ("aten::embedding", ROWS)
    )
    has_padding = any(getattr(module, "padding_idx", None) is not None for module in split.model.modules())
    return (11 + 3 * has_padding) * calls


JOINING = ("cyclic_flow_attention", "gated_deltanet")
RATIOS = ("root_mean_square.py _RootRatio.forward",)
ROWS = "vocab_embedding.py _with_vocabulary_shard.<locals>.forward"
EXTRAS = (
    Extra("a loss over shards of the vocabulary: its own operators instead of four", lambda split: 43),
    Extra(
        "token ids of an embedding: checked, shifted to the local rows; zeros for the rows of other ranks",
        embedded,
    ),
    Extra("a norm over a split width: the ratio of two roots, forward and backward", norms),
    Extra("a bias after a sum over the ranks, so not in one kernel with the product", biases),
    Extra(
        "a bias that is divided by the ranks before a sum, and its gradient",
        of_layout(lambda x: 2 * (x.divided_by > 1)),
    ),
    Extra("a rank's rows of a replicated parameter", of_layout(rows_of_replicas)),
    Extra(
        "rows of a packed weight: copied before and after the exchange",
        of_layout(exchanged_rows),
    ),
    Extra(
        "a stream that begins at the first block: a shard is sliced, nothing is sent",
        lambda split: split.plan.begins_at is not None,
    ),
    Extra(
        "a replicated mixer: a shard is sliced, nothing is sent",
        lambda split: 2 * sum(type(style) is Unsplit for style in split.plan.styles.values()),
    ),
    Extra(
        "the load-balancing loss that every rank computes in full: its gradient divided by the ranks",
        lambda split: any(
            "count_once.<locals>.computed.<locals>" in str(caller) for _, caller in split.counts
        ),
    ),
    Extra(
        "RetNet's decays of the local heads, computed outside of the kernel",
        lambda split: 6 * len(split.model.model.layers) if split.model.config.model_type == "retnet" else 0,
    ),
    Extra(
        "weights that a mixer concatenates for one call: a copy of each slice of the gradient",
        lambda split: 3 * len(split.model.model.layers) if split.model.config.model_type in JOINING else 0,
    ),
)

COVERING = (
    *("gla", "llama", "gemma3_text", "gemma3", "tiny", "mixtral", "gpt_oss", "olmo2", "mamba2", "gsa"),
    *("gpt2", "falcon", "bitnet", "retnet", "cat", "yoco", "rodimus", "gated_deltaproduct"),
)
"""Together these have every style and every extra."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(torch.device("cpu")) as pool:
        yield pool


def check(pool: Pool, name: str, sequence_parallel: bool) -> None:
    inputs = zoo.inputs(name)
    unsplit = count(zoo.build(name, dtype=torch.float32), inputs)

    def work(rank) -> Split | None:
        model = zoo.build(name, dtype=torch.float32)
        applied = apply_plan(model, rank.mesh, sequence_parallel=sequence_parallel, plan=zoo.plan(name))
        if rank.is_first:
            return Split(model, applied.resolved, applied.layouts, count(model, inputs))
        for _ in range(2):
            step(model, inputs)
            model.zero_grad()
        return None

    split = pool.run(DEGREE, work)
    assert split is not None
    sent = Counter({name: n for (name, _), n in split.counts.items() if name.startswith(COLLECTIVES)})
    copied = sum(n for name, n in sent.items() if "all_reduce" not in name)
    allowed = {extra.why: n for extra in EXTRAS if (n := int(extra.launches(split)))}
    added = split.counts.total() - sent.total() - unsplit.total()
    assert sent
    assert added <= copied + sum(allowed.values()), (added, copied, allowed, table(split.counts, unsplit))


def table(split: Counter, unsplit: Counter) -> str:
    """Return the launches of the split step that the unsplit step has not, by operator and caller."""
    added = split - unsplit
    entries = sorted(added.items(), key=lambda entry: str(entry[0][::-1]))
    return "".join(f"\n{n:5} {name} in {caller}" for (name, caller), n in entries)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_split_step_launches_only_declared_kernels(pool, sequence_parallel):
    for name in COVERING:
        check(pool, name, sequence_parallel)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", sorted({*zoo.ARCHITECTURES, *zoo.FAMILIES} - set(COVERING)))
def test_a_split_step_of_any_other_architecture_launches_nothing_else(pool, name, sequence_parallel):
    check(pool, name, sequence_parallel)
