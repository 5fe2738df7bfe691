"""`titanplans estimate JOB`: print the memory that a rank of a job needs on a GPU, without a GPU."""

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanplans.config import load_job
from titanplans.config.values import PositiveInt, from_text
from titanplans.text import columns, counted

if TYPE_CHECKING:
    from titanplans.foresight.hardware import Gpu
    from titanplans.foresight.memory import MemoryForecast

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options; all other arguments are those of the job."""
    parser = argparse.ArgumentParser(
        prog="titanplans estimate",
        usage="titanplans estimate JOB.toml [--gpu H100] [--nodes N] [--section.key value ...]",
        description="Run two steps of a job on tensors without memory, and print what a rank of it needs on a GPU: by part, "
        "when in the step, and what CUDA's caching allocator makes of it. Needs no GPU, data or weights.",
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
    from titanplans.foresight.processes import forecast_apart
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
    forecasts, assumptions = forecast_apart(job, world_size, gpu)
    expandable = _has_expandable_segments()
    on_gpu = [each.expandable_on_gpu if expandable else each.standard_on_gpu for each in forecasts]
    fits = not any(each.is_out_of_memory for each in on_gpu)
    retries = max(each.retries for each in on_gpu)
    if options.json:
        print(json.dumps(_as_json(forecasts, assumptions, gpu, world_size, expandable, fits), indent=2))
    else:
        t = job.training
        print(
            f"{counted(world_size, 'GPU')} ({gpu.name}), {t.local_batch_size} x {t.seq_len:,} tokens a data-parallel rank"
        )
        for forecast in forecasts:
            title = f"memory of stage {forecast.stage}" if len(forecasts) > 1 else "memory of a rank"
            print("\n".join(_lines(forecast, title, expandable)))
        needed = max((each.expandable if expandable else each.standard).reserved for each in forecasts)
        limit = f"{gpu.memory_gib:.1f} - {gpu.outside_gib:.1f} for CUDA and NCCL"
        if fits and retries:
            print(
                f"fits, barely: the allocator would reserve {_gib(needed)} GiB of {limit}; it returns unused memory to the "
                f"GPU {counted(retries, 'time')} in two steps, which is slow"
            )
        else:
            print(f"{'fits' if fits else 'does not fit'}: {_gib(needed)} GiB of {limit}")
        print("\n".join(assumptions))
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0 if fits else 1


def _has_expandable_segments() -> bool:
    """Whether torch's allocator would use expandable segments, by the environment."""
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in _SETTINGS)


def _lines(forecast: "MemoryForecast", title: str, expandable: bool) -> list[str]:
    from titanplans.foresight.memory import PARTS

    rows = [(title, "GiB", "")]
    rows += [(part, _gib(size), PARTS[part]) for part, size in forecast.parts.items() if size >= 2**20]
    rows.append(("sum", _gib(forecast.live), f"peak in {forecast.when_text}"))
    standard, other = _gib(forecast.standard.reserved), _gib(forecast.expandable.reserved)
    rows.append(("reserved", standard, "by torch's allocator" + ("" if expandable else ", which decides")))
    decides = ", which decides (PYTORCH_ALLOC_CONF)" if expandable else ""
    rows.append(("", other, f"with expandable_segments:True{decides}"))
    return columns(rows, right={1})


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def _as_json(
    forecasts: "list[MemoryForecast]",
    assumptions: list[str],
    gpu: "Gpu",
    world_size: int,
    expandable: bool,
    fits: bool,
) -> dict[str, Any]:
    stages = [
        {
            "stage": forecast.stage,
            "parts": forecast.parts,
            "allocated": forecast.live,
            "reserved": forecast.standard.reserved,
            "reserved_expandable": forecast.expandable.reserved,
            "peak": asdict(forecast.when),
            "timeline": [{**asdict(segment), "bytes": size} for segment, size in forecast.timeline],
        }
        for forecast in forecasts
    ]
    return {
        "fits": fits,
        "gpu": gpu.to_dict(),
        "gpus": world_size,
        "expandable_segments": expandable,
        "stages": stages,
        "assumptions": assumptions,
    }
