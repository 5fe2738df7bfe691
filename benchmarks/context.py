"""Compare an unsplit model, tensor parallelism and context parallelism: bytes, peak memory and seconds in one run.

    python -m benchmarks.context [--tokens 4096] [--rounds 3] [--layers 4]

Trains a Llama of hidden size 512 in float32 on one sequence: the unsplit model on one rank, the split models on two ranks
over gloo. Tensor parallelism includes sequence parallelism. The variants are interleaved, each in new single-threaded
processes, which run a warm-up step, a step whose collectives are counted, and a step that is timed. The bytes are what one
rank receives per step if collectives use a ring. Gradient reductions are not counted. Memory is the peak resident memory
of a rank, minus its resident memory before the steps. `benchmarks.memory` has the estimated memory of larger models on GPUs.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from titanplans.training.launch.exit_status import finish

VARIANTS: dict[str, dict[str, int]] = {"unsplit": {}, "tp 2, sequence parallel": {"tp": 2}, "cp 2": {"cp": 2}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    # With this threshold glibc returns freed memory to the system, so that the peak contains only live tensors.
    os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", OMP_NUM_THREADS="1")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name, sizes in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                ranks = max(sizes.values(), default=1)
                mp.start_processes(work, args=(name, args, folder), nprocs=ranks, start_method="spawn")
                results[name].append(torch.load(Path(folder) / "results.pt"))
    print(f"{args.tokens} tokens, {args.layers} layers, float32, torch {torch.__version__}\n")
    print("| variant | received, MB | by collective | peak, MB | forward, s | backward, s | loss |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for name, rounds in results.items():
        medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        kinds = ", ".join(
            f"{int(n)} {key[1:].replace('_', '-')}" for key, n in medians.items() if key[0] == "#"
        )
        print(
            f"| {name} | {medians['bytes'] / 1e6:.1f} | {kinds} | {medians['memory'] / 1e6:.0f} | "
            f"{medians['forward']:.2f} | {medians['backward']:.2f} | {medians['loss']:.6f} |"
        )


def work(rank: int, name: str, args: argparse.Namespace, folder: str) -> None:
    """Run three steps of a variant as one rank. Rank 0 writes the results into `folder`."""
    sizes = VARIANTS[name]
    ranks = max(sizes.values(), default=1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{folder}/store")
    torch.set_num_threads(1)
    # Imported here, because torchtitan chooses its device when it is imported.
    from titanplans import apply_plan, modeling
    from titanplans.loss import cross_entropy
    from titanplans.modeling.samples import build_real
    from titanplans.observe.recorder import record_collectives

    config = modeling.load_config(
        "llama", "debug", hidden_size=512, intermediate_size=1536, num_hidden_layers=args.layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=2048,
        max_position_embeddings=args.tokens,
    )  # fmt: skip
    model = build_real(config, dtype=torch.float32).train()
    if sizes:
        apply_plan(
            model,
            init_device_mesh("cpu", (ranks,), mesh_dim_names=tuple(sizes)),
            sum_over_cp="cp" not in sizes,
        )
    ids = torch.randint(0, 2048, (1, args.tokens), generator=torch.Generator().manual_seed(0))

    def step() -> tuple[float, float, torch.Tensor]:
        begin = time.perf_counter()
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits, ids, args.tokens)
        middle = time.perf_counter()
        loss.backward()
        model.zero_grad()
        return middle - begin, time.perf_counter() - middle, loss.detach()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    with record_collectives(model) as record:
        step()
    forward, backward, loss = step()
    memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if "cp" in sizes:
        dist.all_reduce(loss)  # a rank has only the loss of its tokens
    kinds = Counter("#" + collective.operation for collective in record.collectives)
    received = sum(collective.received or 0 for collective in record.collectives)
    if rank == 0:
        results = {"bytes": received, "memory": memory, "forward": forward, "backward": backward}
        torch.save(results | {"loss": loss.item()} | dict(kinds), Path(folder) / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    finish(0)
