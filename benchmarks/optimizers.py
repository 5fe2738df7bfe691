"""Compare the optimizer steps of Muon and AdamW, in one process and on two ranks of FSDP2 or TP over gloo.

    python -m benchmarks.optimizers [--rounds 7] [--hidden 512] [--layers 4]

The model is a Llama in float32, with one thread per rank. The variants are interleaved in one run. The table shows the
median seconds of a step, the bytes of optimizer state on a rank, and the peak of additional memory in a step on rank 0.
With "redundant Muon", every rank gathers and orthogonalises every matrix.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from titanplans.training.launch.exit_status import finish

OURS, THEIRS, ADAMW = "Muon", "torch.optim.Muon", "AdamW"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, after two warm-up rounds")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(options, folder), nprocs=2)
        matrices, others, rows = torch.load(Path(folder) / "rows.pt")
    print(f"\n{matrices / 1e6:.1f} M parameters in hidden matrices, {others / 1e6:.1f} M others, float32\n")
    print(f"{'':44}{'step, s':>10}{'state, MB':>12}{'other, MB':>12}")
    for name, (seconds, state, other) in rows.items():
        print(f"{name:44}{seconds:10.3f}{state / 1e6:12.1f}{other / 1e6:12.1f}")


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    variants = {f"{kind}, one process": (kind, None) for kind in (ADAMW, THEIRS, OURS)}
    for how, degrees in {"FSDP2 over 2": dict(dp_shard=2), "TP 2": dict(dp_shard=1, tp=2)}.items():
        variants |= {f"{kind}, {how}": (kind, degrees) for kind in (ADAMW, OURS, "redundant Muon")}
    steps = {name: prepare(kind, degrees, options) for name, (kind, degrees) in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds + 2):
        for name, (step, _) in steps.items():
            dist.barrier()
            start = time.perf_counter()
            # With one process, rank 1 waits.
            if rank == 0 or "one process" not in name:
                step()
            times[name].append(time.perf_counter() - start)
    rows = {
        name: (statistics.median(times[name][2:]), *memory(step, optimizers, alone="one process" in name))
        for name, (step, optimizers) in steps.items()
    }
    if rank == 0:
        from titanplans.config.sections.optimization import Optimizer
        from titanplans.parallel.optimizers.build import group_parameters

        model = build(options)
        count = {"Muon": 0, "AdamW": 0}
        for group in group_parameters(model, Optimizer(name="Muon")):
            count[group.optimizer] += sum(p.numel() for p in group.parameters.values())
        torch.save((count["Muon"], count["AdamW"], rows), Path(folder) / "rows.pt")
    dist.barrier()
    dist.destroy_process_group()


def build(options: argparse.Namespace) -> torch.nn.Module:
    from transformers import LlamaConfig

    from titanplans.modeling import build_real

    hidden = options.hidden
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 16 * 16, num_hidden_layers=options.layers,
        num_attention_heads=hidden // 64, vocab_size=8192,
    )  # fmt: skip
    return build_real(config, dtype=torch.float32)


def prepare(kind: str, degrees: dict[str, int] | None, options: argparse.Namespace):
    """Return a function that runs an optimizer step with random gradients, and its optimizers."""
    from titanplans.config.sections.optimization import Optimizer
    from titanplans.parallel import Degrees, FSDP2Config, Mesh, parallelize
    from titanplans.parallel.optimizers.build import build_optimizers

    model = build(options)
    if degrees is not None:
        parallelize(model, parallel_dims=Mesh(Degrees(**degrees), "cpu"), config=FSDP2Config())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers = build_optimizers(model, Optimizer(name=ADAMW if kind == ADAMW else "Muon"))
    if kind in (THEIRS, "redundant Muon"):
        optimizers = [o if isinstance(o, torch.optim.AdamW) else as_torch(o) for o in optimizers]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step, optimizers


def as_torch(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return torch's Muon for the same parameters. Sharded gradients are gathered on each rank."""
    (group,) = optimizer.param_groups
    keys = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
    return Gathered(group["params"], **{key: group[key] for key in keys})


class Gathered(torch.optim.Muon):
    """torch's Muon, in which each rank gathers each matrix and computes its full update."""

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for param in group["params"]:
            if not hasattr(param, "full_tensor"):
                return super().step(closure)
        from titanplans.parallel.optimizers.muon.orthogonal import orthogonalize
        from titanplans.split.parameters.shards import local_shard

        for param in group["params"]:
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param.grad)
            momentum = state["momentum_buffer"]
            momentum.to_local().lerp_(param.grad.to_local(), 1 - group["momentum"])
            direction = param.grad.lerp(momentum, group["momentum"]).bfloat16().full_tensor()
            update = orthogonalize(direction, group["ns_steps"])
            local = param.to_local()
            local.mul_(1 - group["lr"] * group["weight_decay"])
            shard = local_shard(update, param.device_mesh, param.placements, name="a matrix")
            local.add_(shard, alpha=-group["lr"] * 0.2 * max(param.shape) ** 0.5)
        return None


def memory(step, optimizers: list[torch.optim.Optimizer], *, alone: bool) -> tuple[int, int]:
    """Return the bytes of this rank's optimizer state, and the peak bytes that a step allocates in addition."""
    state = sum(
        (value.to_local() if hasattr(value, "to_local") else value).nbytes
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
    )
    if alone and dist.get_rank() != 0:
        dist.barrier()
        return state, 0
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    if alone:
        dist.barrier()
    allocated = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return state, peak


if __name__ == "__main__":
    main()
    finish(0)
