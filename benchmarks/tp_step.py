"""Compare a training step with TP=2 over gloo to one process with two threads, on the same batch.

    python -m benchmarks.tp_step [--rounds 5]

The model is a transformer of 60 million parameters in float32, the batch 2 sequences of 512 tokens. Three variants are
interleaved in one run, so that other load slows all of them: the unsplit model in one process, `apply_plan` over two, and
torch's styles (`parallelize_module`) over two. The table shows the median seconds of each phase, and the speed of the step
relative to the first variant.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

from titanplans.training.launch.exit_status import finish

PHASES = ("forward", "loss", "backward", "optimizer")
BATCH, LENGTH = 2, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after two warm-up rounds")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(rounds, folder), nprocs=3)
        parameters, times = torch.load(Path(folder) / "times.pt")
    report(parameters, times)


def report(parameters: int, times: dict[str, list[list[float]]]) -> None:
    print(
        f"\n{parameters / 1e6:.1f} M parameters, {BATCH} x {LENGTH} tokens, float32, torch {torch.__version__}\n"
    )
    print(f"{'':34}" + "".join(f"{phase:>11}" for phase in (*PHASES, "step", "speed")))
    baseline = None
    for name, rounds in times.items():
        phases = [statistics.median(r[i] for r in rounds) for i in range(len(PHASES))]
        step = statistics.median(sum(r) for r in rounds)
        baseline = baseline or step
        print(f"{name:34}" + "".join(f"{t:11.3f}" for t in (*phases, step)) + f"{baseline / step:11.2f}")


def work(rank: int, rounds: int, folder: str) -> None:
    """Run the split models on ranks 0 and 1 with one thread each, and the unsplit model on rank 2 with two threads."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    dist.init_process_group("gloo", rank=rank, world_size=3, init_method=f"file://{folder}/store")
    from titanplans import kernels

    kernels.install("cpu")
    torch.set_num_threads(2 if rank == 2 else 1)
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    builders = {
        "one process, two threads": (build, [2]),
        "TP=2, apply_plan": (lambda: split(build(), mesh), [0, 1]),
        "TP=2, torch.parallelize_module": (lambda: split_by_torch(build(), mesh), [0, 1]),
    }
    variants = {name: builder() for name, (builder, ranks) in builders.items() if rank in ranks}
    optimizers = {
        name: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for name, m in variants.items()
    }
    tokens = torch.randint(0, 32768, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[list[float]]] = {name: [] for name in builders}
    for turn in range(rounds + 2):
        for name in builders:
            dist.barrier()
            if name in variants:
                phases = step(variants[name], optimizers[name], tokens)
                if turn >= 2:
                    times[name].append(phases)
    by_rank: list = [None] * 3
    dist.all_gather_object(by_rank, times)
    if rank == 0:
        parameters = sum(p.numel() for p in variants["TP=2, apply_plan"].parameters())
        unsplit, split_models = by_rank[2], by_rank[0]
        torch.save(
            (parameters, {name: unsplit[name] or split_models[name] for name in builders}),
            Path(folder) / "times.pt",
        )
    dist.barrier()
    dist.destroy_process_group()


def build() -> torch.nn.Module:
    from fla.models import TransformerConfig, TransformerForCausalLM

    torch.manual_seed(0)
    config = TransformerConfig(
        hidden_size=768, num_heads=12, num_hidden_layers=6, intermediate_size=1536, vocab_size=32768,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return TransformerForCausalLM(config)


def split(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    from titanplans import apply_plan

    apply_plan(model, mesh, loss_parallel=True, sequence_parallel=True)
    return model


def split_by_torch(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Split with the usual plan of torch's styles, with DTensors between embedding, regions and head."""
    block = {
        "attn_norm": tp.SequenceParallel(use_local_output=True),
        "attn": tp.PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "attn.q_proj": tp.ColwiseParallel(),
        "attn.k_proj": tp.ColwiseParallel(),
        "attn.v_proj": tp.ColwiseParallel(),
        "attn.o_proj": tp.RowwiseParallel(output_layouts=Shard(1)),
        "mlp": tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": tp.ColwiseParallel(),
        "mlp.up_proj": tp.ColwiseParallel(),
        "mlp.down_proj": tp.RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.model.layers:
        # torch's styles support neither fused kernels that use a weight, nor norms that are called with a residual.
        layer.mlp.fuse_swiglu = False
        layer.config.fuse_norm = False
        replace_norms(layer)
        tp.parallelize_module(layer, mesh, block | {"mlp_norm": tp.SequenceParallel(use_local_output=True)})
    replace_norms(model.model)
    ends = {
        "model.embeddings": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": tp.SequenceParallel(use_local_output=True),
        "lm_head": tp.ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    tp.parallelize_module(model, mesh, ends)
    model.lm_head.weight = model.model.embeddings.weight
    return model


def replace_norms(module: torch.nn.Module) -> None:
    """Replace FLA's norms by torch's, since they do not support DTensors."""
    for name, child in list(module.named_children()):
        if type(child).__name__ == "RMSNorm":
            norm = torch.nn.RMSNorm(child.weight.shape[0], eps=child.eps)
            module.register_module(name, norm)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> list[float]:
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")
    marks = [time.perf_counter()]
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    marks.append(time.perf_counter())
    loss = cross_entropy_loss(logits, tokens[:, 1:]) / (BATCH * LENGTH)
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    marks.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(marks)]


if __name__ == "__main__":
    main()
    finish(0)
