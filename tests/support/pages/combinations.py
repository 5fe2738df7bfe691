"""Every combination of the options that affect each other. Some combinations are refused; the page lists them.

    python -m tests.support.pages.combinations            # runs all that are not refused; takes half an hour on 2 cores
    python -m tests.support.pages.combinations --page     # writes docs/generated/combinations.md

A combination runs one step of a tiny model over real process groups. Its loss, gradient norm and gradients are compared
with the results of one process.
"""

import argparse
import copy
import faulthandler
import functools
import itertools
import sys
import time
from typing import NamedTuple

import torch

from tests import zoo
from tests.support import process_groups, step_comparison
from tests.support.paths import GENERATED
from titanplans.errors import UserError
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.split.objects import gather_objects

PAGE = GENERATED / "combinations.md"
LENGTH = 16

KINDS = {
    "qwen3": "a block is one graph (Qwen3)",
    "gla": "a block is several graphs (GLA: its kernels are outside of the graphs)",
    "qwen3_moe": "experts are distributed over 2 ranks (Qwen3-MoE)",
}
SIZES = dict(hidden_size=32, intermediate_size=64, vocab_size=64)
FIELDS = {
    "qwen3": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8),
    "gla": dict(num_heads=4, num_kv_heads=4, use_short_conv=False),
    "qwen3_moe": dict(num_attention_heads=4, num_key_value_heads=2),
}
"""Fields of the config that differ from the zoo's."""
REPLICATED_AND_GATHERED = {"enable_sequence_parallel": False, "disable_loss_parallel": True}
TENSOR = {
    "none": None,
    "tp 2": {},
    "tp 2, unsharded stream": {"enable_sequence_parallel": False},
    "tp 2, gathered logits": {"disable_loss_parallel": True},
    "tp 2, unsharded stream, gathered logits": REPLICATED_AND_GATHERED,
    "cp 2": {},
    "tp 2 x cp 2": {},
    "tp 2 x cp 2, unsharded stream, gathered logits": REPLICATED_AND_GATHERED,
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
NO_PIPELINE = ""
SCHEDULES = ("1F1B", "ZBVZeroBubble")
"""Pipeline schedules over 2 processes. ZBVZeroBubble has 2 stages in each process, and splits the backward."""
TENSOR_IN_STAGES = (
    "none",
    "tp 2",
    "cp 2",
    "tp 2 x cp 2, unsharded stream, gathered logits",
    *(t for t in TENSOR if "ep" in t),
)


class Combination(NamedTuple):
    """One value of each option."""

    kind: str
    tensor: str
    recompute: str
    compiled: bool
    data: str
    offload: bool
    schedule: str

    @property
    def pp(self) -> int:
        return 1 if self.schedule == NO_PIPELINE else 2

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
        """The smallest number of ranks for the combination. FSDP and HSDP also shard over context-parallel ranks."""
        if self.cp == 1:
            return 2 * self.pp * self.tp * (2 if self.data == "hsdp" else 1)
        return 2 * self.pp * self.tp * (1 if self.tp == 2 and self.data == "fsdp" else 2)

    @property
    def degrees(self):
        from titanplans.parallel import Degrees

        data_ranks = self.ranks // (self.pp * self.tp * self.cp)
        replicas = {"fsdp": 1, "hsdp": 2, "ddp": data_ranks}[self.data]
        return Degrees(
            pp=self.pp,
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            dp_replicate=replicas,
            dp_shard=data_ranks // replicas,
        )

    def __str__(self) -> str:
        parts = [self.kind, self.tensor, *[self.schedule] * (self.pp - 1), self.data]
        parts.append(f"recompute {self.recompute}")
        return ", ".join(parts + ["compiled"] * self.compiled + ["offloaded"] * self.offload)


ALL = [
    Combination(*values)
    for values in itertools.product(
        KINDS, TENSOR, RECOMPUTE, (False, True), DATA, (False, True), (NO_PIPELINE, *SCHEDULES)
    )
    if (values[0] == "qwen3_moe") == ("ep" in values[1])
    and (values[-1] == NO_PIPELINE or values[1] in TENSOR_IN_STAGES)
]


def strategy(combination, backend="aot_eager"):
    """Return the strategy of a model without stages.

    Raises:
        UserError: the strategy refuses its options.
    """
    from titanplans.parallel import read_strategy

    values = {
        "strategy": "ddp" if combination.data == "ddp" else "fsdp2",
        "activation_checkpoint": RECOMPUTE[combination.recompute],
        **(TENSOR[combination.tensor] or {} if combination.data != "ddp" else {}),
        **({"enable_cpu_offload": True} if combination.offload else {}),
    }
    if combination.compiled:
        values["compile"] = {"enable": True, "backend": backend, "components": ["model"]}
    return read_strategy(values)


def job(combination):
    """Return the pipeline job of the combination.

    Raises:
        UserError: the job is refused.
    """
    from titanplans.config.schema import build_job

    degrees = combination.degrees
    sequences = case_of(combination).rows // (degrees.dp_replicate * degrees.dp_shard)
    sections = {
        "training": {
            "local_batch_size": sequences, "seq_len": LENGTH, "enable_cpu_offload": combination.offload,
            "mixed_precision_param": "float32",
        },
        "activation_checkpoint": RECOMPUTE[combination.recompute],
        "compile": {"enable": combination.compiled, "backend": "aot_eager", "components": ["model"]},
        "parallelism": {
            "pipeline_parallel_degree": degrees.pp, "tensor_parallel_degree": degrees.tp,
            "context_parallel_degree": degrees.cp, "expert_parallel_degree": degrees.ep,
            "pipeline_parallel_schedule": combination.schedule,
            "pipeline_parallel_microbatch_size": max(1, sequences // 4),
            "data_parallel_strategy": "ddp" if combination.data == "ddp" else "fsdp2",
            **(TENSOR[combination.tensor] or {}),
        },
    }  # fmt: skip
    return build_job(
        {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    )


def case_of(combination):
    """Return the combination's case for `step_comparison`. In a pipeline, its batch has at least two micro batches."""
    return step_comparison.Case(
        functools.partial(build, combination.kind, combination.pp),
        functools.partial(parallelise, combination),
        LENGTH,
        SIZES["vocab_size"],
        rows=step_comparison.ROWS * combination.pp,
    )


@functools.cache
def config_of(kind, pp):
    """Return a kind's config with two blocks for each pipeline rank, and in a pipeline without load-balancing loss."""
    fields = FIELDS[kind] | ({"output_router_logits": False} if kind == "qwen3_moe" and pp > 1 else {})
    return zoo.config(kind, **SIZES, **fields, num_hidden_layers=2 * pp)


@functools.cache
def on_meta(kind, pp):
    """Return the tiny model of a kind on the meta device. It is cached, so callers must not change it."""
    from titanplans import kernels, modeling

    kernels.install("cpu")
    return modeling.build(config_of(kind, pp))


def build(kind, pp):
    """Return the tiny model of a kind, with the same initial weights each time."""
    from titanplans import modeling

    model = copy.deepcopy(on_meta(kind, pp))
    model.to_empty(device="cpu")
    modeling.initialize(model, seed=0)
    return model


def refusal(combination):
    """Return why the combination is refused; None if it is not."""
    from titanplans.config.schema import strategy_of
    from titanplans.parallel import Mesh
    from titanplans.parallel.parallelize import check_compatible

    with fake_ranks(combination.ranks):
        try:
            in_stages = combination.pp > 1
            config = strategy_of(job(combination)) if in_stages else strategy(combination)
            mesh, model = Mesh(combination.degrees, "cpu"), on_meta(combination.kind, combination.pp)
            check_compatible(model, mesh, config, stage=in_stages)
        except UserError as error:
            return str(error)
    return None


def run_one(combination):
    """Run the combination on this rank; return the worst error of a gradient, and the number of compiled graphs.

    Raises:
        AssertionError: the loss, the norm or a gradient differs from the result of one process.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    case = case_of(combination)
    expected = single(combination.kind, case.rows, combination.pp)
    if combination.pp == 1:
        worst = step_comparison.check(case, expected)
    else:
        from tests.support import pipeline_step

        config, mesh = config_of(combination.kind, combination.pp), mesh_once(combination.degrees)
        trained = pipeline_step.train(config, job(combination), mesh, case)
        worst = step_comparison.compare(trained, expected, case.tolerance)
    return worst, counters["stats"]["unique_graphs"]


def parallelise(combination, model):
    """Parallelise `model` as the combination says; return it with the functions that train it on this rank."""
    from titanplans.parallel import cross_entropy, parallelize, total_norm
    from titanplans.split.gradients import align_gradients

    mesh = mesh_once(combination.degrees)
    parallelize(model, parallel_dims=mesh, config=strategy(combination))

    def norm(parameters):
        parameters = list(parameters)
        value = total_norm(parameters)
        align_gradients(parameters)
        return value

    def loss(logits, labels):
        return step_comparison.sum_over_cp(cross_entropy(logits, labels, 1), mesh)

    return step_comparison.Parallel(model, mesh.get_mesh("dp").get_group(), loss, norm=norm)


@functools.cache
def single(kind, rows, pp):
    """Return the results of a step in one process."""
    from titanplans.parallel import total_norm

    case = step_comparison.Case(None, None, LENGTH, SIZES["vocab_size"], rows=rows)
    return step_comparison.train(step_comparison.Parallel(build(kind, pp), norm=total_norm), case)


@functools.cache
def mesh_once(degrees):
    """Return the mesh of `degrees`. It is cached, because the threads of its process groups live as long as the process."""
    from titanplans.parallel import Mesh

    return Mesh(degrees, "cpu")


def run_all(rank, combinations, ranks, progress):
    """Run the combinations that need `ranks` ranks; return for each the result of `run_one`, or an error of any rank."""
    results, begin = {}, time.time()
    for index, combination in enumerate(c for c in combinations if c.ranks == ranks):
        faulthandler.dump_traceback_later(process_groups.LIMIT, exit=True)  # restarts the timer
        try:
            results[combination] = run_one(combination)
        except AssertionError as error:
            results[combination] = str(error)
        if progress and rank == 0:
            line = f"{time.time() - begin:7.1f} s  {index}: {combination}: {results[combination]}"
            print(line, flush=True)
    errors = {
        c: why for of_rank in gather_objects(results) for c, why in of_rank.items() if isinstance(why, str)
    }
    return results | errors


def run_on_ranks(combinations, progress=False):
    """Return for each combination the result of `run_one`, or the text of its error."""
    results = {}
    for ranks in sorted({c.ranks for c in combinations}):
        results |= process_groups.run(
            functools.partial(run_all, combinations=combinations, ranks=ranks, progress=progress), ranks
        )
    return results


def page(verdicts):
    """Return the page. `verdicts` has the reason for each refused combination, and None for all others."""
    reasons = list(dict.fromkeys(filter(None, verdicts.values())))
    blocks = [HEAD.format(
        all=len(ALL), ran=sum(v is None for v in verdicts.values()), refused=sum(v is not None for v in verdicts.values())
    )]  # fmt: skip
    for (kind, title), staged in itertools.product(KINDS.items(), (False, True)):
        group = [c for c in ALL if c.kind == kind and (c.pp > 1) == staged]
        columns = [*dict.fromkeys((c.tp, c.cp, c.data) for c in group)]
        head = ["recomputed", "compiled"]
        head += [f"{'tp x ' * (tp - 1)}{'cp x ' * (cp - 1)}{data}" for tp, cp, data in columns]
        rows = [head, ["---"] * len(head)]
        for recompute, compiled in itertools.product(RECOMPUTE, (False, True)):
            row = [c for c in group if (c.recompute, c.compiled) == (recompute, compiled)]
            cells = [
                cell(verdicts, reasons, [c for c in row if (c.tp, c.cp, c.data) == of]) for of in columns
            ]
            rows.append([recompute, "yes" if compiled else "", *cells])
        title += ", in the stages of a pipeline" * staged
        blocks.append(f"## Where {title}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    notes = "".join(f"{number}. {text}\n" for number, text in enumerate(reasons, start=1))
    return "\n".join([*blocks, f"## Why not\n\n{notes}"])


def cell(verdicts, reasons, combinations):
    ran = sum(verdicts[c] is None for c in combinations)
    why = sorted({reasons.index(verdicts[c]) + 1 for c in combinations if verdicts[c] is not None})
    return " ".join([f"✓ {ran}"] * (ran > 0) + [f"({', '.join(map(str, why))})"] * bool(why))


HEAD = """\
# Combinations

Tensor, sequence, loss, context, expert and pipeline parallelism, activation checkpointing, compile, FSDP, HSDP, DDP and CPU
offload: every combination gives the loss, the gradient norm and each gradient of one process, or is refused by name before
any weight moves. This page is written by `tests/support/pages/combinations.py`.

Of {all} combinations {refused} are refused, and {ran} are not. "✓ n" means that n combinations of this cell are not refused.
The combinations of a cell differ in CPU offload (on or off). With tensor parallelism, they also differ in sequence
parallelism (on or off) and in the logits (sharded or gathered); in a pipeline, also in the schedule (1F1B or ZBVZeroBubble).
Numbers in parentheses refer to the reasons for refusal below.

Each combination that is not refused was run for one step on 2 to 16 gloo ranks, with one exception: of the compiled
combinations that need 8 or 16 ranks, only one was run for each recomputation policy and kind of model. The model has two
blocks, or four if it is split into stages. It runs in float32, compiled by aot_eager. Compared with one process, the
relative error of the loss is at most 1e-6, of the norm 1e-5, and of each gradient 1e-4 of its largest element. A missing
or repeated reduction would give an error of about 1. `make test-all` runs a selection with every pair of options that 8
ranks can have, and checks that this page is up to date.
"""


def cover(candidates, features):
    """Return few candidates that together have all features of all candidates; prefer candidates with few ranks."""
    uncovered = set().union(*map(features, candidates))
    chosen = []
    while uncovered:
        best = max(candidates, key=lambda c: (len(features(c) & uncovered), -c.ranks))
        chosen.append(best)
        uncovered -= features(best)
    return chosen


def recomputed_by_kind(combination):
    """Return a combination's features for `cover`: its recomputation policy with its kind of model, and every option."""
    return {(combination.kind, combination.recompute, combination.pp), *enumerate(combination)}


def main():
    """Run all combinations that are not refused; with --page, write the page instead."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="write the page, and run nothing")
    verdicts = {c: refusal(c) for c in ALL}
    if parser.parse_args().page:
        PAGE.write_text(page(verdicts))
        return 0
    accepted = [c for c, why in verdicts.items() if why is None]
    slow = [c for c in accepted if c.compiled and c.ranks >= 8]
    chosen = [*(c for c in accepted if c not in slow), *cover(slow, recomputed_by_kind)]
    results = run_on_ranks(chosen, progress=True)
    errors = {c: result for c, result in results.items() if isinstance(result, str)}
    for combination, error in errors.items():
        print(f"WRONG {combination}: {error}")
    worst = max(result[0] for result in results.values() if not isinstance(result, str))
    print(f"{len(results)} ran, {len(errors)} are wrong, the worst gradient is {worst:.1e} off")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
