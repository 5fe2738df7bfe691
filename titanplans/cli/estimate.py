"""`titanplans estimate JOB`: print the memory and the time of a job's step on GPUs, without a GPU."""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanplans.config import load_job
from titanplans.config.values import PositiveInt, from_text
from titanplans.text import columns, counted

if TYPE_CHECKING:
    from titanplans.foresight.forecast import Forecast
    from titanplans.foresight.memory import MemoryForecast
    from titanplans.observe.storages import Segment

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options; all other arguments are those of the job."""
    parser = argparse.ArgumentParser(
        prog="titanplans estimate",
        usage="titanplans estimate JOB.toml [--gpu H100] [--nodes N] [--section.key value ...]",
        description="Run two steps of a job on tensors without memory. Print the memory that a rank of it needs on a GPU, "
        "by part and when in the step, what CUDA's caching allocator makes of it, and the time of a step, by part. Needs no "
        "GPU, data or weights.",
        epilog="exit status: 0 the job fits, 1 it needs more memory than the GPU has, 2 it can't be estimated",
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", default="H100", help="name of the GPU; default: H100")
    parser.add_argument(
        "--nodes",
        metavar="N",
        help="number of machines; default: as many GPUs as the degrees need, and in whole machines if FSDP takes the rest",
    )
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="TOML file with GPUs of your own")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: list[str]) -> int:
    """Run the command with these arguments and return the exit status.

    Raises:
        UserError: an argument, or the job, can't be used.
    """
    options, job_arguments = parser().parse_known_args(argv)
    job = load_job(job_arguments, "estimate")
    from titanplans.foresight.hardware import find_gpu
    from titanplans.foresight.processes import forecast_in_process, rehearsing
    from titanplans.training.job.resolve import data_parallel_degree, fewest_processes

    gpu = find_gpu(options.gpu, options.hardware)
    nodes = None if options.nodes is None else from_text(options.nodes, PositiveInt, "--nodes")
    if nodes is not None:
        world_size = nodes * gpu.gpus_per_node
    elif job.parallelism.shard_degree == -1:
        world_size = math.lcm(fewest_processes(job), gpu.gpus_per_node)
    else:
        world_size = fewest_processes(job)
    data_parallel_degree(job, world_size)  # refuses degrees that don't multiply to it
    began = time.monotonic()
    with rehearsing(gpu) as pool:
        forecast, assumptions = pool.submit(forecast_in_process, job, world_size, gpu).result()
    assumptions += forecast.notes
    expandable = has_expandable_segments()
    retries = forecast.retries(expandable)
    fits = retries is not None
    if options.json:
        print(json.dumps(_as_json(forecast, assumptions, expandable), indent=2))
    else:
        t = job.training
        print(
            f"{counted(world_size, 'GPU')} ({gpu.name}), {t.local_batch_size} x {t.seq_len:,} tokens a data-parallel rank"
        )
        for rank in forecast.ranks:
            of = f"stage {rank.stage}" if len(forecast.ranks) > 1 else "a rank"
            print("\n".join(_lines(rank.memory, f"memory of {of}", expandable)))
        needed = forecast.reserved(expandable)
        limit = f"{gpu.memory_gib:.1f} - {gpu.outside_gib:.1f} for CUDA and NCCL"
        if retries:
            print(
                f"fits, barely: the allocator would reserve {gib(needed)} GiB of {limit}; it returns unused memory to the "
                f"GPU {counted(retries, 'time')} in two steps, which is slow"
            )
        else:
            print(f"{'fits' if fits else 'does not fit'}: {gib(needed)} GiB of {limit}")
        print("\n".join([*_lines_of_time(forecast), *assumptions]))
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0 if fits else 1


def has_expandable_segments() -> bool:
    """Whether torch's allocator would use expandable segments, by the environment."""
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in _SETTINGS)


def _lines(forecast: "MemoryForecast", title: str, expandable: bool) -> list[str]:
    from titanplans.foresight.memory import PARTS

    rows = [(title, "GiB", "")]
    rows += [(part, gib(size), PARTS[part]) for part, size in forecast.parts.items() if size >= 2**20]
    rows.append(("sum", gib(forecast.live), f"peak in {forecast.when_text}"))
    standard, other = gib(forecast.standard.reserved), gib(forecast.expandable.reserved)
    rows.append(("reserved", standard, "by torch's allocator" + ("" if expandable else ", which decides")))
    decides = ", which decides (PYTORCH_ALLOC_CONF)" if expandable else ""
    rows.append(("", other, f"with expandable_segments:True{decides}"))
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
    idle = f", {forecast.idle:.0%} of it idle in the pipeline" if forecast.idle else ""
    lines.append(
        f"{forecast.seconds:.2f} s a step{idle}: {forecast.tokens_per_second:,.0f} tokens/s a GPU, "
        f"{forecast.mfu:.0%} MFU"
    )
    return lines


def gib(size: int) -> str:
    """Return a number of bytes in GiB, with two digits."""
    return f"{size / 2**30:.2f}"


def _as_json(forecast: "Forecast", assumptions: list[str], expandable: bool) -> dict[str, Any]:
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
