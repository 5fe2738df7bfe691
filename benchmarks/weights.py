"""Starting from a Hugging Face folder at tp 2, side by side with what people do otherwise.

    python -m benchmarks.weights start [--gigabytes 1] [--rounds 3] [--folder /tmp]
    python -m benchmarks.weights bandwidth

A Llama in bfloat16, in files of 200 MB. By turns, each in new processes of one thread: transformers' `from_pretrained` in
one process; torch's `set_model_state_dict` on two ranks, where rank 0 reads the whole and sends each parameter; and
`titanplans.load_weights`, where each rank reads its parts. Once with the files in the system's cache, once without.

`bandwidth`: writing and reading the same bytes, by turns: a plain copy of the files and a plain read, transformers, and
`titanplans.save_weights` and `load_weights` at tp 2. What is written is synced to the disk; what is read is in the cache.

Seconds are of the slowest rank, from the model on meta (split, for two ranks) to the last value. Memory is each rank's peak
beyond that before: its own, and with the pages of files that are mapped, which ranks share and the system can take back.
Values are what was asked of the files, the disk what the kernel fetched from it for all processes.
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
    """What one rank has used."""

    seconds: float
    own: int
    """Bytes of its own memory at its peak, beyond that before."""
    mapped: int
    """The same with the pages of files that are mapped."""
    values: int
    """Bytes of values that it asked the files for; -1 where nobody says."""
    disk: int
    """Bytes that were fetched from the disk for it."""


def write_folder(folder: Path, gigabytes: float) -> None:
    """Write a Llama of about that size, in bfloat16."""
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
    """transformers, the whole model in one process."""
    from transformers import AutoModelForCausalLM

    def load() -> int:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for parameter in model.parameters():  # which are the files, mapped: nothing has been read yet
            parameter.detach().view(-1).view(torch.uint8)[:: os.sysconf("SC_PAGESIZE")].sum()
        return -1

    return load


def _split(folder: Path) -> tuple[Any, Any]:
    """The model at tp 2, on meta, and its manager."""
    from titanplans import modeling
    from titanplans.parallel import Degrees, FSDP2Config, ParallelManager

    manager = ParallelManager(FSDP2Config(), Degrees(tp=dist.get_world_size()), device_type="cpu")
    model = modeling.build(modeling.load_config_file(folder)).bfloat16()
    return manager.parallelize(model), manager


def set_model_state_dict(folder: Path) -> Callable[[], int]:
    """torch, where rank 0 reads all files and sends each parameter's parts."""
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
    """titanplans, where each rank reads its parts."""
    import titanplans

    model, manager = _split(folder)

    def load() -> int:
        manager.to_empty()
        return titanplans.load_weights(model, folder).bytes_read

    return load


def copied(folder: Path) -> Callable[[], int]:
    """A plain copy of the files."""
    target = _target(folder)

    def copy() -> int:
        target.mkdir()
        for file in folder.iterdir():
            shutil.copyfile(file, target / file.name)
        return _sync(target)

    return copy


def save_pretrained(folder: Path) -> Callable[[], int]:
    """transformers, the whole model in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    target = _target(folder)

    def save() -> int:
        model.save_pretrained(target, max_shard_size="200MB")
        return _sync(target)

    return save


def save_weights(folder: Path) -> Callable[[], int]:
    """titanplans, of a model at tp 2."""
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
    """A plain read of the files into memory."""

    def load() -> int:
        values = 0
        for file in folder.iterdir():
            values += len(file.read_bytes())
        return values

    return load


def _target(folder: Path) -> Path:
    """Where a folder is written, which is not there."""
    target = folder.with_name("written")
    if dist.get_rank() == 0 and target.exists():
        shutil.rmtree(target)
    dist.barrier()
    return target


def _sync(folder: Path) -> int:
    """Bring files to the disk; return their bytes."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    return sum(file.stat().st_size for file in folder.iterdir())


STARTING = ("from_pretrained", "set_model_state_dict", "load_weights")
BANDWIDTH = ("copied", "save_pretrained", "save_weights", "read", "from_pretrained", "load_weights")
WAYS = {
    "from_pretrained": (from_pretrained, 1),
    "set_model_state_dict": (set_model_state_dict, 2),
    "load_weights": (load_weights, 2),
    "copied": (copied, 1),
    "save_pretrained": (save_pretrained, 1),
    "save_weights": (save_weights, 2),
    "read": (read, 1),
}
"""How each is done, and by how many ranks."""


def _of_own(what: str, file: str) -> int:
    """A number that the kernel keeps of this process."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    value = next(line for line in lines if line.startswith(what)).split()[1]
    return int(value) * (1024 if file == "status" else 1)


def _memory() -> tuple[int, int]:
    """This process's own memory, and that with the pages of files."""
    own = _of_own("RssAnon", "status")
    return own, own + _of_own("RssFile", "status")


def _rank(rank: int, way: str, folder: Path, ranks: int, store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{store}")
    load = WAYS[way][0](folder)
    gc.collect()
    peaks, done = [(0, 0)], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peaks.append(_memory())

    watcher = threading.Thread(target=watch, daemon=True)
    dist.barrier()
    before = _memory()
    watcher.start()
    disk, begin = _of_own("read_bytes", "io"), time.perf_counter()
    values = load()
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    dist.barrier()
    own, mapped = (max(peak) - start for peak, start in zip(zip(*peaks, strict=True), before, strict=True))
    answers.put(Measured(seconds, own, mapped, values, _of_own("read_bytes", "io") - disk))
    dist.destroy_process_group()


def measure(way: str, folder: Path) -> list[Measured]:
    """Let new processes load the folder; return what each has used."""
    ranks = WAYS[way][1]
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as store:
        multiprocessing.spawn(_rank, (way, folder, ranks, f"{store}/store", answers), nprocs=ranks)
    return [answers.get() for _ in range(ranks)]


def forget(folder: Path) -> None:
    """Let the system forget what it has cached of the files."""
    os.sync()
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(folder: Path, gigabytes: float, rounds: int) -> None:
    write_folder(folder, gigabytes)
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(
        f"\n{whole / 1e9:.2f} GB in {len(list(folder.glob('*.safetensors')))} files, torch {torch.__version__}\n"
    )
    print(
        f"{'':34}{'seconds':>9}{'fastest':>9}{'own MB':>14}{'mapped MB':>14}{'values MB':>14}{'disk MB':>9}"
    )
    for cached in (True, False):
        found: dict[str, list[list[Measured]]] = {way: [] for way in STARTING}
        for turn in range(rounds + cached):
            for way in reversed(STARTING) if turn % 2 else STARTING:
                if not cached:
                    forget(folder)
                measured = measure(way, folder)
                if turn or not cached:  # the first reads the files into the cache
                    found[way].append(measured)
        for way, runs in found.items():
            seconds = [max(rank.seconds for rank in run) for run in runs]
            own = " ".join(f"{max(run[i].own for run in runs) / 1e6:,.0f}" for i in range(len(runs[0])))
            mapped = " ".join(f"{max(run[i].mapped for run in runs) / 1e6:,.0f}" for i in range(len(runs[0])))
            values = " ".join(f"{rank.values / 1e6:,.0f}" for rank in runs[0] if rank.values >= 0)
            disk = statistics.median(sum(rank.disk for rank in run) for run in runs) / 1e6
            name = f"{way}, {'cached' if cached else 'from the disk'}"
            times = f"{statistics.median(seconds):9.2f}{min(seconds):9.2f}"
            print(f"{name:34}{times}{own:>14}{mapped:>14}{values:>14}{disk:9,.0f}", flush=True)


def bandwidth(folder: Path, gigabytes: float, rounds: int) -> None:
    write_folder(folder, gigabytes)
    whole = sum(file.stat().st_size for file in folder.iterdir())
    print(f"\n{whole / 1e9:.2f} GB, torch {torch.__version__}\n")
    print(f"{'':20}{'seconds':>9}{'fastest':>9}{'GB/s':>7}{'own MB':>14}")
    found: dict[str, list[list[Measured]]] = {way: [] for way in BANDWIDTH}
    for turn in range(rounds + 1):
        for way in reversed(BANDWIDTH) if turn % 2 else BANDWIDTH:
            measured = measure(way, folder)
            if turn:
                found[way].append(measured)
    for way, runs in found.items():
        seconds = [max(rank.seconds for rank in run) for run in runs]
        own = " ".join(f"{max(run[i].own for run in runs) / 1e6:,.0f}" for i in range(len(runs[0])))
        median = statistics.median(seconds)
        print(f"{way:20}{median:9.2f}{min(seconds):9.2f}{whole / 1e9 / median:7.2f}{own:>14}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["start", "bandwidth"])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one that is not")
    parser.add_argument(
        "--folder", help="a folder on the disk to measure; default: the system's for temporary files"
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
