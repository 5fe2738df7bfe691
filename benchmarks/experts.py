"""Compare experts split by width and by expert: bytes and time of a step, and host time of the dispatch.

    python -m benchmarks.experts [--rounds 10]

Takes three minutes on two busy cores. Variants are interleaved; times are medians, with minima in parentheses.

Steps: a small Qwen3-MoE is trained in float32, over gloo, on 2 and 4 processes of one thread each. The cores are shared with
other jobs, so absolute times vary between runs: compare only the rows of one table. The model is split over tensor-parallel
(tp) or context-parallel (cp) ranks, and the experts are split by width (tp without ep), not at all (cp without ep), or by
expert (ep). The columns in MB are the bytes that a rank receives (mean over ranks), without gradient reductions. The
recorder counts an uneven all-to-all as an even one of size max(sent, received). "In experts" is the part of the
all-to-alls that send tokens. With tp alone no tokens are sent; the column then shows the all-to-alls of the packed weight,
which is stored sharded along one dimension and used sharded along another. "Bound" is computed from the routing of this
run: each token is sent once for each of its experts on another rank, and its result is sent back, in the forward and in
the backward. "Once" is the same bound if a token is sent only once to each rank, even if several of its experts are there.

Host time: one mixture of experts on one rank, computed once by the module's forward and once by the dispatch. With one
rank, the all-to-alls of the dispatch (gloo) send everything to this rank itself. Milliseconds are processor time of the
calling thread.

`benchmarks.memory` has the estimated memory of a rank of Qwen3-30B-A3B.
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
from torch import nn

from titanplans import apply_plan, modeling
from titanplans.loss import cross_entropy
from titanplans.modeling.samples import build_real
from titanplans.observe.recorder import record_collectives
from titanplans.parallel.mesh.mesh import Mesh
from titanplans.plan.degrees import Degrees
from titanplans.split.experts.dispatch import ExpertRanks, install_dispatch
from titanplans.training.launch.exit_status import finish

SMALL = dict(hidden_size=256, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=4)
TINY = dict(hidden_size=64, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)
BATCH, TOKENS, WARM_UP = 2, 512, 2
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "in experts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds",
        type=int,
        default=10,
        help="timed steps per variant; host time uses four times as many calls",
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    load = f"load {os.getloadavg()[0]:.1f} before"
    print(
        f"torch {torch.__version__}, one thread per process, {os.cpu_count()} cores, shared with other jobs, {load}"
    )
    print(f"\nSteps: {BATCH} x {TOKENS} tokens, {SMALL}, {args.rounds} rounds\n\n| variant ", end="")
    print("| all-gather, MB | reduce-scatter | all-reduce | all-to-all | in experts | bound | once ", end="")
    print("| step, ms | to tp alone | loss |\n|---|" + "---:|" * 10)
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(work, args=(ranks, args.rounds, folder), nprocs=ranks, start_method="spawn")
            results = torch.load(Path(folder) / "results.pt")
        for name, (times, sizes, loss) in results.items():
            cells = [*(f"{size / 1e6:.2f}" if size else "" for size in sizes), words(times)]
            cells += [ratio(times, results[f"tp {ranks}"][0]), f"{loss:.6f}"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    host_time(4 * args.rounds)


def words(times: list[float]) -> str:
    return f"{1e3 * statistics.median(times):.2f} ({1e3 * min(times):.2f})"


def ratio(times: list[float], to: list[float]) -> str:
    return f"{statistics.median(times) / statistics.median(to):.2f}"


def work(rank: int, ranks: int, rounds: int, folder: str) -> None:
    """Run interleaved steps of all variants as one rank. Rank 0 writes the results into `folder`."""
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
    results = {}
    for name, model in models.items():
        sent: list[torch.Tensor] = []
        if "ep" in name:
            for layer in model.model.layers:
                layer.mlp.experts.register_forward_pre_hook(
                    lambda module, args, to=sent: to.append(count_sent_tokens(module, args[1], rank))
                )
        with record_collectives(model) as record:
            loss = step(model)
        assert record.failure is None
        received: Counter[str] = Counter()
        for collective in record.collectives:
            in_experts = collective.operation == "all_to_all" and ".experts" in (collective.module or "")
            received["in experts" if in_experts else collective.operation] += collective.received or 0
        assert set(received) <= set(KINDS)
        # A sent token moves four times in float32 (4 bytes): there and back, in the forward and in the backward.
        bounds = 4 * 4 * SMALL["hidden_size"] * sum(sent, torch.zeros(2))
        sizes = torch.cat([torch.tensor([float(received[kind]) for kind in KINDS]), bounds]).double() / ranks
        dist.all_reduce(sizes)
        if "cp" in name:
            dist.all_reduce(loss)  # a rank has only the loss of its tokens
        results[name] = times[name][WARM_UP:], sizes.tolist(), loss.item()
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


def count_sent_tokens(module: Any, expert_ids: torch.Tensor, rank: int) -> torch.Tensor:
    """Return two counts of tokens sent to other ranks: a token counts once per chosen expert, or once per receiving rank."""
    experts = module._split.experts
    owners = expert_ids.tensor_split(experts.tp)[experts.tp_rank] // module.num_experts
    counts = nn.functional.one_hot(owners, experts.group[1]).sum(1)
    counts[:, rank] = 0
    return torch.stack([counts.sum(), (counts > 0).sum()])


def host_time(calls: int) -> None:
    print(f"\nHost time of one mixture on one rank: {calls} calls\n")
    print(
        "| mixture | forward, ms: module | dispatch | ratio | forward and backward, ms: module | dispatch | ratio |"
    )
    print("|---|" + "---:|" * 6)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/store")
        group = dist.group.WORLD.group_name, 1  # type: ignore[union-attr]
        for sizes, tokens in ((TINY, 32), (SMALL, BATCH * TOKENS)):
            for implementation in ("grouped_mm", "eager"):
                config = modeling.load_config("qwen3_moe", "debug", num_hidden_layers=1, **sizes)
                model: Any = build_real(config, dtype=torch.float32)
                model.set_experts_implementation(implementation)
                experts = model.model.layers[0].mlp.experts
                dispatching = copy.deepcopy(experts)
                install_dispatch(dispatching, ExpertRanks(group, 1, 0))
                times = time_calls((experts, dispatching), sizes, tokens, calls)
                cells = [f"{words(one)} | {words(two)} | {ratio(two, one)}" for one, two in times]
                kind = f"{sizes['num_experts_per_tok']} of {sizes['num_experts']} experts, {implementation}"
                print(
                    f"| {tokens} tokens of {sizes['hidden_size']}, {kind} | {' | '.join(cells)} |", flush=True
                )
        dist.destroy_process_group()


def time_calls(modules: Any, sizes: dict[str, int], tokens: int, calls: int) -> list[list[list[float]]]:
    """Return the seconds of forwards, and of forwards with backwards, both as a list for each module."""
    weights, expert_ids = torch.rand(tokens, sizes["num_experts"]).topk(sizes["num_experts_per_tok"])
    x = torch.randn(tokens, sizes["hidden_size"]).requires_grad_()
    times: list[list[list[float]]] = [[[] for _ in modules] for _ in range(2)]
    for turn in range(WARM_UP + calls):
        outputs = []
        for index, module in enumerate(modules):
            module.zero_grad()
            begin = time.thread_time()
            outputs.append(module(x, expert_ids, weights.requires_grad_()))
            middle = time.thread_time()
            outputs[-1].sum().backward()
            if turn >= WARM_UP:
                times[0][index].append(middle - begin)
                times[1][index].append(time.thread_time() - begin)
        torch.testing.assert_close(*outputs)
    return times


if __name__ == "__main__":
    main()
    finish(0)
