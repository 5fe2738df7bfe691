"""Jobs of the command line and their output, each started in a process that has imported everything (process_groups.py).

job = Job(tmp_path)                      # a folder with a tiny job of two ranks
process = job.start("--training.steps=8")
job.wait_for_steps(process, 3)
"""

import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.process_groups import start_method

_GLA = {
    "model_type": "gla",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_heads": 4,
    "vocab_size": 4096,
    "intermediate_size": 32,
}
_TOML = """
[job]
dump_folder = "out"
[model]
config = "gla.json"
[training]
dataset_path = "text.txt"
local_batch_size = 1
seq_len = 32
steps = 100000
mixed_precision_param = "float32"
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
interval = 5
[metrics]
log_freq = 1
measure_first_step = false
[debug]
seed = 5
"""
LOSS = re.compile(r"step +(\d+)  loss +([\d.]+)")
PATIENCE = 120
"""Seconds, on a machine that does much else."""


class Job:
    """A job file and its data in `folder`; what its processes print is in `stdout` and `stderr` there."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "job.toml").write_text(_TOML)
        (folder / "gla.json").write_text(json.dumps(_GLA))
        (folder / "text.txt").write_text(" ".join(f"the {i * 7 % 97} quick {i} foxes" for i in range(20_000)))

    def start(self, *options: str, by: Callable[[list[str]], None] | None = None) -> BaseProcess:
        """Start `titanplans train`, or `by(its arguments)`, as the leader of a group of processes."""
        return start(["train", "job.toml", *options], self.folder, by)

    def run(self, *options: str, by: Callable[[list[str]], None] | None = None) -> int:
        """Start it and wait for its end; return its exit status."""
        return self.end(self.start(*options, by=by))

    def end(self, process: BaseProcess) -> int:
        """Wait for the end of a job; return its exit status."""
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"the job goes on: {self.out[-2000:]} {self.err[-2000:]}")
        return process.exitcode

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def losses(self) -> list[tuple[int, str]]:
        """Step and loss of each logged step, in the order of time."""
        return [(int(step), loss) for step, loss in LOSS.findall(self.out)]

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there."""
        found = (self.folder / "out" / "checkpoint").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in found)

    def wait_for(self, process: BaseProcess, what: Callable[[], object]) -> None:
        """Wait until `what()` is true."""
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert process.exitcode is None, self.out + self.err
            assert time.monotonic() < deadline, self.out + self.err
            time.sleep(0.05)

    def wait_for_steps(self, process: BaseProcess, number: int) -> None:
        """Wait until so many more steps have been taken."""
        wanted = len(self.losses) + number
        self.wait_for(process, lambda: len(self.losses) >= wanted)


def start(words: list[str], folder: Path, by: Callable[[list[str]], None] | None = None) -> BaseProcess:
    """Start `titanplans` with these words, or `by(words)`, in `folder`: what it prints is in `stdout` and `stderr` there."""
    for name in ("stdout", "stderr"):
        (folder / name).write_text("")
    context = multiprocessing.get_context(start_method())
    process = context.Process(target=_lead, args=(by or _titanplans, words, folder))
    process.start()
    return process


def output(words: list[str], folder: Path, by: Callable[[list[str]], None] | None = None) -> str:
    """Do what `start` does, to a successful end; return what it printed."""
    process = start(words, folder, by)
    process.join(PATIENCE)
    status = process.exitcode
    process.kill()  # which does nothing where it has ended
    out = (folder / "stdout").read_text()
    assert status == 0, out + (folder / "stderr").read_text()
    return out


def flip(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def descendants(pid: int) -> list[int]:
    """Return the ranks of a job, and the processes that they have started."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found


def gone(pids: list[int], seconds: float) -> bool:
    """Whether all have ended, or do so within some seconds."""
    deadline = time.monotonic() + seconds
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def _lead(by: Callable[[list[str]], None], words: list[str], folder: Path) -> None:
    from tests.support import rank_imports  # noqa: F401  the server says nothing where this fails

    os.setsid()
    os.chdir(folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    by(words)


def _titanplans(words: list[str]) -> None:
    from titanplans.cli.main import run

    run(words)
