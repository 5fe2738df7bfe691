"""Compare ways to load and save a Hugging Face folder at tp 2.

    python -m benchmarks.weights start [--gigabytes 1] [--rounds 3] [--folder /tmp]
    python -m benchmarks.weights bandwidth

`start` loads a Llama in bfloat16, in files of 200 MB. The variants are interleaved, each in new single-threaded processes:
transformers' `from_pretrained` in one process; torch's `set_model_state_dict` on two ranks, where rank 0 reads all files and
broadcasts each full parameter; and `titanplans.load_weights`, where each rank reads its shards. Each variant is measured
twice: with the files in the page cache, and without.

`bandwidth` compares writing and reading the same bytes by a plain copy and a plain read of the files, by transformers, and
by `titanplans.save_weights` and `load_weights` at tp 2. Written files are synced to the disk, and read files are in the page
cache.

Seconds are the time of the slowest rank. The two variants on two ranks start from the split model on meta and end when the
last value of the model is loaded. `from_pretrained` also builds the model. Saving starts from a loaded model. Memory is the
growth of each rank's peak, in two columns: anonymous memory alone, and anonymous memory together with pages of mapped files.
Ranks share the pages of mapped files, and the system can reclaim them. "values" are the bytes that a program requests from
the files, and "disk" the bytes that the kernel reads from the disk for all processes.
"""

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import multiprocessing

from titanplans.training.launch.exit_status import finish

HIDDEN, INTERMEDIATE, VOCABULARY = 2048, 5632, 32_000


class Measured(NamedTuple):
    """Time and memory of one rank."""

    seconds: float
    anonymous: int
    """The peak of anonymous memory minus the anonymous memory before the load, in bytes."""
    mapped: int
    """The same growth in bytes, for the sum of anonymous memory and pages of mapped files."""
    values: int
    """Bytes of values read from, or written to, the files; -1: unknown."""
    disk: int
    """Bytes that the kernel read from the disk for this rank."""


def write_folder(folder: Path, gigabytes: float) -> None:
    """Write a Llama in bfloat16 of about `gigabytes` GB."""
    from transformers import LlamaConfig

    from titanplans import modeling

    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * VOCABULARY * HIDDEN) / layer))
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=VOCABULARY,
    )
    model = modeling.build(config).bfloat16().to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size="200MB")


def from_pretrained(folder: Path) -> Callable[[], int]:
    """Return a function that loads the model in one process with transformers."""
    from transformers import AutoModelForCausalLM

    def load() -> int:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        # The parameters are views of memory-mapped files: touch a byte of each page, so that it is read.
        for parameter in model.parameters():
            parameter.detach().view(-1).view(torch.uint8)[:: os.sysconf("SC_PAGESIZE")].sum()
        return -1

    return load


def _split(folder: Path) -> tuple[Any, Any]:
    """Return the model on meta, split at tp 2, and its manager."""
    from titanplans import modeling
    from titanplans.parallel import Degrees, FSDP2Config, ParallelManager

    manager = ParallelManager(FSDP2Config(), Degrees(tp=dist.get_world_size()), device_type="cpu")
    model = modeling.build(modeling.load_config_file(folder)).bfloat16()
    return manager.parallelize(model), manager


def set_model_state_dict(folder: Path) -> Callable[[], int]:
    """Return a function that loads with torch: rank 0 reads all files and broadcasts each full parameter."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.distributed.checkpoint.state_dict import set_model_state_dict as set_state

    model, manager = _split(folder)

    def load() -> int:
        manager.to_empty()
        state: dict[str, torch.Tensor] = {}
        if dist.get_rank() == 0:
            for file in sorted(folder.glob("*.safetensors")):
                state |= load_file(file)
        set_state(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        return sum(value.numel() * value.element_size() for value in state.values())

    return load


def load_weights(folder: Path) -> Callable[[], int]:
    """Return a function that loads with titanplans: each rank reads its shards."""
    import titanplans

    model, manager = _split(folder)

    def load() -> int:
        manager.to_empty()
        return titanplans.load_weights(model, folder).bytes_read

    return load


def copied(folder: Path) -> Callable[[], int]:
    """Return a function that copies the files."""
    target = _target(folder)

    def copy() -> int:
        target.mkdir()
        for file in folder.iterdir():
            shutil.copyfile(file, target / file.name)
        return _sync(target)

    return copy


def save_pretrained(folder: Path) -> Callable[[], int]:
    """Return a function that saves the model in one process with transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    target = _target(folder)

    def save() -> int:
        model.save_pretrained(target, max_shard_size="200MB")
        return _sync(target)

    return save


def save_weights(folder: Path) -> Callable[[], int]:
    """Return a function that saves a model at tp 2 with titanplans."""
    import titanplans

    model, manager = _split(folder)
    manager.to_empty()
    titanplans.load_weights(model, folder)
    target = _target(folder)

    def save() -> int:
        titanplans.save_weights(model, target, max_shard_size="200MB")
        return sum(file.stat().st_size for file in target.iterdir())

    return save


def read(folder: Path) -> Callable[[], int]:
    """Return a function that reads the files into memory."""

    def load() -> int:
        values = 0
        for file in folder.iterdir():
            values += len(file.read_bytes())
        return values

    return load


def _target(folder: Path) -> Path:
    """Return the path of a folder to write, after removing an earlier one."""
    target = folder.with_name("written")
    if dist.get_rank() == 0 and target.exists():
        shutil.rmtree(target)
    dist.barrier()
    return target


def _sync(folder: Path) -> int:
    """Sync the files of `folder` to the disk; return their total size in bytes."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    return sum(file.stat().st_size for file in folder.iterdir())


STARTING = ("from_pretrained", "set_model_state_dict", "load_weights")
BANDWIDTH = ("copied", "save_pretrained", "save_weights", "read", "from_pretrained", "load_weights")
VARIANTS = {
    "from_pretrained": (from_pretrained, 1),
    "set_model_state_dict": (set_model_state_dict, 2),
    "load_weights": (load_weights, 2),
    "copied": (copied, 1),
    "save_pretrained": (save_pretrained, 1),
    "save_weights": (save_weights, 2),
    "read": (read, 1),
}
"""By variant: its function, and its number of ranks."""


def _proc_value(key: str, file: str) -> int:
    """Return the value of `key` in a file of /proc/self, in bytes."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    value = next(line for line in lines if line.startswith(key)).split()[1]
    return int(value) * (1024 if file == "status" else 1)


def _memory() -> tuple[int, int]:
    """Return the anonymous memory of this process, and its sum with the pages of mapped files, in bytes."""
    anonymous = _proc_value("RssAnon", "status")
    return anonymous, anonymous + _proc_value("RssFile", "status")


def _rank(rank: int, variant: str, folder: Path, ranks: int, store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{store}")
    load = VARIANTS[variant][0](folder)
    gc.collect()
    peaks, done = [(0, 0)], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peaks.append(_memory())

    watcher = threading.Thread(target=watch, daemon=True)
    dist.barrier()
    before = _memory()
    watcher.start()
    disk, begin = _proc_value("read_bytes", "io"), time.perf_counter()
    values = load()
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    dist.barrier()
    anonymous, mapped = (
        max(peak) - start for peak, start in zip(zip(*peaks, strict=True), before, strict=True)
    )
    answers.put(Measured(seconds, anonymous, mapped, values, _proc_value("read_bytes", "io") - disk))
    dist.destroy_process_group()


def measure(variant: str, folder: Path) -> list[Measured]:
    """Run a variant in new processes; return the measurements of each rank."""
    ranks = VARIANTS[variant][1]
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as store:
        multiprocessing.spawn(_rank, (variant, folder, ranks, f"{store}/store", answers), nprocs=ranks)
    return [answers.get() for _ in range(ranks)]


def drop_cache(folder: Path) -> None:
    """Drop the files from the page cache."""
    os.sync()
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(folder: Path, gigabytes: float, rounds: int) -> None:
    write_folder(folder, gigabytes)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(
        f"\n{total / 1e9:.2f} GB in {len(list(folder.glob('*.safetensors')))} files, torch {torch.__version__}\n"
    )
    print(
        f"{'':34}{'seconds':>9}{'fastest':>9}{'anonymous MB':>14}{'mapped MB':>14}{'values MB':>14}{'disk MB':>9}"
    )
    for cached in (True, False):
        results: dict[str, list[list[Measured]]] = {variant: [] for variant in STARTING}
        for turn in range(rounds + cached):
            for variant in reversed(STARTING) if turn % 2 else STARTING:
                if not cached:
                    drop_cache(folder)
                measured = measure(variant, folder)
                if turn or not cached:  # the first turn reads the files into the cache
                    results[variant].append(measured)
        for variant, runs in results.items():
            seconds = [max(rank.seconds for rank in run) for run in runs]
            anonymous = " ".join(
                f"{max(run[i].anonymous for run in runs) / 1e6:,.0f}" for i in range(len(runs[0]))
            )
            mapped = " ".join(f"{max(run[i].mapped for run in runs) / 1e6:,.0f}" for i in range(len(runs[0])))
            values = " ".join(f"{rank.values / 1e6:,.0f}" for rank in runs[0] if rank.values >= 0)
            disk = statistics.median(sum(rank.disk for rank in run) for run in runs) / 1e6
            name = f"{variant}, {'cached' if cached else 'from the disk'}"
            times = f"{statistics.median(seconds):9.2f}{min(seconds):9.2f}"
            print(f"{name:34}{times}{anonymous:>14}{mapped:>14}{values:>14}{disk:9,.0f}", flush=True)


def bandwidth(folder: Path, gigabytes: float, rounds: int) -> None:
    write_folder(folder, gigabytes)
    total = sum(file.stat().st_size for file in folder.iterdir())
    print(f"\n{total / 1e9:.2f} GB, torch {torch.__version__}\n")
    print(f"{'':20}{'seconds':>9}{'fastest':>9}{'GB/s':>7}{'anonymous MB':>14}")
    results: dict[str, list[list[Measured]]] = {variant: [] for variant in BANDWIDTH}
    for turn in range(rounds + 1):
        for variant in reversed(BANDWIDTH) if turn % 2 else BANDWIDTH:
            measured = measure(variant, folder)
            if turn:
                results[variant].append(measured)
    for variant, runs in results.items():
        seconds = [max(rank.seconds for rank in run) for run in runs]
        anonymous = " ".join(
            f"{max(run[i].anonymous for run in runs) / 1e6:,.0f}" for i in range(len(runs[0]))
        )
        median = statistics.median(seconds)
        print(
            f"{variant:20}{median:9.2f}{min(seconds):9.2f}{total / 1e9 / median:7.2f}{anonymous:>14}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["start", "bandwidth"])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one warm-up round")
    parser.add_argument(
        "--folder",
        help="parent folder for the files, on the disk that is to be measured; default: the system's temporary folder",
    )
    options = parser.parse_args()
    part = {"start": start, "bandwidth": bandwidth}[options.part]
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        part(folder / "model", options.gigabytes, options.rounds)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
    finish(0)
