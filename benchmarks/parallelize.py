"""What it costs to parallelise a model: time and memory, by this project and by a plain loop of torch's own functions.

    python -m benchmarks.parallelize [--models gla-7B] [--worlds 8 4096] [--repeats 3] [--only cost]

The first table is of models on meta and of worlds that no machine here has: rank 0 of a fake process group, tensor
parallel 8, FSDP over the rest. The second is what a rank of four holds of a real training step. Seconds are of the
processor: all is one thread's work that waits for nothing, so on a machine with nothing else to do the wall clock shows
the same; how much more it showed is printed. Memory is resident, above what was before. Linux, glibc, no GPU; four minutes.
"""

import argparse
import ctypes
import gc
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import fla.models  # noqa: F401  # imports are no part of what is measured
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from titanplans import kernels, modeling
from titanplans.parallel import Degrees, FSDP2Config, Mesh, ParallelManager, parallelize
from titanplans.plan.registry import registered_plans
from titanplans.training.launch.exit_status import finish

TP = 8
WORLDS = (8, 512, 4096)
RANKS, ROWS, TOKENS = 4, 4, 64
"""Of the training step: processes, sequences of the whole batch, tokens of each."""
M_MMAP_THRESHOLD = -3
"""glibc's malloc.h."""


class Model(NamedTuple):
    """A named flavor, and where a hand that splits it finds its parts."""

    name: str
    flavor: str
    blocks: tuple[str, ...]
    """Lists of blocks, the decoder's first."""
    embedding: str
    block: dict[str, str]
    """What is split in a block of the decoder, c(olwise) or r(owwise)."""


_MLP = {"mlp.gate_proj": "c", "mlp.up_proj": "c", "mlp.down_proj": "r"}
_SOFTMAX = dict.fromkeys([f"self_attn.{x}_proj" for x in "qkv"], "c") | {"self_attn.o_proj": "r"} | _MLP
_GLA = (
    dict.fromkeys(["attn.gk_proj.1", *(f"attn.{x}_proj" for x in "qkvg")], "c") | {"attn.o_proj": "r"} | _MLP
)
_GEMMA = ("model.language_model.layers", "model.vision_tower.encoder.layers")
MODELS = {
    "gla-7B": Model("gla", "7B", ("model.layers",), "model.embeddings", _GLA),
    "qwen3-32B": Model("qwen3", "32B", ("model.layers",), "model.embed_tokens", _SOFTMAX),
    "gemma3-27B": Model("gemma3", "27B", _GEMMA, "model.language_model.embed_tokens", _SOFTMAX),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS, help=f"multiples of {TP}")
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many (default: 3)")
    parser.add_argument("--only", choices=("cost", "step"), help="the first table, or the second")
    options = parser.parse_args()

    print(f"torch {torch.__version__.partition('+')[0]}, CPU, {len(os.sched_getaffinity(0))} cores")
    if options.only != "step":
        report_cost(options.models, options.worlds, options.repeats)
    if options.only != "cost":
        report_step()


def report_cost(names: Iterable[str], worlds: Iterable[int], repeats: int) -> None:
    print(
        """
| model | parameters | ranks | loop, s | parallelize, s | ratio | loop, MB | parallelize, MB | ratio |
|---|---:|---:|---:|---:|---:|---:|---:|---:|"""
    )
    waits = []
    for name in names:
        for world in worlds:
            found: dict[Callable[..., None], list[Any]] = {by_hand: [], by_strategy: []}
            for _ in range(repeats):
                for way, runs in found.items():  # in turns: a slow minute hits both
                    runs.append(in_new_processes(cost, [(way, MODELS[name], world)])[0])
            loop, ours = found.values()
            if differ := loop[0].split ^ ours[0].split:
                raise SystemExit(f"{name}: the two split different parameters: {sorted(differ)}")
            waits += [run.wall / run.seconds for run in (*loop, *ours)]
            figures = []
            for what, digits in (("seconds", ".2f"), ("megabytes", ".0f")):
                a, b = (statistics.median(getattr(run, what) for run in runs) for runs in (loop, ours))
                figures.append(f"{a:{digits}} | {b:{digits}} | {b / a:.1f}")
            print(
                f"| {name} | {loop[0].parameters / 1e9:.1f} G | {world:,} | {' | '.join(figures)} |",
                flush=True,
            )
    print(
        f"\nMedians of {repeats}, in turns. The wall clock showed {statistics.median(waits):.2f} times the seconds "
        f"(median), {max(waits):.2f} times at most."
    )


class Cost(NamedTuple):
    """Of one model: processor time, wall clock, peak memory, what is split over TP ranks and in which dimension, size."""

    seconds: float
    wall: float
    megabytes: float
    split: set[tuple[str, int]]
    parameters: int


def cost(way: Callable[..., None], which: Model, world: int) -> Cost:
    kernels.install("cpu")
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    model = modeling.build(modeling.load_config(which.name, which.flavor))
    parameters = sum(param.numel() for param in model.parameters())
    registered_plans()  # which imports them
    imported = set(sys.modules)
    above = peak_memory()
    wall, seconds = time.perf_counter(), time.process_time()
    way(model, which)
    seconds, wall = time.process_time() - seconds, time.perf_counter() - wall
    if late := set(sys.modules) - imported:
        raise RuntimeError(f"imports are in the time: {', '.join(sorted(late))}")
    return Cost(seconds, wall, above(), split_over_ranks(model), parameters)


def by_strategy(model: PreTrainedModel, which: Model) -> None:
    parallelize(model, parallel_dims=Mesh(Degrees(tp=TP), "cpu"), config=FSDP2Config())


def by_hand(model: PreTrainedModel, which: Model) -> None:
    """What torch's tutorials on tensor parallelism and on FSDP2 do, and nothing else."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // TP, TP), mesh_dim_names=("dp", "tp"))
    styles = {"c": ColwiseParallel, "r": RowwiseParallel}
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for layer in model.get_submodule(which.blocks[0]).children():
        parallelize_module(layer, mesh["tp"], {name: styles[kind]() for name, kind in which.block.items()})
    ends = {
        which.embedding: RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], ends)
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    for blocks in which.blocks:
        for layer in model.get_submodule(blocks).children():
            fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def split_over_ranks(model: nn.Module) -> set[tuple[str, int]]:
    """Return the parameters that are split over the tensor-parallel ranks, and in which dimension."""
    return {
        (name, placement.dim)
        for name, param in model.named_parameters()
        if isinstance(param, DTensor) and param.device_mesh.ndim == 2
        for placement in param.placements[-1:]
        if isinstance(placement, Shard)
    }


def report_step() -> None:
    print(
        f"""
| a step of {ROWS} x {TOKENS} tokens | freed memory | parameters | states, MB | peak, MB | ratio | loss |
|---|---|---:|---:|---:|---:|---:|"""
    )
    for returns in (True, False):
        ((parameters, whole, loss),) = in_new_processes(step, [(0, 1, "", returns)])
        with tempfile.TemporaryDirectory() as folder:
            ranks = in_new_processes(
                step, [(rank, RANKS, f"{folder}/store", returns) for rank in range(RANKS)]
            )
        _, peaks, losses = zip(*ranks, strict=True)
        rows = (("one process", 1, whole, loss), (f"a rank of {RANKS}, FSDP", RANKS, max(peaks), sum(losses)))
        for name, size, peak, value in rows:
            held = 4 * 4 * parameters / size / 2**20  # weights, gradients, AdamW's two, in float32
            freed = "returned" if returns else "glibc's default"
            print(
                f"| {name} | {freed} | {parameters / 1e6:.0f} M | {held:.0f} | {peak:.0f} | {peak / whole:.2f} "
                f"| {value:.5f} |",
                flush=True,
            )


def step(rank: int, ranks: int, store: str, returns: bool) -> tuple[int, float, float]:
    """Train a model for a step; return its number of parameters, this process' peak MB and its part of the loss.

    With `returns` freed tensors go back to the system. By default glibc keeps those below 32 MB in its heap, where
    what lies above pins them, and gathered blocks pile up.
    """
    torch.set_num_threads(1)
    if returns and not ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536):
        raise RuntimeError("mallopt failed")
    if ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{store}")
    config = modeling.load_config(
        "llama", "debug", hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16,
        num_key_value_heads=16,
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (ROWS, TOKENS + 1)).chunk(ranks)[rank]

    above = peak_memory()
    model = modeling.build(config)
    parameters = sum(param.numel() for param in model.parameters())
    criterion = mean_loss
    if ranks > 1:
        manager = ParallelManager(FSDP2Config(), device_type="cpu")
        model, criterion = manager.parallelize(model), manager.cross_entropy
    model.to_empty(device="cpu")
    modeling.initialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    logits = model(input_ids=tokens[:, :-1]).logits
    loss = criterion(logits, tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return parameters, above(), loss.item()


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def peak_memory() -> Callable[[], float]:
    """Return what gives, later, the peak of resident memory since now above that of now, in MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed before must not serve what is measured
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew: proc(5)
    before = _status("VmRSS")
    return lambda: _status("VmHWM") - before


def _status(key: str) -> float:
    with open("/proc/self/status") as file:
        found = re.search(rf"{key}:\s+(\d+) kB", file.read())
    assert found, key
    return int(found[1]) / 1024


def in_new_processes(function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Run `function` on each of `arguments`, each in a process of its own, together, and return what they return.

    Each is a fork of this process, which has imported everything and run nothing.
    """
    context = multiprocessing.get_context("fork")
    running = []
    for values in arguments:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=lambda f, a, to: to.send(f(*a)), args=(function, values, sender), daemon=True
        )
        process.start()
        sender.close()
        running.append((process, receiver))
    results = []
    for process, receiver in running:
        try:
            results.append(receiver.recv())
        except EOFError:
            raise SystemExit("a process failed: see above") from None
        process.join()
    return results


if __name__ == "__main__":
    main()
    finish(0)
