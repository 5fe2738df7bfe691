"""Execute the runs of `benchmarks.gpu_day` in separate processes with time limits, and write the page of their results."""

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIBRARIES = (
    "torch",
    "triton",
    "flash-linear-attention",
    "transformers",
    "torchao",
    "torchtitan",
    "flash-attn",
)


class Run(NamedTuple):
    """One process, or the processes of torchrun."""

    name: str
    command: tuple[str, ...] = ()
    """The arguments of Python."""
    minutes: float = 10
    """The time limit."""
    skipped: str | None = None
    """The reason why the run is skipped; None: the run is started."""


class Result(NamedTuple):
    """The result of a run."""

    part: str
    run: Run
    outcome: str
    """One of: done, refused, failed, took too long, skipped."""
    seconds: float
    text: str
    """The run's output: tables, a verdict, or the last lines."""


def carry_out(
    part: str,
    runs: Iterable[Run],
    environment: dict[str, str],
    at_once: int = 1,
    begun: Callable[[Run], None] = lambda run: None,
) -> Iterator[Result]:
    """Execute `runs` in separate processes, `at_once` at a time, and yield each result when its run ends.

    A run is terminated at its time limit. All are terminated if this process is interrupted. `begun` is called when a run
    begins.
    """
    waiting, started = deque(runs), list[_Started]()
    try:
        while waiting or started:
            while waiting and len(started) < at_once:
                run = waiting.popleft()
                begun(run)
                if run.skipped is not None:
                    yield Result(part, run, "skipped", 0.0, run.skipped)
                else:
                    started.append(_Started(part, run, environment))
            for one in [one for one in started if one.has_ended()]:
                result = one.result()
                started.remove(one)
                yield result
            if started:
                time.sleep(0.1)
    finally:
        for one in started:
            one.end()


class _Started:
    """A running process."""

    def __init__(self, part: str, run: Run, environment: dict[str, str]):
        self.part, self.run, self.begin = part, run, time.perf_counter()
        # `result` reads and closes these files.
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            (sys.executable, *run.command),
            cwd=ROOT,
            env=environment,
            stdout=self.out,
            stderr=self.err,
            start_new_session=True,
        )

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def has_ended(self) -> bool:
        """Return whether the run has ended or exceeded its time limit."""
        return self.process.poll() is not None or self.seconds > self.run.minutes * 60

    def end(self) -> None:
        """Terminate the run and the ranks that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def result(self) -> Result:
        """Terminate the run if it still runs, and return its result."""
        seconds, status = self.seconds, self.process.poll()
        self.end()
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read().strip())
            file.close()
        printed, errors = texts
        if status == 0:
            return Result(self.part, self.run, "done", seconds, printed)
        errors = errors.partition("failed (exitcode")[0]  # without torchrun's summary
        # If titanplans refuses the run, its error is one line.
        refusal = re.search(r"^(?:\[rank0\]:)?error: .*", errors, re.M)
        if status is not None and refusal:
            return Result(self.part, self.run, "refused", seconds, refusal[0])
        last_lines = "\n".join([*printed.splitlines()[-20:], *errors.splitlines()[-20:]])
        late = f"took longer than {self.run.minutes:g} minutes"
        outcome = late if status is None else f"failed, exit status {status}"
        return Result(self.part, self.run, outcome, seconds, last_lines)


def page(name: str, results: Sequence[Result], about: Mapping[str, str], *, dry: bool) -> str:
    """Return the results as Markdown: the machine, a table with one row per run, and the output of each run.

    Args:
        name: name of the device.
        results: results in the order of the runs.
        about: description of each part.
        dry: whether this is a dry run on a CPU.
    """
    title = f"a dry run of `make gpu` on a CPU: {name}" if dry else name
    lines = [
        f"# {title}",
        "",
        f"`make gpu`, {date.today()}, {_commit()}; {', '.join(_versions(dry))}.",
        "",
    ]
    if dry:
        lines += [
            "**Nothing here was run on a GPU.** Sizes are tiny; the page only shows that the parts run.",
            "",
        ]
    lines += ["| part | run | outcome | minutes |", "|---|---|---|---:|"]
    for one in results:
        outcome = f"skipped: {one.text}" if one.outcome == "skipped" else one.outcome
        lines.append(f"| {one.part} | {one.run.name} | {outcome} | {one.seconds / 60:.1f} |")
    for part in dict.fromkeys(one.part for one in results):
        ran = [one for one in results if one.part == part and one.outcome != "skipped"]
        if not ran:
            continue
        lines += ["", f"## {part}", "", about[part]]
        for one in ran:
            text = one.text
            if part == "verify" and one.outcome == "done":
                # Only the verdict, because the tables of 70 plans are long.
                text = "\n".join(text.splitlines()[-1:])
            lines += ["", f"{one.run.name}: {one.outcome}", "", "```text", *text.splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _versions(dry: bool) -> Iterator[str]:
    import torch

    for name in LIBRARIES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"no {name}"
    if not dry:
        yield f"CUDA {torch.version.cuda}"
        yield f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[arg-type]
        yield f"driver {_printed('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader', '-i', '0')}"


def _commit() -> str:
    return f"commit {_printed('git', '-C', str(ROOT), 'rev-parse', '--short', 'HEAD')}"


def _printed(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "unknown"
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.stdout.strip() if process.returncode == 0 else "unknown"
