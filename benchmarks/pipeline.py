"""Schedules of a pipeline: idle shares by formula, by order and measured, and what a stage costs the host.

    python -m benchmarks.pipeline [--steps 12] [--rounds 40] [--parts computed measured host]

computed: of p = 4 ranks with v stages of equal cost each, m micro batches, sending free. measured: medians of steps on two
gloo ranks with a thread each, a GLA of 8 equal blocks and a small vocabulary, schedules in turns, beside what the order
gives with stages as long as their FLOPs, and as long as these steps found them. host: forward and backward of a middle stage
beside its blocks called one after the other, tiny blocks, one thread, in turns; processor time, and the median of ratios.
"""

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from titanplans import FSDP2Config, modeling
from titanplans.kernels import install
from titanplans.modeling.samples import build_real
from titanplans.parallel.mesh.mesh import Mesh
from titanplans.parallel.pipeline.timeline import Timeline, timeline
from titanplans.plan.degrees import Degrees
from titanplans.split.decoder import find_decoder
from titanplans.split.stages.schedules import SCHEDULES, orders
from titanplans.split.stages.stages import Stages
from titanplans.torch_private.dispatch import tree_leaves
from titanplans.training.launch.exit_status import finish

FORMULAS = {
    "GPipe": "(p - 1) / (m + p - 1)",
    "1F1B": "(p - 1) / (m + p - 1)",
    "LoopedBFS": "(p - 1) / (v m + p - 1)",
    "Interleaved1F1B": "(p - 1) / (v m + p - 1)",
    "InterleavedZeroBubble": "(p - 1) / (3 v m + p - 1)",
    "ZBVZeroBubble": "(p - 1) / (3 v m + p - 1)",
    "DualPipeV": "(p - 1) / (3 v m + p - 1)",
}
MEASURED = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
RANKS, MICRO_BATCHES, TOKENS = 2, 8, 128
"""Of the measured part."""
WARM_UP = 2
LAYERS, STAGES = 24, 4
"""Of the host's part."""


def main() -> None:
    parts = {"computed": computed, "measured": measured, "host": host}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help=f"measured, after {WARM_UP} that are not")
    parser.add_argument("--rounds", type=int, default=40, help="of the host's part")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    asked = parser.parse_args()
    for name in asked.parts:
        parts[name](asked)
        print(flush=True)


def computed(asked: argparse.Namespace) -> None:
    print("| schedule | v | idle, m = 8 | idle, m = 16 | formula |\n|---|---:|---:|---:|---|")
    for name, formula in FORMULAS.items():
        each = SCHEDULES[name].stages_per_rank[0]
        shares = [timeline(orders(name, 4, 4 * each, number)).idle_fraction for number in (8, 16)]
        words = " | ".join(f"{share:.1%}" for share in shares)
        print(f"| {name} | {each} | {words} | {formula} |")


def measured(asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, args=(asked.steps, folder), nprocs=RANKS, start_method="spawn")
        found = torch.load(Path(folder) / "found.pt")
    print(f"GLA, {RANKS} ranks, {MICRO_BATCHES} micro batches of {TOKENS} tokens, {asked.steps} steps\n")
    print("| schedule | idle by FLOPs | idle by measured durations | idle, measured | ms a step |")
    print("|---|---:|---:|---:|---:|")
    for name, (by_flops, steps) in found.items():
        by_times, share, seconds = (statistics.median(column) for column in zip(*steps, strict=True))
        print(f"| {name} | {by_flops:.1%} | {by_times:.1%} | {share:.1%} | {1e3 * seconds:.0f} |")


def work(rank: int, steps: int, folder: str) -> None:
    """Be one rank of the measured part."""
    from titanplans.training.trainer.device import prepare_device

    os.environ.update(RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS), WORLD_SIZE=str(RANKS))
    install(prepare_device())
    from titanplans.training.pipeline.report import measure

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{folder}/store")
    mesh = Mesh(Degrees(pp=RANKS), "cpu")
    pipelines = {name: build(name, mesh) for name in MEASURED}
    tokens = torch.randint(1024, (MICRO_BATCHES, TOKENS))
    positions, count = torch.arange(TOKENS).expand_as(tokens), torch.tensor(MICRO_BATCHES * TOKENS)
    found: dict[str, Any] = {
        name: (made.report(MICRO_BATCHES, folder), []) for name, made in pipelines.items()
    }
    for turn in range(WARM_UP + steps):
        for name, made in pipelines.items():
            with measure(made.training_stages()) if turn else torch.enable_grad() as times:
                made.run(tokens, tokens, positions, microbatches=MICRO_BATCHES, valid_tokens=count)
            if turn >= WARM_UP:
                taken = times.gather()
                found[name][1].append((replayed(name, taken), taken.idle_fraction, taken.duration))
            for part in made.model_parts:
                part.lm.zero_grad()
    if rank == 0:
        known = {name: (report.values["idle_fraction"], rows) for name, (report, rows) in found.items()}
        torch.save(known, Path(folder) / "found.pt")
    dist.destroy_process_group()


def build(schedule: str, mesh: Mesh) -> Any:
    from titanplans.config.sections.optimization import Loss
    from titanplans.config.sections.parallelism import PipelineParallel
    from titanplans.training.pipeline.pipeline import build_pipeline
    from titanplans.training.trainer.loss import CrossEntropyLoss
    from titanplans.training.trainer.model import LanguageModel

    config = modeling.load_config("gla", "debug", hidden_size=256, num_hidden_layers=8, vocab_size=1024)
    with torch.device("meta"):
        model = LanguageModel(config)
    loss = CrossEntropyLoss(Loss(fused=False))
    options = PipelineParallel(pipeline_parallel_schedule=schedule)
    given = {"seq_len": TOKENS, "device": torch.device("cpu"), "loss": loss, "dump_folder": ""}
    made = build_pipeline(model, options, FSDP2Config(), parallel_dims=mesh, **given)
    for part in made.model_parts:
        part.lm.to_empty(device="cpu")
        part.initialize()
        part.set_loss(loss, None)
    return made


def replayed(schedule: str, taken: Timeline) -> float:
    """Return the idle share of the schedule's order if each computation takes the median of what it took."""
    spans = [span for rank in taken.ranks for span in rank]
    times: dict[Any, list[float]] = {}
    for action, start, end in spans:
        times.setdefault((action.kind, action.stage), []).append(end - start)
    stages = 1 + max(span.action.stage for span in spans)
    order = orders(schedule, RANKS, stages, MICRO_BATCHES)
    return timeline(order, lambda kind, stage: statistics.median(times[kind, stage])).idle_fraction


def host(asked: argparse.Namespace) -> None:
    install("cpu")
    torch.set_num_threads(1)
    print(f"A stage of {LAYERS // STAGES} of {LAYERS} blocks, 2 x 16 tokens, {asked.rounds} rounds\n")
    print("| model | blocks alone, ms | stage, ms | ratio |\n|---|---:|---:|---:|")
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, vocab_size=96)
    heads = dict(num_attention_heads=8, num_key_value_heads=8, head_dim=8, tie_word_embeddings=False)
    for name, more in {"qwen3": heads, "gla": {"num_heads": 4}}.items():
        model = build_real(modeling.load_config(name, "debug", **sizes, **more), dtype=torch.float32)
        alone, staged = variants(model)
        times = [(alone(), staged()) for _ in range(5 + asked.rounds)][5:]
        blocks, stage = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(second / first for first, second in times)
        print(f"| {name} | {blocks:.2f} | {stage:.2f} | {ratio:.2f} |")


def variants(model: Any) -> Iterator[Callable[[], float]]:
    """Yield what runs the blocks of the second stage one after the other, and the stage; each returns seconds."""
    from titanplans.training.pipeline.stage import trace_on_meta

    size = LAYERS // STAGES
    ids, hidden = torch.zeros(2, 16, dtype=torch.int64), torch.randn(2, 16, 64, requires_grad=True)
    given: list[Any] = []
    names = find_decoder(model).names[size : 2 * size]
    blocks: list[nn.Module] = [model.get_submodule(name) for name in names]
    hooks = [
        block.register_forward_pre_hook(
            lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
        )
        for block in blocks
    ]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()

    def alone() -> torch.Tensor:
        stream = hidden
        for block, (args, kwargs) in zip(blocks, given, strict=True):
            stream = tree_leaves(block(stream, *args[1:], **kwargs))[0]
        return stream

    whole = copy.deepcopy(model).to("meta")
    stage = Stages(whole, trace_on_meta(whole, 16), range(0, LAYERS, size)).build_stage(
        copy.deepcopy(model), 1
    )

    def staged() -> torch.Tensor:
        return stage.run((hidden,), lambda: stage.model(input_ids=ids, use_cache=False))[0]

    def timed(forward: Callable[[], torch.Tensor]) -> float:
        begin = time.thread_time()
        output = forward()
        output.backward(torch.ones_like(output))
        return time.thread_time() - begin

    yield lambda: timed(alone)
    yield lambda: timed(staged)


if __name__ == "__main__":
    main()
    finish(0)
