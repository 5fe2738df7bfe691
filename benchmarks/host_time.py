"""Measure the host time of a step: a model of 24 tiny layers, unsplit and split, whose time is only dispatch.

    python -m benchmarks.host_time [--rounds 20] [--only unsplit "tp 2"] [--profile]

A Qwen3 of hidden size 64 runs on 2 x 16 tokens in float32, eager, with one thread, on rank 0 of torch's fake process
group. The group's collectives return at once, and the matrix products are tiny. What remains is the time of Python and of
torch's dispatcher, for which a fast GPU would wait. The variants are interleaved in one run, step by step. Milliseconds
are medians of the thread's processor time. The ratio compares a variant with the one without tensor parallelism:
"unsplit", or "FSDP2" for variants with FSDP2. The forward ends with the full logits. Loss and optimizer, which are the
same for all variants, are not measured. With --profile each variant runs again under cProfile, which slows Python but not
torch's operators. A second table shows in which code the time of a step is spent.
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp

from titanplans import FSDP2Config, apply_plan, modeling
from titanplans.modeling.samples import build_real
from titanplans.parallel.fsdp import shard
from titanplans.torch_private.distributed import fake_store
from titanplans.training.launch.exit_status import finish

LAYERS, BATCH, TOKENS = 24, 2, 16
WORLD = 8
WARM_UP = 3
SOURCES = {
    "parameters": (
        "titanplans/split/module_weight",
        "titanplans/split/parameters/",
        "titanplans/precision/nf4",
    ),
    "borders, hooks": (
        "titanplans/split/",
        "titanplans/loss/",
        "titanplans/precision/",
        "titanplans/adapters/",
    ),
    "DTensor": ("torch/distributed/tensor/",),
    "FSDP2": ("torch/distributed/fsdp/", "titanplans/parallel/"),
    "model": ("transformers/", "torch/nn/"),
}
"""By source, strings that the paths of its files contain. The time of a function counts for the first source that matches
the function's file. If no source matches, the time counts for the function's callers."""
REST = "engine"
"""The remaining time: autograd's engine, and functions that only the engine calls, such as the backward of torch's own
operators in C++."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help=f"timed steps, after {WARM_UP} warm-up steps")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument(
        "--profile", action="store_true", help="also show where the time is spent, by cProfile"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    # The results of fake gathers are uninitialized memory, whose denormal numbers would be slow to compute with.
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=fake_store())
    models = {name: VARIANTS[name](build()) for name in options.only}
    tokens = torch.randint(0, 96, (BATCH, TOKENS))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    gc.disable()
    gc.freeze()
    for turn in range(WARM_UP + options.rounds):
        gc.collect()
        for name, model in models.items():
            measured = step(model, tokens)
            if turn >= WARM_UP:
                times[name].append(measured)
    report(times, sum(1 for _ in next(iter(models.values())).parameters()))
    if options.profile:
        report_profiles(models, tokens, options.rounds)
    dist.destroy_process_group()


def report(times: dict[str, list[tuple[float, float]]], parameters: int) -> None:
    print(
        f"torch {torch.__version__.partition('+')[0]}, one thread, {LAYERS} layers, {parameters} parameters, "
        f"{BATCH} x {TOKENS} tokens, medians of {len(next(iter(times.values())))}\n"
    )
    print("| variant | forward, ms | backward, ms | step, ms | ratio |\n|---|---:|---:|---:|---:|")
    steps = {name: statistics.median(map(sum, rounds)) for name, rounds in times.items()}
    for name, rounds in times.items():
        forward, backward = (statistics.median(phase) for phase in zip(*rounds, strict=True))
        baseline = steps.get("FSDP2" if name.startswith("FSDP2") else "unsplit")
        ratio = "" if baseline is None else f"{steps[name] / baseline:.2f}"
        print(f"| {name} | {1e3 * forward:.1f} | {1e3 * backward:.1f} | {1e3 * steps[name]:.1f} | {ratio} |")


def report_profiles(models: dict[str, nn.Module], tokens: torch.Tensor, rounds: int) -> None:
    columns = (*SOURCES, REST)
    print("\n| variant | " + " | ".join(f"{name}, %" for name in columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name, model in models.items():
        seconds = profile(model, tokens, rounds)
        percentages = " | ".join(f"{100 * seconds[source] / sum(seconds.values()):.0f}" for source in columns)
        print(f"| {name} | {percentages} |", flush=True)


def profile(model: nn.Module, tokens: torch.Tensor, rounds: int) -> dict[str, float]:
    """Return the seconds of each of SOURCES in `rounds` steps under cProfile."""
    recorder = cProfile.Profile(time.thread_time)
    for _ in range(rounds):
        step(model, tokens, recorder)
    stats: Any = pstats.Stats(recorder)
    calls = stats.stats  # {function: (…, …, own seconds, …, {caller: (…, …, own seconds, …)})}

    @cache
    def source(function: tuple[str, int, str]) -> str | None:
        return next((name for name, at in SOURCES.items() if any(part in function[0] for part in at)), None)

    @cache
    def fractions(function: tuple[str, int, str], depth: int) -> dict[str, float]:
        """Return the fraction of a function's own time that counts for each source.

        All of the time counts for the function's source. If the function has no source, the time is divided among its
        callers' sources, in proportion to the time that the function took for each caller.
        """
        callers = calls[function][4]
        total = sum(call[2] for call in callers.values())
        if (own_source := source(function)) is not None or not total or not depth:
            return {own_source or REST: 1.0}
        by_source: dict[str, float] = {}
        for caller, call in callers.items():
            for name, fraction in fractions(caller, depth - 1).items():
                by_source[name] = by_source.get(name, 0.0) + fraction * call[2] / total
        return by_source

    seconds = dict.fromkeys((*SOURCES, REST), 0.0)
    for function, (_, _, own_seconds, _, _) in calls.items():
        for name, fraction in fractions(function, 12).items():
            seconds[name] += own_seconds * fraction
    return seconds


def step(
    model: nn.Module, tokens: torch.Tensor, recorder: cProfile.Profile | None = None
) -> tuple[float, float]:
    """Run a step; return the seconds of the forward and of the backward.

    With a `recorder`, forward and backward are profiled instead, and the returned seconds are 0.
    """
    positions = torch.arange(TOKENS).unsqueeze(0)

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        if recorder is not None:
            return 0.0, recorder.runcall(work)
        before = time.thread_time()
        result = work()
        return time.thread_time() - before, result

    forward, output = timed(lambda: model(input_ids=tokens, position_ids=positions, use_cache=False))
    logits = output.logits
    if isinstance(logits, DTensor):  # sharded over tokens; rank 0 has the first tokens
        logits = logits.to_local()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, : logits.shape[1]].flatten())
    del logits
    del output
    backward, _ = timed(loss.backward)
    model.zero_grad()
    return forward, backward


def build() -> nn.Module:
    config = modeling.load_config(
        "qwen3", "debug", hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, head_dim=8, vocab_size=96, tie_word_embeddings=False,
    )  # fmt: skip
    return build_real(config, dtype=torch.float32)


def split(degree: int, sequence_parallel: bool) -> Callable[[nn.Module], nn.Module]:
    def by_plan(model: nn.Module) -> nn.Module:
        mesh = DeviceMesh("cpu", list(range(degree)), mesh_dim_names=("tp",))
        apply_plan(model, mesh, loss_parallel=False, sequence_parallel=sequence_parallel)
        return model

    return by_plan


def by_tokens(summed: bool) -> Callable[[nn.Module], nn.Module]:
    """Return a function that applies context parallelism.

    Args:
        summed: whether the plan sums gradients over the ranks; if not, data parallelism has to sum them.
    """

    def by_plan(model: nn.Module) -> nn.Module:
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
        apply_plan(model, mesh, loss_parallel=False, sum_over_cp=summed)
        return model

    return by_plan


def sharded(sequence_parallel: bool | None) -> Callable[[nn.Module], nn.Module]:
    """Return a function that shards a model with FSDP2.

    Args:
        sequence_parallel: the option of tensor parallelism of degree 2, which is applied before FSDP2. None: FSDP2 alone.
    """

    def by_fsdp(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("fsdp", "tp"))
        if sequence_parallel is not None:
            apply_plan(model, mesh["tp"], loss_parallel=False, sequence_parallel=sequence_parallel)
        shard(model, mesh["fsdp"], FSDP2Config(mixed_precision_param=None))
        return model

    return by_fsdp


def split_by_torch(model: Any) -> nn.Module:
    """Split with the usual plan of torch's styles; the residual stream consists of plain tensors, sharded over tokens."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    norm, rowwise = tp.SequenceParallel(use_local_output=True), tp.RowwiseParallel(output_layouts=Shard(1))
    attention = {"input_kwarg_layouts": {"hidden_states": Shard(1)}}
    attention |= {"desired_input_kwarg_layouts": {"hidden_states": Replicate()}}
    block = dict.fromkeys([f"self_attn.{x}_proj" for x in "qkv"], tp.ColwiseParallel()) | {
        "input_layernorm": norm,
        "self_attn": tp.PrepareModuleInput(**attention),
        "self_attn.q_norm": tp.SequenceParallel(sequence_dim=2, use_local_output=True),
        "self_attn.k_norm": tp.SequenceParallel(sequence_dim=2, use_local_output=True),
        "self_attn.o_proj": rowwise,
        "post_attention_layernorm": norm,
        "mlp": tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": tp.ColwiseParallel(),
        "mlp.up_proj": tp.ColwiseParallel(),
        "mlp.down_proj": rowwise,
    }
    for layer in model.model.layers:
        tp.parallelize_module(layer, mesh, block)
    ends = {
        "model.embed_tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": norm,
        "lm_head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return tp.parallelize_module(model, mesh, ends)


VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "unsplit": lambda model: model,
    "tp 2, sequence parallel": split(2, True),
    "tp 2": split(2, False),
    "tp 8, sequence parallel": split(8, True),
    "tp 8": split(8, False),
    "tp 1, cp 2": by_tokens(True),
    "tp 1, cp 2, summed with dp": by_tokens(False),
    "torch's styles, tp 2, sequence parallel": split_by_torch,
    "FSDP2": sharded(None),
    "FSDP2, tp 2, sequence parallel": sharded(True),
    "FSDP2, tp 2": sharded(False),
}

if __name__ == "__main__":
    main()
    finish(0)
