"""Run training jobs as the command line does, in processes forked from a process that has imported all modules.

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
"""Seconds to wait for a job; a busy machine needs many."""


class Job:
    """A job file and its data in `folder`; its processes write the files `stdout` and `stderr` there."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "job.toml").write_text(_TOML)
        (folder / "gla.json").write_text(json.dumps(_GLA))
        (folder / "text.txt").write_text(" ".join(f"the {i * 7 % 97} quick {i} foxes" for i in range(20_000)))

    def start(self, *options: str, entry: Callable[[list[str]], None] | None = None) -> BaseProcess:
        """Start `titanplans train`, or `entry(arguments)`, as the leader of a process group."""
        return start(["train", "job.toml", *options], self.folder, entry)

    def run(self, *options: str, entry: Callable[[list[str]], None] | None = None) -> int:
        """Start the job and wait for its end; return its exit status."""
        return self.end(self.start(*options, entry=entry))

    def end(self, process: BaseProcess) -> int:
        """Wait for the end of the job; return its exit status."""
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"the job does not end: {self.out[-2000:]} {self.err[-2000:]}")
        return process.exitcode

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def losses(self) -> list[tuple[int, str]]:
        """Return step and loss of each logged step, in the order in which they were logged."""
        return [(int(step), loss) for step, loss in LOSS.findall(self.out)]

    @property
    def steps(self) -> list[int]:
        """Return the steps of the checkpoints in the job's folder."""
        folders = (self.folder / "out" / "checkpoint").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in folders)

    def wait_for(self, process: BaseProcess, condition: Callable[[], object]) -> None:
        """Wait until `condition()` is true."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert process.exitcode is None, self.out + self.err
            assert time.monotonic() < deadline, self.out + self.err
            time.sleep(0.05)

    def wait_for_steps(self, process: BaseProcess, count: int) -> None:
        """Wait until `count` more steps are logged."""
        target = len(self.losses) + count
        self.wait_for(process, lambda: len(self.losses) >= target)


def start(
    arguments: list[str], folder: Path, entry: Callable[[list[str]], None] | None = None
) -> BaseProcess:
    """Start `titanplans` with `arguments`, or `entry(arguments)`, in `folder`; it writes files `stdout` and `stderr`."""
    for name in ("stdout", "stderr"):
        (folder / name).write_text("")
    context = multiprocessing.get_context(start_method())
    process = context.Process(target=_lead, args=(entry or run_titanplans, arguments, folder))
    process.start()
    return process


def output(arguments: list[str], folder: Path, entry: Callable[[list[str]], None] | None = None) -> str:
    """Start a process as `start` does, check that it ends with status 0, and return its stdout."""
    process = start(arguments, folder, entry)
    process.join(PATIENCE)
    status = process.exitcode
    process.kill()  # does nothing if the process has ended
    out = (folder / "stdout").read_text()
    assert status == 0, out + (folder / "stderr").read_text()
    return out


def flip(file: Path) -> None:
    """Flip a bit in the middle of `file`."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below `pid`: the ranks of a job and their workers."""
    pids = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            pids += [child, *descendants(child)]
    return pids


def have_ended(pids: list[int], seconds: float) -> bool:
    """Whether all processes have ended, or do so within `seconds`."""
    deadline = time.monotonic() + seconds
    while any(_is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def _lead(entry: Callable[[list[str]], None], arguments: list[str], folder: Path) -> None:
    from tests.support import rank_imports  # noqa: F401  the fork server hides an error of this import

    os.setsid()
    os.chdir(folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    entry(arguments)


def run_titanplans(arguments: list[str]) -> None:
    from titanplans.cli.main import run

    run(arguments)
