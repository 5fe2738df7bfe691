"""A run of `benchmarks.gpu_day`: carried out in processes of its own, with a time limit; and the page of all of them."""

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
    """One process, or the ranks that torchrun starts."""

    name: str
    command: tuple[str, ...] = ()
    """Python's arguments."""
    minutes: float = 10
    skipped: str | None = None
    """Why it does not run here."""


class Result(NamedTuple):
    """What became of a run."""

    part: str
    run: Run
    outcome: str
    """done, refused, failed, took too long, or skipped."""
    seconds: float
    text: str
    """What it printed: its tables, its verdict, or its last lines."""


def carry_out(part: str, run: Run, environment: dict[str, str]) -> Result:
    """Do `run` in processes of its own, which are ended when their time is up."""
    if run.skipped is not None:
        return Result(part, run, "skipped", 0.0, run.skipped)
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            (sys.executable, *run.command),
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(run.minutes * 60)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:  # too long, or this process was told to end: its ranks, too
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().strip())
    seconds = time.perf_counter() - begin
    printed, said = texts
    if status == 0:
        return Result(part, run, "done", seconds, printed)
    said = said.partition("failed (exitcode")[0]  # what torchrun adds
    # titanplans' own refusals are one line.
    refusal = re.search(r"^(?:\[rank0\]:)?error: .*", said, re.M)
    if status is not None and refusal:
        return Result(part, run, "refused", seconds, refusal[0])
    last = "\n".join([*printed.splitlines()[-20:], *said.splitlines()[-20:]])
    ended = f"took longer than {run.minutes:g} minutes" if status is None else f"failed, exit status {status}"
    return Result(part, run, ended, seconds, last)


def page(name: str, results: Sequence[Result], about: Mapping[str, str], *, dry: bool) -> str:
    """Return what was found, as Markdown: the machine, one row a run, and what each printed.

    Args:
        name: the device's.
        results: in the order of the runs.
        about: of each part, what it does.
        dry: on a CPU, where nothing is found but that the parts run.
    """
    what = f"a dry run of `make gpu` on a CPU: {name}" if dry else name
    lines = [
        f"# {what}",
        "",
        f"`make gpu`, {date.today()}, {_commit()}; {', '.join(_versions(dry))}.",
        "",
    ]
    if dry:
        lines += [
            "**Nothing here was run on a GPU.** Sizes are tiny; what is shown is that the parts run.",
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
                text = "\n".join(text.splitlines()[-1:])  # the verdict: the tables of 70 plans are pages
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
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
