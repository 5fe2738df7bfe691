"""A training step eager, compiled, in float8 by each recipe: tokens/s, peak memory, MFU, the loss, and what compiling costs.

    python -m benchmarks.step [--models gla qwen3] [--variants eager compile] [--tp 2] [--rounds 10]

On a GPU gla-340M, transformer-340M and qwen3-0.6B in bfloat16; without one the debug flavors on the CPU in float32, where
float8 is emulated: then it shows what that costs, not what float8 gains.

Each variant of a model has processes of its own and they take turns, step by step, so that a slow minute hits all of
them: read the ratios to the first. A step is forward, loss, backward, clipping and AdamW, through `ParallelManager`.
"first" is what the first two steps took beyond two later ones, with an empty cache of inductor unless --cached. Memory
is the peak of the later steps: what torch allocated on a GPU, else the resident memory of one process (Linux).
"""

import argparse
import importlib.util
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp

from titanplans.training.launch.exit_status import finish

MODELS = {
    "cuda": {"gla": "340M", "transformer": "340M", "qwen3": "0.6B"},
    "cpu": {"gla": "debug", "transformer": "debug", "qwen3": "debug"},
}
SHAPE = {"cuda": (4, 4096), "cpu": (4, 512)}
"""Sequences, and tokens of each."""


class Variant(NamedTuple):
    """How a step is done."""

    compiled: bool
    recipe: str | None
    """Of float8; None: in bfloat16 on a GPU, float32 on a CPU."""

    async_tp: bool = False
    """Overlap the collectives of tensor parallelism with matrix products."""


VARIANTS = {
    "eager": Variant(False, None),
    "compile": Variant(True, None),
    "float8": Variant(False, "tensorwise"),
    "float8+compile": Variant(True, "tensorwise"),
    "rowwise+compile": Variant(True, "rowwise"),
    "rowwise_with_gw_hp+compile": Variant(True, "rowwise_with_gw_hp"),
    "async+compile": Variant(True, None, async_tp=True),
}
USUAL = [name for name, variant in VARIANTS.items() if not variant.async_tp]
WARM_UP = 2


def main() -> None:
    """Measure what the command line asks for, and print a table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS[device], default=list(MODELS[device]))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=USUAL)
    parser.add_argument("--tp", type=int, default=1, help="processes, and devices, that share each layer")
    parser.add_argument("--rounds", type=int, default=10, help=f"timed steps, after {WARM_UP} that are not")
    parser.add_argument(
        "--threads", type=int, default=0, help="of a process on a CPU; 0: all cores, shared by tp"
    )
    parser.add_argument("--cached", action="store_true", help="use inductor's cache of earlier runs")
    asked = parser.parse_args()
    if "async+compile" in asked.variants and (device == "cpu" or asked.tp == 1):
        parser.error("async+compile needs CUDA, and --tp 2 or more")
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores"
    batch, length = SHAPE[device]
    print(f"torch {torch.__version__}, {name}, {batch} x {length} tokens, tp = {asked.tp}\n")
    print(
        f"| model | variant | ms a step | tokens/s | to {asked.variants[0]} | MFU, % | peak memory, MB | first, s | loss |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    chosen = {name: VARIANTS[name] for name in asked.variants}
    for model in asked.models:
        found = measure(device, model, asked, chosen)
        report(f"{model}-{MODELS[device][model]}", found, batch * length)


def measure(
    device: str, model: str, asked: argparse.Namespace, variants: dict[str, Variant]
) -> dict[str, Any]:
    """Return what rank 0 of each variant measured."""
    processes = len(variants) * asked.tp
    turns = mp.get_context("spawn").Barrier(processes)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(turns, device, model, asked, variants, folder), nprocs=processes)
        return {name: json.loads((Path(folder) / name).read_text()) for name in variants}


def report(title: str, found: dict[str, Any], tokens: int) -> None:
    whole = next(iter(found.values()))["step"]
    for name, figures in found.items():
        seconds = figures["step"]
        mfu = "" if figures["mfu"] is None else f"{100 * figures['mfu']:.1f}"
        memory = "" if figures["memory"] is None else f"{figures['memory'] / 1e6:,.0f}"
        print(
            f"| {title} | {name} | {1e3 * seconds:,.0f} | {tokens / seconds:,.0f} | {whole / seconds:.2f} | {mfu} | "
            f"{memory} | {figures['first']:.1f} | {figures['loss']:.4f} |",
            flush=True,
        )
    for name, figures in found.items():
        if figures["fused"] is not None:
            fused, total = figures["fused"]
            print(
                f"\n{name}: {fused} of {total} gathers and scatters in compiled graphs are fused with products"
            )


def work(
    rank: int,
    turns: Any,
    device: str,
    name: str,
    asked: argparse.Namespace,
    variants: dict[str, Variant],
    folder: str,
) -> None:
    """Be one rank of one variant; run when it is the variant's turn."""
    turn, rank = divmod(rank, asked.tp)
    variant = list(variants)[turn]
    if not asked.cached:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor-{turn}"
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(asked.tp), LOCAL_WORLD_SIZE=str(asked.tp)
    )
    torch.set_num_threads(asked.threads or max(1, (os.cpu_count() or 1) // asked.tp))
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend, rank=rank, world_size=asked.tp, init_method=f"file://{folder}/store-{turn}"
    )
    run, flops, fused = prepare(device, name, variants[variant], asked.tp)
    times: list[float] = []
    loss = 0.0
    for number in range(WARM_UP + asked.rounds):
        if number == WARM_UP:
            forget_peak(device)
        for whose in range(len(variants)):
            turns.wait()
            if whose == turn:
                begin = time.perf_counter()
                loss = run(number)
                times.append(time.perf_counter() - begin)
    step = statistics.median(times[WARM_UP:])
    peak = None if device == "cpu" else peak_flops()
    batch, length = SHAPE[device]
    figures = {
        "step": step,
        "first": sum(times[:WARM_UP]) - WARM_UP * step,
        "memory": peak_memory(device),
        "mfu": None if peak is None else flops * batch * length / step / (peak * asked.tp),
        "loss": loss,
        "fused": fused(),
    }
    if rank == 0:
        (Path(folder) / variant).write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()


def prepare(device: str, name: str, variant: Variant, tp: int) -> tuple[Any, int, Any]:
    """Return what runs a step and gives its loss, FLOPs per token, and what says how many collectives are fused."""
    # Only now: inductor picks its folder when it is imported.
    from titanplans import kernels, modeling
    from titanplans.parallel import Compile, Degrees, Float8, FSDP2Config, ParallelManager
    from titanplans.parallel.compile.async_tp import check_fused

    kernels.install(device)
    options: dict[str, Any] = {}
    if variant.compiled:
        options["compile"] = Compile(enable=True)
    if variant.recipe is not None:
        options["float8"] = Float8(recipe_name=variant.recipe, emulate=device == "cpu")
    if variant.async_tp:
        options |= {"enable_async_tensor_parallel": True, "async_tensor_parallel_unfused": "warn"}
    if device == "cuda":
        options |= {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32"}
    model: Any = modeling.build(modeling.load_config(name, MODELS[device][name]))
    batch, length = SHAPE[device]
    _, flops = modeling.count_flops(model, length)
    manager = ParallelManager(FSDP2Config(**options), Degrees(tp=tp), device_type=device)
    model = manager.parallelize(model)
    manager.to_empty()
    modeling.initialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss = manager.prepare_loss(manager.cross_entropy)

    def run(seed: int) -> float:
        inputs = modeling.sample_inputs(
            model.config, batch_size=batch, seq_len=length, seed=seed, device=device
        )
        value = loss(model(**inputs, use_cache=False).logits, inputs["input_ids"].roll(-1, 1), batch * length)
        value.backward()
        manager.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value.item()  # waits for the device

    return run, flops, lambda: check_fused(manager.mesh, "warn") if variant.async_tp else None


def peak_flops() -> float | None:
    """The device's dense bfloat16 peak in FLOP/s, or None where torchtitan has no entry: its answer then is the A100's."""
    if importlib.util.find_spec("torchtitan") is None:
        return None
    from torchtitan.tools.utils import get_peak_flops

    name = torch.cuda.get_device_name()
    peak = get_peak_flops(name)
    return None if peak == get_peak_flops("A100") and "A100" not in name else peak


def forget_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: str) -> int | None:
    """Bytes, since `forget_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else None


if __name__ == "__main__":
    main()
    finish(0)
