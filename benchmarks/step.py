"""Compare training steps: eager, compiled, and float8 by recipe. Prints tokens/s, memory, MFU, loss and compile time.

    python -m benchmarks.step [--models gla qwen3] [--variants eager compile] [--tp 2] [--rounds 10]

On a GPU the models are gla-340M, transformer-340M and qwen3-0.6B in bfloat16. Without a GPU, they are the debug flavors in
float32 with emulated float8; these runs show the cost of emulation and not the gain of float8.

Each variant of a model has separate processes. The variants are interleaved, step by step, so that other load slows all of
them: read the ratios to the first variant. A step is forward, loss, backward, clipping and AdamW with `ParallelManager`.
"first" is the time of the first two steps minus twice the median of the later ones, with an empty Inductor cache unless
--cached. Memory is the peak of the later steps: on a GPU the memory that torch allocated, otherwise the resident memory of
one process (Linux).
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
"""Batch size and sequence length."""


class Variant(NamedTuple):
    """How a step runs."""

    compiled: bool
    recipe: str | None
    """Float8 recipe; None: bfloat16 on a GPU, float32 on a CPU."""

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
    """Measure the requested models and variants, and print a table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS[device], default=list(MODELS[device]))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=USUAL)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel degree")
    parser.add_argument("--rounds", type=int, default=10, help=f"timed steps, after {WARM_UP} warm-up steps")
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads of a process; 0: all cores divided by tp"
    )
    parser.add_argument("--cached", action="store_true", help="use Inductor's cache of earlier runs")
    args = parser.parse_args()
    if "async+compile" in args.variants and (device == "cpu" or args.tp == 1):
        parser.error("async+compile needs CUDA, and --tp 2 or more")
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores"
    batch, length = SHAPE[device]
    print(f"torch {torch.__version__}, {name}, {batch} x {length} tokens, tp = {args.tp}\n")
    print(
        f"| model | variant | ms per step | tokens/s | speed / {args.variants[0]} | MFU, % | peak memory, MB | first, s "
        "| loss |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    chosen = {name: VARIANTS[name] for name in args.variants}
    for model in args.models:
        results = measure(device, model, args, chosen)
        report(f"{model}-{MODELS[device][model]}", results, batch * length)


def measure(
    device: str, model: str, args: argparse.Namespace, variants: dict[str, Variant]
) -> dict[str, Any]:
    """Return the measurements of rank 0 of each variant."""
    processes = len(variants) * args.tp
    turns = mp.get_context("spawn").Barrier(processes)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(turns, device, model, args, variants, folder), nprocs=processes)
        return {name: json.loads((Path(folder) / name).read_text()) for name in variants}


def report(title: str, results: dict[str, Any], tokens: int) -> None:
    baseline = next(iter(results.values()))["step"]
    for name, metrics in results.items():
        seconds = metrics["step"]
        mfu = "" if metrics["mfu"] is None else f"{100 * metrics['mfu']:.1f}"
        memory = "" if metrics["memory"] is None else f"{metrics['memory'] / 1e6:,.0f}"
        print(
            f"| {title} | {name} | {1e3 * seconds:,.0f} | {tokens / seconds:,.0f} | {baseline / seconds:.2f} | {mfu} | "
            f"{memory} | {metrics['first']:.1f} | {metrics['loss']:.4f} |",
            flush=True,
        )
    for name, metrics in results.items():
        if metrics["fused"] is not None:
            fused, total = metrics["fused"]
            print(
                f"\n{name}: {fused} of {total} all-gathers and reduce-scatters in compiled graphs are fused with products"
            )


def work(
    rank: int,
    turns: Any,
    device: str,
    name: str,
    args: argparse.Namespace,
    variants: dict[str, Variant],
    folder: str,
) -> None:
    """Run one rank of one variant. The rank waits for the variant's turn before each step."""
    turn, rank = divmod(rank, args.tp)
    variant = list(variants)[turn]
    if not args.cached:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor-{turn}"
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.tp), LOCAL_WORLD_SIZE=str(args.tp)
    )
    torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // args.tp))
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend, rank=rank, world_size=args.tp, init_method=f"file://{folder}/store-{turn}"
    )
    run, flops, fused = prepare(device, name, variants[variant], args.tp)
    times: list[float] = []
    loss = 0.0
    for number in range(WARM_UP + args.rounds):
        if number == WARM_UP:
            reset_peak(device)
        for current in range(len(variants)):
            turns.wait()
            if current == turn:
                begin = time.perf_counter()
                loss = run(number)
                times.append(time.perf_counter() - begin)
    step = statistics.median(times[WARM_UP:])
    peak = None if device == "cpu" else peak_flops()
    batch, length = SHAPE[device]
    metrics = {
        "step": step,
        "first": sum(times[:WARM_UP]) - WARM_UP * step,
        "memory": peak_memory(device),
        "mfu": None if peak is None else flops * batch * length / step / (peak * args.tp),
        "loss": loss,
        "fused": fused(),
    }
    if rank == 0:
        (Path(folder) / variant).write_text(json.dumps(metrics))
    torch.distributed.destroy_process_group()


def prepare(device: str, name: str, variant: Variant, tp: int) -> tuple[Any, int, Any]:
    """Prepare a model; return a function that runs a step, FLOPs per token, and a function that counts fused collectives."""
    # Imported here, because Inductor chooses its cache folder when it is imported.
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
        return value.item()  # synchronizes with the device

    return run, flops, lambda: check_fused(manager.mesh, "warn") if variant.async_tp else None


def peak_flops() -> float | None:
    """Return the dense bfloat16 peak of the device in FLOP/s; None if torchtitan does not know it."""
    if importlib.util.find_spec("torchtitan") is None:
        return None
    from torchtitan.tools.utils import get_peak_flops

    name = torch.cuda.get_device_name()
    peak = get_peak_flops(name)  # for unknown devices torchtitan returns the peak of the A100
    return None if peak == get_peak_flops("A100") and "A100" not in name else peak


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: str) -> int | None:
    """Return the peak bytes since `reset_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else None


if __name__ == "__main__":
    main()
    finish(0)
