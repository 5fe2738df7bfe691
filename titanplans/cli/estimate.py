"""`titanplans estimate JOB`: print the memory and the time of a job's step on GPUs, without a GPU."""

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from titanplans.cli import measure
from titanplans.cli.machines import add_machine_options, gpu_of, world_size_of
from titanplans.config import load_job
from titanplans.foresight.allocator import has_expandable_segments
from titanplans.text import columns, counted

if TYPE_CHECKING:
    from titanplans.foresight.forecast import Forecast
    from titanplans.foresight.memory import MemoryForecast
    from titanplans.observe.storages import Segment


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options. All other arguments are arguments of the job."""
    parser = argparse.ArgumentParser(
        prog="titanplans estimate",
        usage="titanplans estimate JOB.toml [--gpu H100] [--nodes N] [--section.key value ...]\n"
        "       titanplans estimate --measure [--output cluster.toml]",
        description="Run two steps of a job on tensors without memory. Print the memory that a rank needs on a GPU, by "
        "part, with the moment of the peak; the memory that CUDA's caching allocator reserves for it; and the time of a "
        "step, by part. Needs no GPU, data or weights.",
        epilog="exit status: 0 the job fits, 1 it needs more memory than the GPU has, 2 it can't be estimated",
        allow_abbrev=False,
    )
    add_machine_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    measure.add_measure_options(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the command with these arguments and return the exit status.

    Raises:
        UserError: an argument, or the job, can't be used.
    """
    options, job_arguments = parser().parse_known_args(argv)
    if options.measure or options.output is not None:
        return measure.main(argv)
    job = load_job(job_arguments, "estimate")
    from titanplans.foresight.processes import forecast_in_process, prepare, rehearsing

    prepare()
    gpu = gpu_of(options)
    world_size = world_size_of(job, options, gpu)
    began = time.monotonic()
    with rehearsing(gpu) as pool:
        forecast = pool.submit(forecast_in_process, job, world_size, gpu).result()
    expandable = has_expandable_segments()
    if options.json:
        print(json.dumps(as_json(forecast, forecast.notes, expandable), indent=2))
    else:
        t = job.training
        print(
            f"{counted(world_size, 'GPU')} ({gpu.name}), {t.local_batch_size} x {t.seq_len:,} tokens a data-parallel rank"
        )
        for rank in forecast.ranks:
            of = f"stage {rank.stage}" if len(forecast.ranks) > 1 else "a rank"
            print("\n".join(lines_of_memory(rank.memory, f"memory of {of}", expandable)))
        print(verdict(forecast, expandable))
        print("\n".join([*_lines_of_time(forecast), summary_of_time(forecast), *forecast.notes]))
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0 if forecast.retries(expandable) is not None else 1


def lines_of_memory(forecast: "MemoryForecast", title: str, expandable: bool) -> list[str]:
    """Return a table of the memory of a rank, by part."""
    from titanplans.foresight.memory import PARTS

    rows = [(title, "GiB", "")]
    rows += [(part, gib(size), PARTS[part]) for part, size in forecast.parts.items() if size >= 2**20]
    rows.append(("sum", gib(forecast.live), f"peak in {forecast.when_text}"))
    standard, other = gib(forecast.standard.reserved), gib(forecast.expandable.reserved)
    rows.append(
        ("reserved", standard, "by torch's allocator" + ("" if expandable else "; this size has to fit"))
    )
    note = " (PYTORCH_ALLOC_CONF); this size has to fit" if expandable else ""
    rows.append(("", other, f"with expandable_segments:True{note}"))
    return columns(rows, right={1})


def _lines_of_time(forecast: "Forecast") -> list[str]:
    from titanplans.foresight.time import FOR_FSDP, IDLE, PARTS

    lines = []
    for rank in forecast.ranks:
        of = f"of stage {rank.stage}" if len(forecast.ranks) > 1 else ""
        rows = [(f"time of a step {of}".rstrip(), "ms", "")]
        idle = {IDLE: forecast.seconds - rank.time.seconds} if forecast.idle else {}
        collectives = {part: "between GPUs, in line" for part in rank.time.parts if part not in PARTS}
        for part, meaning in (PARTS | collectives | {IDLE: PARTS[IDLE]}).items():
            seconds = (rank.time.parts | idle).get(part, 0.0)
            note = f"; FSDP's collectives take {rank.time.fsdp * 1e3:,.0f} ms" if part == FOR_FSDP else ""
            if seconds >= 5e-4:
                rows.append((part, f"{seconds * 1e3:,.0f}", meaning + note))
        lines += columns([*rows, ("sum", f"{forecast.seconds * 1e3:,.0f}", "")], right={1})
    return lines


def summary_of_time(forecast: "Forecast") -> str:
    """Return a line with the time of a step, tokens/s and MFU."""
    idle = f", {forecast.idle:.0%} of it idle in the pipeline" if forecast.idle else ""
    return (
        f"{forecast.seconds:.2f} s a step{idle}: {forecast.tokens_per_second:,.0f} tokens/s a GPU, "
        f"{forecast.mfu:.0%} MFU"
    )


def verdict(forecast: "Forecast", expandable: bool) -> str:
    """Return a line that says whether the job fits into the memory of the GPU."""
    gpu, needed, retries = forecast.gpu, gib(forecast.reserved(expandable)), forecast.retries(expandable)
    limit = f"{gpu.memory_gib:.1f} - {gpu.outside_gib:.1f} for CUDA and NCCL"
    if retries:
        return (
            f"fits, barely: the allocator would reserve {needed} GiB of {limit}; it returns unused memory to the GPU "
            f"{counted(retries, 'time')} in two steps, which is slow"
        )
    return f"{'does not fit' if retries is None else 'fits'}: {needed} GiB of {limit}"


def gib(size: int) -> str:
    """Return a number of bytes in GiB, with two digits."""
    return f"{size / 2**30:.2f}"


def as_json(forecast: "Forecast", assumptions: list[str], expandable: bool) -> dict[str, Any]:
    """Return a forecast as plain dicts, lists and numbers."""
    stages = [
        {
            "stage": rank.stage,
            "parts": rank.memory.parts,
            "allocated": rank.memory.live,
            "reserved": rank.memory.standard.reserved,
            "reserved_expandable": rank.memory.expandable.reserved,
            "peak": _segment(rank.memory.when),
            "timeline": [{**_segment(segment), "bytes": size} for segment, size in rank.memory.timeline],
            "seconds": rank.time.parts,
            "seconds_of_fsdp": rank.time.fsdp,
        }
        for rank in forecast.ranks
    ]
    return {
        "fits": forecast.retries(expandable) is not None,
        "gpu": forecast.gpu.to_dict(),
        "gpus": forecast.gpus,
        "expandable_segments": expandable,
        "stages": stages,
        "seconds": forecast.seconds,
        "idle": forecast.idle,
        "tokens_per_second_per_gpu": forecast.tokens_per_second,
        "mfu": forecast.mfu,
        "assumptions": assumptions,
    }


def _segment(segment: "Segment") -> dict[str, Any]:
    return {"step": segment.step, "kind": segment.kind, "block": segment.block, "batch": segment.batch}
