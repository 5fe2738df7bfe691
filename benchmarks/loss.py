"""Compare implementations of head and loss on two tensor-parallel ranks over gloo: peak memory and processor time.

    python -m benchmarks.loss [--rounds 1] [--tokens 2048] [--vocabulary 262144] [--hidden 640] [--dtype float32]

The defaults are Gemma 3's vocabulary and the hidden size of its 270M model. The variants are interleaved, each in two new
processes that run a warm-up step of eight tokens and a timed step, forward and backward. Memory is the peak resident
memory of a rank, minus its resident memory before the first step. At that time the rank already has the weight and the
hidden states. Freed memory is returned to the system (`MALLOC_MMAP_THRESHOLD_`), so the peak contains only live tensors.
The printed losses and sums of absolute gradients should agree between the variants.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

from titanplans.training.launch.exit_status import finish

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the loss from hidden states and labels."""
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=262144)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", OMP_NUM_THREADS="1")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                mp.start_processes(_work, args=(name, args, folder), nprocs=RANKS, start_method="spawn")
                results[name].append(torch.load(Path(folder) / "results.pt"))
            print(name, results[name][-1], flush=True)
    _report(args, results)


def _report(args: argparse.Namespace, results: dict[str, list[dict[str, float]]]) -> None:
    print(
        f"\n{args.tokens} tokens, vocabulary {args.vocabulary}, hidden {args.hidden}, {args.dtype}, {RANKS} ranks, "
        f"torch {torch.__version__}\n"
    )
    print(f"{'':40}{'peak, MB':>10}{'ratio':>8}{'time, s':>10}{'ratio':>8}{'loss':>12}{'gradients':>12}")
    first: dict[str, float] = {}
    for name, rounds in results.items():
        medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        first = first or medians
        print(
            f"{name:40}{medians['memory'] / 1e6:10.0f}{medians['memory'] / first['memory']:8.2f}{medians['time']:10.2f}"
            f"{medians['time'] / first['time']:8.2f}{medians['loss']:12.6f}{medians['gradients']:12.5f}"
        )


def _work(rank: int, name: str, args: argparse.Namespace, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{folder}/store")
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    with torch.device("meta"):
        model = HeadModel(args.hidden, args.vocabulary).to(dtype)
    mesh = DeviceMesh("cpu", list(range(RANKS)), mesh_dim_names=("tp",))
    step = VARIANTS[name](model, mesh)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    local_weight = model.lm_head._parameters["weight"].data.to_local()  # type: ignore[union-attr]
    local_weight.normal_(std=0.02, generator=generator)
    hidden = torch.randn(1, args.tokens, args.hidden, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(args.vocabulary, (1, args.tokens), generator=generator)
    before = _peak()
    step(hidden[:, :8], labels[:, :8]).backward()
    model.zero_grad()
    hidden.grad = None
    dist.barrier()
    start = time.process_time()
    loss = step(hidden, labels)
    loss.backward()
    seconds, memory = time.process_time() - start, _peak() - before
    gradient: Any = model.lm_head._parameters["weight"].grad  # type: ignore[union-attr]
    assert hidden.grad is not None
    size = gradient.to_local().abs().sum() + hidden.grad.abs().sum()
    results = {"memory": memory, "time": seconds, "loss": loss.item(), "gradients": size.item()}
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class HeadModel(nn.Module):
    """A model that has only a head, from hidden states to logits."""

    def __init__(self, hidden: int, vocabulary: int):
        super().__init__()
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)


def split(model: HeadModel, mesh: DeviceMesh) -> None:
    """Shard the head as a plan does."""
    from titanplans.apply.ways import ByWeights
    from titanplans.plan.resolve import Entry
    from titanplans.split.layout import StreamLayout
    from titanplans.split.meshes import meshes_of
    from titanplans.split.state import make_state
    from titanplans.styles.base import SplitOver
    from titanplans.styles.vocab_head import VocabHead

    stream = StreamLayout(sharded=False)
    head, way = model.lm_head, ByWeights(meshes_of(mesh), stream)
    style = VocabHead(loss_parallel=True)
    layouts = dict(style.layouts(head, SplitOver(mesh.size(), stream)))
    entry = Entry("lm_head", style, "lm_head", head, None, layouts, layouts)
    way.lay_out(entry)
    way.install(entry, way.border)
    make_state(model).border = way.border


def sharded(model: HeadModel, mesh: DeviceMesh) -> Step:
    """Return titanplans' loss of sharded logits."""
    from titanplans.parallel import cross_entropy

    split(model, mesh)
    return lambda hidden, labels: cross_entropy(model(hidden), labels, labels.numel())


def fused(chunk: int, model: HeadModel, mesh: DeviceMesh) -> Step:
    """Return titanplans' loss that is fused with the head."""
    from titanplans.parallel import FusedLoss, cross_entropy

    split(model, mesh)
    loss = FusedLoss(model, chunk_tokens=chunk)

    def step(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with loss(labels):
            logits = model(hidden)
        return cross_entropy(logits, labels, labels.numel())

    return step


def torchtitans(model: HeadModel, mesh: DeviceMesh) -> Step:
    """Return torchtitan's loss of sharded logits, with torch's style for the head."""
    from torchtitan.components.loss import cross_entropy_loss

    _by_torch(model, mesh)
    return lambda hidden, labels: cross_entropy_loss(model(hidden), labels) / labels.numel()


def torchtitans_chunked(chunks: int, model: HeadModel, mesh: DeviceMesh) -> Step:
    """Return torchtitan's loss that runs the head's forward and backward in chunks."""
    from torchtitan.components.loss import ChunkedLossWrapper

    _by_torch(model, mesh)
    loss = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=chunks))
    loss.set_lm_head(model.lm_head)
    return lambda hidden, labels: loss(hidden, labels, torch.tensor(labels.numel()))[0]


def _by_torch(model: HeadModel, mesh: DeviceMesh) -> None:
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")
    head = tp.ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    tp.parallelize_module(model, mesh, {"lm_head": head})


VARIANTS: dict[str, Callable[[HeadModel, DeviceMesh], Step]] = {
    "sharded logits": sharded,
    "sharded logits, torchtitan's": torchtitans,
    "8 chunks, torchtitan's": partial(torchtitans_chunked, 8),
    "fused, chunks of 1024": partial(fused, 1024),
    "fused, chunks of 512": partial(fused, 512),
    "fused, chunks of 256": partial(fused, 256),
}


if __name__ == "__main__":
    main()
    finish(0)
