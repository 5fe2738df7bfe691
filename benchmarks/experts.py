"""Experts cut by width and by expert: bytes and time of a step, host time of the dispatch, memory of a rank; in one run.

    python -m benchmarks.experts [--rounds 10]

Three minutes on two cores that are busy. Times are medians of runs that take turns, with minima in brackets.

Steps, over gloo: a small Qwen3-MoE in float32, 2 and 4 processes of a thread each on cores that others use: compare rows.
All is cut by weights (tp) or tokens (cp); experts by width (tp alone), not at all (cp alone), or by expert (ep). MB are
received by a rank, mean of the ranks, without sums of gradients (under cp alone those of all experts), as the recorder has
them: an all-to-all as an even one of the larger of what a rank sends and gets. "In experts": all-to-alls of tokens' rows,
under tp alone of the packed weight's, which is stored by another dimension. The bound is exact for this run's routing: each
pair of a token and an expert elsewhere moves a row out and back, forward and backward; "once": one for all of a rank.

Host time: a mixture on one rank, by its own forward and through the dispatch, whose all-to-alls (gloo) send all to itself;
milliseconds of processor time of the calling thread.

Memory: one of 8 ranks, of torch's fake process group, with Qwen3-30B-A3B; nothing is allocated; GB are 1e9. Parameters,
gradients and AdamW's state are what `parallelize` and AdamW make on meta, float32. Activations are the peak of a step on
fake tensors in bfloat16 (`benchmarks.context_memory`): all blocks recomputed, chunked loss, 4080 tokens a rank of FSDP (of
4096, some have a weight's shape, and do not count), rows spread evenly over ranks, which no router does; 4 blocks are run,
the other 44 add their inputs, as a run of all 48 did. A block: its parameters as gathered in bfloat16. Not in the sum: a
block gathered ahead, gradients not yet reduced and their buffers, embedding and head gathered, what CUDA, its libraries and
fragmentation take. "All bf16" has states in bfloat16. Published: peak on 8 H100 in transformers' documentation
(expert_parallelism.md), ep_size = tp_size = 8, 4, 2 and the rest fsdp_size, for fine-tuning all in bf16 at 2048 tokens:
other dtypes and settings than ours, and how that peak was measured is not said.
"""

import argparse
import copy
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.context_memory import Peak, _step
from titanplans import FSDP2Config, apply_plan, kernels, modeling, parallelize
from titanplans.loss import cross_entropy
from titanplans.modeling.samples import build_real
from titanplans.observe.recorder import record_collectives
from titanplans.observe.tracker import fsdp_units
from titanplans.parallel.mesh.mesh import Mesh, mesh_of_one
from titanplans.plan.degrees import Degrees
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.split.experts.dispatch import ExpertRanks, install_dispatch
from titanplans.torch_private.dtensor import local_tensor
from titanplans.training.launch.exit_status import finish

SMALL = dict(hidden_size=256, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=4)
TINY = dict(hidden_size=64, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)
BATCH, TOKENS, WARM_UP = 2, 512, 2
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "in experts")
LARGE, LONG, BLOCKS, RUN = "30B-A3B", 4080, 48, 4
MESHES = [
    *((8, 1, 1, "-"), (8, 1, 8, "-"), (4, 2, 1, "-"), (4, 2, 8, "-")),
    *((1, 8, 8, "38.6"), (2, 4, 4, "34.2"), (4, 2, 2, "32.3")),
]
"""Degrees of FSDP, tp and ep, and what is published."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=10, help="timed steps of each variant; calls are four times as many"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    load = f"load {os.getloadavg()[0]:.1f} before"
    print(f"torch {torch.__version__}, a thread a process, {os.cpu_count()} cores shared with others, {load}")
    print(f"\nSteps: {BATCH} x {TOKENS} tokens, {SMALL}, {args.rounds} rounds\n\n| variant ", end="")
    print("| all-gather, MB | reduce-scatter | all-reduce | all-to-all | in experts | bound | once ", end="")
    print("| step, ms | to tp alone | loss |\n|---|" + "---:|" * 10)
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(work, args=(ranks, args.rounds, folder), nprocs=ranks, start_method="spawn")
            found = torch.load(Path(folder) / "found.pt")
        for name, (times, sizes, loss) in found.items():
            cells = [*(f"{size / 1e6:.2f}" if size else "" for size in sizes), words(times)]
            cells += [ratio(times, found[f"tp {ranks}"][0]), f"{loss:.6f}"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    host_time(4 * args.rounds)
    memory()


def words(times: list[float]) -> str:
    return f"{1e3 * statistics.median(times):.2f} ({1e3 * min(times):.2f})"


def ratio(times: list[float], to: list[float]) -> str:
    return f"{statistics.median(times) / statistics.median(to):.2f}"


def work(rank: int, ranks: int, rounds: int, folder: str) -> None:
    """Take steps of each variant in turn as one rank; the first leaves what was found in `folder`."""
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{folder}/store")
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for axis, ep in (("tp", 1), ("tp", ranks), ("cp", 1), ("cp", ranks)):
        mesh = Mesh(Degrees(dp_shard=1, ep=ep, **{axis: ranks}), "cpu")
        model = build_real(modeling.load_config("qwen3_moe", "debug", **SMALL), dtype=torch.float32)
        experts = mesh.get_mesh("ep") if ep > 1 else None
        apply_plan(model, mesh.get_mesh(axis), experts=experts, sum_over_cp=axis != "cp")
        models[f"{axis} {ranks}" + (f", ep {ep}" if ep > 1 else "")] = model.train()
    ids = torch.randint(0, 4096, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))

    def step(model: Any) -> torch.Tensor:
        model.zero_grad()
        loss = cross_entropy(model(input_ids=ids, use_cache=False).logits, ids, ids.numel())
        loss.backward()
        return loss.detach()

    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(WARM_UP + rounds):
        for name, model in models.items():
            dist.barrier()
            begin = time.perf_counter()
            step(model)
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    found = {}
    for name, model in models.items():
        elsewhere: list[torch.Tensor] = []
        if "ep" in name:
            for layer in model.model.layers:
                layer.mlp.experts.register_forward_pre_hook(
                    lambda module, given, to=elsewhere: to.append(rows_elsewhere(module, given[1], rank))
                )
        with record_collectives(model) as record:
            loss = step(model)
        assert record.failure is None
        received: Counter[str] = Counter()
        for one in record.collectives:
            inside = one.operation == "all_to_all" and ".experts" in (one.module or "")
            received["in experts" if inside else one.operation] += one.received or 0
        assert set(received) <= set(KINDS)
        moved = 4 * 4 * SMALL["hidden_size"] * sum(elsewhere, torch.zeros(2))  # four times, float32
        sizes = torch.cat([torch.tensor([float(received[kind]) for kind in KINDS]), moved]).double() / ranks
        dist.all_reduce(sizes)
        if "cp" in name:
            dist.all_reduce(loss)  # each has its tokens' part
        found[name] = times[name][WARM_UP:], sizes.tolist(), loss.item()
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def rows_elsewhere(module: Any, chosen: torch.Tensor, rank: int) -> torch.Tensor:
    """Return how many of this rank's pairs of a token and an expert have another rank's expert; and tokens, once a rank."""
    held = module._split.experts
    owners = chosen.tensor_split(held.tp)[held.tp_rank] // module.num_experts
    there = nn.functional.one_hot(owners, held.group[1]).sum(1)
    there[:, rank] = 0
    return torch.stack([there.sum(), (there > 0).sum()])


def host_time(calls: int) -> None:
    print(f"\nHost time of one mixture on one rank: {calls} calls\n")
    print("| mixture | own forward, ms | through dispatch | ratio | with backward: own | through | ratio |")
    print("|---|" + "---:|" * 6)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/store")
        group = dist.group.WORLD.group_name, 1  # type: ignore[union-attr]
        for sizes, rows in ((TINY, 32), (SMALL, BATCH * TOKENS)):
            for implementation in ("grouped_mm", "eager"):
                config = modeling.load_config("qwen3_moe", "debug", num_hidden_layers=1, **sizes)
                model: Any = build_real(config, dtype=torch.float32)
                model.set_experts_implementation(implementation)
                own = model.model.layers[0].mlp.experts
                through = copy.deepcopy(own)
                install_dispatch(through, ExpertRanks(group, 1, 0))
                times = called((own, through), sizes, rows, calls)
                cells = [f"{words(one)} | {words(two)} | {ratio(two, one)}" for one, two in times]
                kind = f"{sizes['num_experts_per_tok']} of {sizes['num_experts']} experts, {implementation}"
                print(f"| {rows} rows of {sizes['hidden_size']}, {kind} | {' | '.join(cells)} |", flush=True)
        dist.destroy_process_group()


def called(modules: Any, sizes: dict[str, int], rows: int, calls: int) -> list[list[list[float]]]:
    """Return each module's seconds: of forwards, and of forwards and backwards."""
    weights, chosen = torch.rand(rows, sizes["num_experts"]).topk(sizes["num_experts_per_tok"])
    x = torch.randn(rows, sizes["hidden_size"]).requires_grad_()
    times: list[list[list[float]]] = [[[] for _ in modules] for _ in range(2)]
    for turn in range(WARM_UP + calls):
        outputs = []
        for at, module in enumerate(modules):
            module.zero_grad()
            begin = time.thread_time()
            outputs.append(module(x, chosen, weights.requires_grad_()))
            middle = time.thread_time()
            outputs[-1].sum().backward()
            if turn >= WARM_UP:
                times[0][at].append(middle - begin)
                times[1][at].append(time.thread_time() - begin)
        torch.testing.assert_close(*outputs)
    return times


def memory() -> None:
    kernels.install("cpu")
    qwen.create_causal_mask = lambda *args, **kwargs: None  # flash attention has none; a trace would get one
    print(f"\nMemory of a rank, GB: Qwen3-{LARGE}, {LONG} tokens a rank of FSDP\n")
    print("| mesh | parameters | gradients | AdamW | activations | a block | sum | all bf16 | published |")
    print("|---|" + "---:|" * 8)
    for fsdp, tp, ep, published in MESHES:
        degrees = Degrees(dp_shard=fsdp, tp=tp, ep=ep)
        *states, block = held_states(degrees)
        rest = activations(degrees), block
        numbers = (*states, *rest, sum(states) + sum(rest), sum(states) / 2 + sum(rest))
        cells = " | ".join(f"{number / 1e9:.2f}" for number in numbers)
        print(f"| FSDP {fsdp}, tp {tp}, ep {ep} | {cells} | {published} |", flush=True)


def held_states(degrees: Degrees) -> list[int]:
    """Return the bytes of parameters, gradients and AdamW's state, and of the largest block gathered in bfloat16."""

    def held(tensors: Any) -> int:
        return sum((local_tensor(x) if isinstance(x, DTensor) else x).nbytes for x in tensors)

    config = FSDP2Config(mixed_precision_param="bfloat16", mixed_precision_reduce="float32")
    with fake_ranks(8):
        model = modeling.build(modeling.load_config("qwen3_moe", LARGE))
        parallelize(model, parallel_dims=Mesh(degrees, "cpu"), config=config)
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW(parameters, foreach=False)
        optimizer.step()
        gathered: Counter[str] = Counter()
        for name, unit in fsdp_units(model):
            if ".layers." in name:  # its experts are a unit of their own if other ranks hold the same
                block = name.removesuffix(".mlp.experts")
                gathered[block] += sum(2 * param._orig_size.numel() for param in unit.fsdp_params)
        state = [value for one in optimizer.state.values() for value in one.values()]
        return [held(x) for x in (parameters, [p.grad for p in parameters], state)] + [max(gathered.values())]


def activations(degrees: Degrees) -> int:
    """Return the bytes that live at the peak of a step, weights and their gradients aside."""
    with fake_ranks(8):
        mesh = Mesh(degrees, "cpu")
        config = modeling.load_config("qwen3_moe", LARGE, num_hidden_layers=RUN)
        model: Any = modeling.build(config).to(torch.bfloat16)
        if mesh.tp * mesh.ep > 1:
            tp = mesh.get_mesh("tp") if mesh.tp > 1 else mesh_of_one("cpu")
            apply_plan(model, tp, experts=mesh.get_mesh("ep") if mesh.ep > 1 else None)
        with FakeTensorMode(allow_non_fake_inputs=True), Evenly() as routing:
            routing.rows = LONG // mesh.tp * config.num_experts_per_tok // mesh.ep
            model = model.to_empty(device="cpu").train()
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            step = _step(model, torch.zeros(1, LONG, dtype=torch.long))
            step()
            with Peak(model) as found:
                step()
    return found.bytes + (BLOCKS - RUN) * 2 * config.hidden_size * LONG // mesh.tp


class Evenly(TorchDispatchMode):
    """Answers what a dispatch reads of fake tensors: how many rows go to each rank and come from it."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = func is torch.ops.aten._local_scalar_dense.default
        return self.rows if asked else func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main()
    finish(0)
