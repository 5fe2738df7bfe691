"""Every combination of the options that affect each other: what is refused, what runs, and the page that says so.

    PYTHONPATH=. python tests/combinations.py            # runs what is not refused; half an hour on 2 cores
    PYTHONPATH=. python tests/combinations.py --page     # writes docs/generated/combinations.md

A combination runs one step of a tiny model over real process groups, and is compared with one process:
loss, gradient norm, and every gradient.
"""

import argparse
import copy
import functools
import itertools
import sys
import time
from pathlib import Path
from typing import NamedTuple

import equal
import torch
import worlds
import zoo

from titanplans.errors import UserError
from titanplans.proof.ranks.fake import fake_ranks

PAGE = Path(__file__).parents[1] / "docs" / "generated" / "combinations.md"
LENGTH = 16

KINDS = {
    "qwen3": "a block is one graph (Qwen3)",
    "gla": "a block is several graphs (GLA: its kernels take themselves out of every graph)",
    "qwen3_moe": "experts are over 2 ranks (Qwen3-MoE)",
}
SIZES = dict(hidden_size=32, intermediate_size=64, vocab_size=64)
OWN = {
    "qwen3": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8),
    "gla": dict(num_heads=4, num_kv_heads=4, use_short_conv=False),
    "qwen3_moe": dict(num_attention_heads=4, num_key_value_heads=2),
}
"""Fields of the config that differ from the zoo's."""
WHOLE_AND_GATHERED = {"enable_sequence_parallel": False, "disable_loss_parallel": True}
TENSOR = {
    "none": None,
    "tp 2": {},
    "tp 2, whole sequence": {"enable_sequence_parallel": False},
    "tp 2, gathered logits": {"disable_loss_parallel": True},
    "tp 2, whole sequence, gathered logits": WHOLE_AND_GATHERED,
    "cp 2": {},
    "tp 2 x cp 2": {},
    "tp 2 x cp 2, whole sequence, gathered logits": WHOLE_AND_GATHERED,
    "ep 2": {},
    "tp 2, ep 2": {},
    "cp 2, ep 2": {},
}
RECOMPUTE = {
    "nothing": {"mode": "none"},
    "every block": {"mode": "full"},
    "every 2nd block": {"mode": "selective"},
    "by operator": {"mode": "selective", "selective_ac_option": "op"},
    "by operator, attention too": {
        "mode": "selective", "selective_ac_option": "op", "per_op_sac_keep_attention": False
    },
    "the MLP": {"mode": "mlp"},
    "all but the mixer": {"mode": "keep_mixer"},
    "by memory budget": {"mode": "memory_budget"},
}  # fmt: skip
DATA = ("fsdp", "hsdp", "ddp")


class Combination(NamedTuple):
    """One of each option."""

    kind: str
    tensor: str
    recompute: str
    compiled: bool
    data: str
    offload: bool

    @property
    def tp(self) -> int:
        return 2 if "tp 2" in self.tensor else 1

    @property
    def cp(self) -> int:
        return 2 if "cp 2" in self.tensor else 1

    @property
    def ep(self) -> int:
        return 2 if "ep 2" in self.tensor else 1

    @property
    def ranks(self) -> int:
        """As few as there can be: FSDP and HSDP shard over the ranks of context parallelism, too."""
        if self.cp == 1:
            return 2 * self.tp * (2 if self.data == "hsdp" else 1)
        return 2 * self.tp * (1 if self.tp == 2 and self.data == "fsdp" else 2)

    def __str__(self) -> str:
        parts = [self.kind, self.tensor, self.data, f"recompute {self.recompute}"]
        return ", ".join(parts + ["compiled"] * self.compiled + ["offloaded"] * self.offload)


ALL = [
    Combination(*values)
    for values in itertools.product(KINDS, TENSOR, RECOMPUTE, (False, True), DATA, (False, True))
    if (values[0] == "qwen3_moe") == ("ep" in values[1])
]


def strategy(combination, backend="aot_eager"):
    """Return the strategy and the degrees; raises where the strategy itself refuses."""
    from titanplans.parallel import Degrees, read_strategy

    tp, cp = combination.tp, combination.cp
    rest = combination.ranks // (tp * cp)
    values = {
        "strategy": "ddp" if combination.data == "ddp" else "fsdp2",
        "activation_checkpoint": RECOMPUTE[combination.recompute],
        **(TENSOR[combination.tensor] or {} if combination.data != "ddp" else {}),
        **({"enable_cpu_offload": True} if combination.offload else {}),
    }
    if combination.compiled:
        values["compile"] = {"enable": True, "backend": backend, "components": ["model"]}
    copies = {"fsdp": 1, "hsdp": 2, "ddp": rest}[combination.data]
    return read_strategy(values), Degrees(
        tp=tp, cp=cp, ep=combination.ep, dp_replicate=copies, dp_shard=rest // copies
    )


@functools.cache
def on_meta(kind):
    """Return the tiny model of a kind, on meta; nobody changes it."""
    from titanplans import kernels, modeling

    kernels.install("cpu")
    return modeling.build(zoo.config(kind, **SIZES, **OWN[kind]))


def build(kind):
    """Return the tiny model of a kind with values, the same each time."""
    from titanplans import modeling

    model = copy.deepcopy(on_meta(kind))
    model.to_empty(device="cpu")
    modeling.initialize(model, seed=0)
    return model


def refusal(combination):
    """Return why the combination is refused; None if it is not."""
    from titanplans.parallel import Mesh
    from titanplans.parallel.parallelize import check_compatible

    with fake_ranks(combination.ranks):
        try:
            config, degrees = strategy(combination)
            mesh, model = Mesh(degrees, "cpu"), on_meta(combination.kind)
            check_compatible(model, mesh, config)
        except UserError as error:
            return str(error)
    return None


def run_one(combination):
    """Run the combination on this rank of its world; return the worst error of a gradient, and how often it ran compiled.

    Raises:
        AssertionError: loss, norm or a gradient is not that of one process.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    case = equal.Case(
        functools.partial(build, combination.kind), functools.partial(parallelise, combination), LENGTH, 64
    )
    worst = equal.check(case, single(combination.kind))
    return worst, counters["stats"]["unique_graphs"]


def parallelise(combination, model):
    """Return the model as the combination splits it on this rank."""
    from titanplans.parallel import cross_entropy, parallelize, total_norm
    from titanplans.split.gradients import align_gradients

    config, degrees = strategy(combination)
    mesh = mesh_once(degrees)
    parallelize(model, parallel_dims=mesh, config=config)

    def norm(parameters):
        parameters = list(parameters)
        value = total_norm(parameters)
        align_gradients(parameters)
        return value

    def loss(logits, labels):
        return equal.of_sequences(cross_entropy(logits, labels, 1), mesh)

    return equal.Parallel(model, mesh.get_mesh("dp").get_group(), loss, norm=norm)


@functools.cache
def single(kind):
    """Return the step of one process."""
    from titanplans.parallel import total_norm

    return equal.train(equal.Parallel(build(kind), norm=total_norm), equal.Case(None, None, LENGTH, 64))


@functools.cache
def mesh_once(degrees):
    """Return the mesh of these degrees: each has groups of its own, whose threads go on for as long as the process."""
    from titanplans.parallel import Mesh

    return Mesh(degrees, "cpu")


def run_all(rank, combinations, ranks, progress):
    """Run those of `combinations` that are for a world of `ranks`; what `run_one` returns, or an error of any rank."""
    results, begin = {}, time.time()
    for number, combination in enumerate(c for c in combinations if c.ranks == ranks):
        try:
            results[combination] = run_one(combination)
        except AssertionError as error:
            results[combination] = str(error)
        if progress and rank == 0:
            line = f"{time.time() - begin:7.1f} s  {number}: {combination}: {results[combination]}"
            print(line, flush=True)
    wrong = {
        c: why for found in worlds.everyones(results) for c, why in found.items() if isinstance(why, str)
    }
    return results | wrong


def run_in_worlds(combinations, progress=False):
    """Return what `run_one` does for each combination, or the text of its failure."""
    results = {}
    for ranks in sorted({c.ranks for c in combinations}):
        results |= worlds.run(
            functools.partial(run_all, combinations=combinations, ranks=ranks, progress=progress), ranks
        )
    return results


def page(verdicts):
    """Return docs/generated/combinations.md for the verdicts of `ALL`: None, or why it is refused."""
    reasons = list(dict.fromkeys(filter(None, verdicts.values())))
    blocks = [HEAD.format(
        all=len(ALL), ran=sum(v is None for v in verdicts.values()), refused=sum(v is not None for v in verdicts.values())
    )]  # fmt: skip
    for kind, title in KINDS.items():
        columns = [*dict.fromkeys((c.tp, c.cp, c.data) for c in ALL if c.kind == kind)]
        head = ["recomputed", "compiled"]
        head += [f"{'tp x ' * (tp - 1)}{'cp x ' * (cp - 1)}{data}" for tp, cp, data in columns]
        rows = [head, ["---"] * len(head)]
        for recompute, compiled in itertools.product(RECOMPUTE, (False, True)):
            cells = [
                cell(verdicts, reasons, [c for c in ALL if c[0] == kind and c.recompute == recompute
                                         and c.compiled == compiled and (c.tp, c.cp, c.data) == column])
                for column in columns
            ]  # fmt: skip
            rows.append([recompute, "yes" if compiled else "", *cells])
        blocks.append(f"## Where {title}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    notes = "".join(f"{number}. {text}\n" for number, text in enumerate(reasons, start=1))
    return "\n".join([*blocks, f"## Why not\n\n{notes}"])


def cell(verdicts, reasons, combinations):
    ran = sum(verdicts[c] is None for c in combinations)
    why = sorted({reasons.index(verdicts[c]) + 1 for c in combinations if verdicts[c] is not None})
    return " ".join([f"✓ {ran}"] * (ran > 0) + [f"({', '.join(map(str, why))})"] * bool(why))


HEAD = """\
# Combinations

Tensor, sequence, loss, context and expert parallelism, activation checkpointing, compile, FSDP, HSDP, DDP and CPU offload:
every combination gives the loss, the gradient norm and each gradient of one process, or is refused by name before any
weight moves. This page is written by `tests/combinations.py`.

Of {all} combinations {refused} are refused, and {ran} are not. A cell counts the latter: with and without offload, and
under tensor parallelism with the sequence sharded or whole, and the logits sharded or gathered. Numbers in brackets are
reasons of refusals, below.

What is not refused was run, one step of a model of two blocks over 2 to 8 gloo ranks (of what is compiled over 8, one of
each policy and kind of model), float32, compiled by aot_eager. Loss within 1e-6 of one process, norm within 1e-5, each
gradient within 1e-4 of its largest number; a sum too many or too few is off by 1. `make test-all` runs a part that holds
every pair of options, each degree 2, over 2 to 8 ranks, and checks that this page is what the code refuses.
"""


def cover(candidates, wanted):
    """Return few of `candidates` that together hold everything that `wanted` names of any of them; small worlds first."""
    left = set().union(*map(wanted, candidates))
    chosen = []
    while left:
        best = max(candidates, key=lambda c: (len(wanted(c) & left), -c.ranks))
        chosen.append(best)
        left -= wanted(best)
    return chosen


def recomputed_by_kind(combination):
    """What is compiled takes seconds each: every policy of each kind of model, and every other option once."""
    return {(combination.kind, combination.recompute), *enumerate(combination)}


def main():
    """Run what is not refused; with --page, write the page instead."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="write the page, and run nothing")
    verdicts = {c: refusal(c) for c in ALL}
    if parser.parse_args().page:
        PAGE.write_text(page(verdicts))
        return 0
    accepted = [c for c, why in verdicts.items() if why is None]
    slow = [c for c in accepted if c.compiled and c.ranks == 8]
    chosen = [*(c for c in accepted if c not in slow), *cover(slow, recomputed_by_kind)]
    results = run_in_worlds(chosen, progress=True)
    wrong = {c: result for c, result in results.items() if isinstance(result, str)}
    for combination, error in wrong.items():
        print(f"WRONG {combination}: {error}")
    worst = max(result[0] for result in results.values() if not isinstance(result, str))
    print(f"{len(results)} ran, {len(wrong)} are wrong, the worst gradient is {worst:.1e} off")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
