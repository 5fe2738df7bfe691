"""Compare the time and memory to parallelise a model: titanplans and a plain loop of torch's functions.

    python -m benchmarks.parallelize [--models gla-7B] [--worlds 8 4096] [--repeats 3] [--only cost]

The first table is for models on meta and rank 0 of a fake process group, with tensor parallelism of degree 8 and FSDP over
the other ranks. The second is the memory of one of four ranks in a real training step. Seconds are processor time. All work
is done by one thread that never waits, so on an idle machine the wall time is the same; the script prints the ratio of the
two. Memory is the growth of resident memory. The script needs Linux and glibc, but no GPU, and takes four minutes.
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

import fla.models  # noqa: F401  # imported first, so that the import is not measured
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
"""The processes of the training step, the sequences of the global batch, and the tokens of a sequence."""
M_MMAP_THRESHOLD = -3
"""The value of this constant in glibc's malloc.h."""


class Model(NamedTuple):
    """A named flavor, and the module names that the plain loop needs."""

    name: str
    flavor: str
    blocks: tuple[str, ...]
    """The names of the model's lists of blocks. The decoder's list comes first."""
    embedding: str
    block: dict[str, str]
    """The split modules of a decoder block, each c(olwise) or r(owwise)."""


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
    parser.add_argument("--repeats", type=int, default=3, help="number of runs (default: 3)")
    parser.add_argument("--only", choices=("cost", "step"), help="print only the first or the second table")
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
            by_function: dict[Callable[..., None], list[Any]] = {by_hand: [], by_strategy: []}
            for _ in range(repeats):
                for function, runs in by_function.items():  # interleaved, so that other load slows both
                    runs.append(in_new_processes(cost, [(function, MODELS[name], world)])[0])
            loop, ours = by_function.values()
            if difference := loop[0].split ^ ours[0].split:
                raise SystemExit(f"{name}: the two split different parameters: {sorted(difference)}")
            waits += [run.wall / run.seconds for run in (*loop, *ours)]
            cells = []
            for quantity, digits in (("seconds", ".2f"), ("megabytes", ".0f")):
                a, b = (statistics.median(getattr(run, quantity) for run in runs) for runs in (loop, ours))
                cells.append(f"{a:{digits}} | {b:{digits}} | {b / a:.1f}")
            print(
                f"| {name} | {loop[0].parameters / 1e9:.1f} G | {world:,} | {' | '.join(cells)} |",
                flush=True,
            )
    print(
        f"\nMedians of {repeats}, interleaved. Wall time was {statistics.median(waits):.2f} times the processor time "
        f"(median), {max(waits):.2f} times at most."
    )


class Cost(NamedTuple):
    """The cost to parallelise one model."""

    seconds: float
    """Processor time, in seconds."""
    wall: float
    """Wall time, in seconds."""
    megabytes: float
    """Peak memory, in MB."""
    split: set[tuple[str, int]]
    """Names and dimensions of the parameters that are sharded over TP ranks."""
    parameters: int


def cost(function: Callable[..., None], which: Model, world: int) -> Cost:
    kernels.install("cpu")
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    model = modeling.build(modeling.load_config(which.name, which.flavor))
    parameters = sum(param.numel() for param in model.parameters())
    registered_plans()  # imports the plans
    imported = set(sys.modules)
    peak_above = peak_memory()
    wall, seconds = time.perf_counter(), time.process_time()
    function(model, which)
    seconds, wall = time.process_time() - seconds, time.perf_counter() - wall
    if late := set(sys.modules) - imported:
        raise RuntimeError(f"imports were timed: {', '.join(sorted(late))}")
    return Cost(seconds, wall, peak_above(), split_over_ranks(model), parameters)


def by_strategy(model: PreTrainedModel, which: Model) -> None:
    parallelize(model, parallel_dims=Mesh(Degrees(tp=TP), "cpu"), config=FSDP2Config())


def by_hand(model: PreTrainedModel, which: Model) -> None:
    """Parallelise as in torch's tutorials on tensor parallelism and FSDP2."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // TP, TP), mesh_dim_names=("dp", "tp"))
    styles = {"c": ColwiseParallel, "r": RowwiseParallel}
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for layer in model.get_submodule(which.blocks[0]).children():
        parallelize_module(layer, mesh["tp"], {name: styles[kind]() for name, kind in which.block.items()})
    ends = {
        which.embedding: RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], ends)
    if is_tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    for blocks in which.blocks:
        for layer in model.get_submodule(blocks).children():
            fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def split_over_ranks(model: nn.Module) -> set[tuple[str, int]]:
    """Return the name and the sharded dimension of each parameter that is sharded over tensor-parallel ranks."""
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
        ((parameters, unsplit_peak, loss),) = in_new_processes(step, [(0, 1, "", returns)])
        with tempfile.TemporaryDirectory() as folder:
            ranks = in_new_processes(
                step, [(rank, RANKS, f"{folder}/store", returns) for rank in range(RANKS)]
            )
        _, peaks, losses = zip(*ranks, strict=True)
        rows = (
            ("one process", 1, unsplit_peak, loss),
            (f"a rank of {RANKS}, FSDP", RANKS, max(peaks), sum(losses)),
        )
        for name, size, peak, value in rows:
            states = 4 * 4 * parameters / size / 2**20  # weights, gradients and AdamW's two states in float32
            freed = "returned" if returns else "glibc's default"
            print(
                f"| {name} | {freed} | {parameters / 1e6:.0f} M | {states:.0f} | {peak:.0f} "
                f"| {peak / unsplit_peak:.2f} | {value:.5f} |",
                flush=True,
            )


def step(rank: int, ranks: int, store: str, returns: bool) -> tuple[int, float, float]:
    """Train a model for a step; return its number of parameters, this process's peak in MB, and the loss of its tokens.

    With `returns`, glibc returns the memory of freed tensors to the system. By default it keeps the memory of tensors
    below 32 MB in its heap. Later allocations in the heap prevent the release of this memory, so gathered blocks
    accumulate.
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

    peak_above = peak_memory()
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
    return parameters, peak_above(), loss.item()


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def peak_memory() -> Callable[[], float]:
    """Return a function that returns the largest growth of resident memory since this call, in MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that memory that was freed earlier is not used again
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak, see proc(5)
    before = _status("VmRSS")
    return lambda: _status("VmHWM") - before


def _status(key: str) -> float:
    with open("/proc/self/status") as file:
        match = re.search(rf"{key}:\s+(\d+) kB", file.read())
    assert match, key
    return int(match[1]) / 1024


def in_new_processes(function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Run `function` on each of `arguments` concurrently in separate processes, and return the results.

    Each process is a fork of this one, which has imported everything and computed nothing.
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
