"""Compare pipeline schedules: their idle time by formula, computed and measured, and the host time of a stage.

    python -m benchmarks.pipeline [--steps 12] [--rounds 40] [--parts computed measured host]

computed: idle time of p = 4 ranks with v stages of equal cost each and m micro batches, without communication.

measured: medians over steps of a GLA with 8 equal blocks and a small vocabulary, on two single-threaded gloo ranks; the
schedules are interleaved. The measured idle time is compared with two computed idle times of the same schedule: each
computation takes time in proportion to its FLOPs, or each takes the median of its measured times.

host: processor time of a middle stage's forward and backward, compared with calling its (tiny) blocks directly, on one
thread. Runs are interleaved, and the ratio is the median of the rounds' ratios.
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
"""Sizes of the part "measured"."""
WARM_UP = 2
LAYERS, STAGES = 24, 4
"""Sizes of the part "host"."""


def main() -> None:
    parts = {"computed": computed, "measured": measured, "host": host}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=12, help=f"measured steps, after {WARM_UP} warm-up steps"
    )
    parser.add_argument("--rounds", type=int, default=40, help='rounds of the part "host"')
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    args = parser.parse_args()
    for name in args.parts:
        parts[name](args)
        print(flush=True)


def computed(args: argparse.Namespace) -> None:
    print("| schedule | v | idle, m = 8 | idle, m = 16 | formula |\n|---|---:|---:|---:|---|")
    for name, formula in FORMULAS.items():
        stages_per_rank = SCHEDULES[name].stages_per_rank[0]
        idle = [timeline(orders(name, 4, 4 * stages_per_rank, count)).idle_fraction for count in (8, 16)]
        cells = " | ".join(f"{fraction:.1%}" for fraction in idle)
        print(f"| {name} | {stages_per_rank} | {cells} | {formula} |")


def measured(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, args=(args.steps, folder), nprocs=RANKS, start_method="spawn")
        results = torch.load(Path(folder) / "results.pt")
    print(f"GLA, {RANKS} ranks, {MICRO_BATCHES} micro batches of {TOKENS} tokens, {args.steps} steps\n")
    print("| schedule | idle by FLOPs | idle by measured durations | idle, measured | ms a step |")
    print("|---|---:|---:|---:|---:|")
    for name, (by_flops, steps) in results.items():
        by_times, idle, seconds = (statistics.median(column) for column in zip(*steps, strict=True))
        print(f"| {name} | {by_flops:.1%} | {by_times:.1%} | {idle:.1%} | {1e3 * seconds:.0f} |")


def work(rank: int, steps: int, folder: str) -> None:
    """Run one rank of the part "measured". Rank 0 writes the results into `folder`."""
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
    measurements: dict[str, Any] = {
        name: (pipeline.report(MICRO_BATCHES, folder), []) for name, pipeline in pipelines.items()
    }
    for turn in range(WARM_UP + steps):
        for name, pipeline in pipelines.items():
            with measure(pipeline.training_stages()) if turn else torch.enable_grad() as times:
                pipeline.run(tokens, tokens, positions, microbatches=MICRO_BATCHES, valid_tokens=count)
            if turn >= WARM_UP:
                measured_times = times.gather()
                idle = replay(name, measured_times), measured_times.idle_fraction
                measurements[name][1].append((*idle, measured_times.duration))
            for stage in pipeline.model_parts:
                stage.lm.zero_grad()
    if rank == 0:
        results = {
            name: (report.values["idle_fraction"], rows) for name, (report, rows) in measurements.items()
        }
        torch.save(results, Path(folder) / "results.pt")
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
    arguments = {"seq_len": TOKENS, "device": torch.device("cpu"), "loss": loss, "dump_folder": ""}
    pipeline = build_pipeline(model, options, FSDP2Config(), parallel_dims=mesh, **arguments)
    for stage in pipeline.model_parts:
        stage.lm.to_empty(device="cpu")
        stage.initialize()
        stage.set_loss(loss, None)
    return pipeline


def replay(schedule: str, measured_times: Timeline) -> float:
    """Return the idle fraction of the schedule if each computation takes the median of its measured times."""
    spans = [span for rank in measured_times.ranks for span in rank]
    times: dict[Any, list[float]] = {}
    for action, start, end in spans:
        times.setdefault((action.kind, action.stage), []).append(end - start)
    stages = 1 + max(span.action.stage for span in spans)
    order = orders(schedule, RANKS, stages, MICRO_BATCHES)
    return timeline(order, lambda kind, stage: statistics.median(times[kind, stage])).idle_fraction


def host(args: argparse.Namespace) -> None:
    install("cpu")
    torch.set_num_threads(1)
    print(f"A stage of {LAYERS // STAGES} of {LAYERS} blocks, 2 x 16 tokens, {args.rounds} rounds\n")
    print("| model | blocks, ms | stage, ms | ratio |\n|---|---:|---:|---:|")
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, vocab_size=96)
    heads = dict(num_attention_heads=8, num_key_value_heads=8, head_dim=8, tie_word_embeddings=False)
    for name, more in {"qwen3": heads, "gla": {"num_heads": 4}}.items():
        model = build_real(modeling.load_config(name, "debug", **sizes, **more), dtype=torch.float32)
        run_blocks, run_stage = variants(model)
        times = [(run_blocks(), run_stage()) for _ in range(5 + args.rounds)][5:]
        blocks, stage = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(second / first for first, second in times)
        print(f"| {name} | {blocks:.2f} | {stage:.2f} | {ratio:.2f} |")


def variants(model: Any) -> Iterator[Callable[[], float]]:
    """Yield two functions. The first runs the second stage's blocks directly, the other the stage; both return seconds."""
    from titanplans.training.pipeline.stage import trace_on_meta

    size = LAYERS // STAGES
    ids, hidden = torch.zeros(2, 16, dtype=torch.int64), torch.randn(2, 16, 64, requires_grad=True)
    block_arguments: list[Any] = []
    names = find_decoder(model).names[size : 2 * size]
    blocks: list[nn.Module] = [model.get_submodule(name) for name in names]
    hooks = [
        block.register_forward_pre_hook(
            lambda _, args, kwargs: block_arguments.append((args, kwargs)), with_kwargs=True
        )
        for block in blocks
    ]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()

    def run_blocks() -> torch.Tensor:
        stream = hidden
        for block, (args, kwargs) in zip(blocks, block_arguments, strict=True):
            stream = tree_leaves(block(stream, *args[1:], **kwargs))[0]
        return stream

    meta_model = copy.deepcopy(model).to("meta")
    stage = Stages(meta_model, trace_on_meta(meta_model, 16), range(0, LAYERS, size)).build_stage(
        copy.deepcopy(model), 1
    )

    def run_stage() -> torch.Tensor:
        return stage.run((hidden,), lambda: stage.model(input_ids=ids, use_cache=False))[0]

    def timed(forward: Callable[[], torch.Tensor]) -> float:
        begin = time.thread_time()
        output = forward()
        output.backward(torch.ones_like(output))
        return time.thread_time() - begin

    yield lambda: timed(run_blocks)
    yield lambda: timed(run_stage)


if __name__ == "__main__":
    main()
    finish(0)
