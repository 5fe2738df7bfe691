"""Compare checkpoints with checksums and renames to torch's plain checkpoints of the same state.

    python -m benchmarks.checkpoints [--gigabytes 1] [--rounds 5] [--folder /tmp] [--steps 600]

Saving is measured in one process, with the variants interleaved: torch's `dcp.save`, which also syncs its files, and
titanplans' save, which in addition computes checksums, writes the manifest and renames the folder. `titanplans check`, and
loading with and without checksums, are measured next. The files are in the page cache. Reading is fastest there, so this
is the case in which checksums cost the largest fraction of the time. At the end, a tiny job on two CPU ranks saves every
second step, synchronously and asynchronously, and its memory and open files are measured.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from titanplans.training.checkpoint.manifest import Manifest, damage
from titanplans.training.checkpoint.storage import CheckpointReader, CheckpointWriter, Planner
from titanplans.training.launch.exit_status import finish

TENSORS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed rounds, after one warm-up round; 0: only the job"
    )
    parser.add_argument(
        "--folder", help="a folder on the disk to measure; default: the system's folder for temporary files"
    )
    parser.add_argument("--steps", type=int, default=600, help="steps of the job whose memory is measured")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        if options.rounds:
            measure(folder, options.gigabytes, options.rounds)
        for mode in ("disabled", "async"):
            watch(folder / mode, mode, options.steps)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, gigabytes: float, rounds: int) -> None:
    torch.manual_seed(0)
    state = {f"weight{i}": torch.randn(int(gigabytes * 1e9 / 4 / TENSORS)) for i in range(TENSORS)}
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    plain, ours = folder / "plain", folder / "step-1"
    manifest = Manifest(1, "training", {}, {}, {})
    nothing = {"no_dist": True}
    variants: dict[str, Callable[[], object]] = {
        "save: torch": lambda: dcp.save(state, storage_writer=FileSystemWriter(plain), **nothing),
        "save: with checksums and renames": lambda: dcp.save(
            state, storage_writer=CheckpointWriter(ours, manifest), **nothing
        ),
        "titanplans check": lambda: damage(ours),
        "load: torch": lambda: dcp.load(loaded, storage_reader=FileSystemReader(ours), **nothing),
        "load: without checksums": lambda: dcp.load(
            loaded, storage_reader=CheckpointReader(ours), planner=Planner(), **nothing
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name in reversed(variants) if turn % 2 else variants:
            if name.startswith("save"):
                shutil.rmtree(plain if name == "save: torch" else ours, ignore_errors=True)
                os.sync()  # so that writes of the previous variant are not timed
            begin = time.perf_counter()
            variants[name]()
            if turn:
                times[name].append(time.perf_counter() - begin)
    assert damage(ours) is None
    times["load: with checksums"] = [
        sum(pair) for pair in zip(times["titanplans check"], times["load: without checksums"], strict=True)
    ]
    print(f"\n{gigabytes} GB in {TENSORS} tensors, one process, {folder.parent}, torch {torch.__version__}\n")
    print(f"{'':34}{'median s':>10}{'fastest s':>11}{'GB/s':>8}{'ratio':>8}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        baseline = times[f"{name.partition(':')[0]}: torch"] if ":" in name else seconds
        ratio = statistics.median(a / b for a, b in zip(seconds, baseline, strict=True))
        print(f"{name:34}{median:10.3f}{min(seconds):11.3f}{gigabytes / median:8.2f}{ratio:8.2f}")


JOB = Path(__file__).parents[1] / "configs" / "gla_debug.toml"
"""The job of the demo; OPTIONS make it smaller, and make it save often."""
OPTIONS = (
    *("--training.local_batch_size=1", "--training.seq_len=64", "--validation.no-enable"),
    *("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=2"),
    *("--metrics.log_freq=1", "--metrics.enable_jsonl", "--job.dump_folder=out"),
)


def watch(folder: Path, mode: str, steps: int) -> None:
    """Print resident memory and open files of both ranks while a job trains and saves."""
    folder.mkdir()
    options = (*OPTIONS, f"--training.steps={steps}", f"--checkpoint.async_mode={mode}")
    command = (sys.executable, "-m", "titanplans", "train", str(JOB), *options)
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    metrics, due = folder / "out" / "metrics.jsonl", steps // 6
    print(f"\nasync_mode = {mode}: {'step':>6}{'MB of each rank':>20}{'open files':>14}")
    while process.poll() is None:
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if done >= due:
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            pages = [int(Path(f"/proc/{rank}/statm").read_text().split()[1]) for rank in ranks]
            megabytes = " ".join(f"{count * resource.getpagesize() / 1e6:.0f}" for count in pages)
            files = " ".join(str(len(os.listdir(f"/proc/{rank}/fd"))) for rank in ranks)
            print(f"{'':23}{done:>6}{megabytes:>20}{files:>14}", flush=True)
            due += steps // 6
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"the job ended with exit status {process.returncode}")


if __name__ == "__main__":
    main()
    finish(0)
