"""`titanplans fit JOB --gpus 64xH100`: the layouts of a job that fit the memory of GPUs, the fastest first."""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tomli

from titanplans.cli.estimate import gib
from titanplans.cli.machines import add_hardware_option
from titanplans.config import JobConfig, load_job
from titanplans.config.arguments import parse_arguments
from titanplans.config.values import PositiveInt, from_text
from titanplans.disk import write_atomically
from titanplans.errors import ConfigError, UserError
from titanplans.foresight.allocator import has_expandable_segments
from titanplans.text import columns, counted

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    from titanplans.foresight.forecast import Forecast
    from titanplans.foresight.hardware import Gpu
    from titanplans.foresight.layouts import Excluded, JobLayout
    from titanplans.foresight.predict import LayoutSample, PipelineShape
    from titanplans.foresight.search import Estimated, Search
    from titanplans.plan.degrees import Degrees

_MOST_PROCESSES = 8
"""A process needs up to 1 GiB. With more processes, more layouts are rehearsed that turn out not to be among the best."""

T = TypeVar("T")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options. All other arguments are arguments of the job."""
    parser = argparse.ArgumentParser(
        prog="titanplans fit",
        usage="titanplans fit JOB.toml --gpus 64xH100 [--write] [--section.key value ...]",
        description="Print the layouts of a job (degrees, recomputation, local batch size) that fit the memory of these "
        "GPUs, the fastest first, with the estimated time of a step, and why other layouts are not shown. Needs no GPU, "
        "data or weights.",
        epilog="exit status: 0 at least one layout fits, 1 none does, 2 the job can't be estimated",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", required=True, metavar="NxGPU", help="such as 64xH100")
    parser.add_argument(
        "--global-batch-size",
        metavar="N",
        help="sequences per step; default: training.global_batch_size",
    )
    parser.add_argument("--seq-len", metavar="N", help="tokens per sequence; default: training.seq_len")
    parser.add_argument(
        "--count",
        metavar="N",
        default="5",
        help="number of layouts to show at most; default: 5. Layouts 1.3 times as slow as the fastest are left out",
    )
    add_hardware_option(parser)
    parser.add_argument(
        "--write", action="store_true", help="write the fastest layout, and --seq-len, into the job's file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: list[str]) -> int:
    """Run the command with these arguments and return the exit status.

    Raises:
        UserError: an argument, or the job, can't be used.
    """
    options, arguments = parser().parse_known_args(argv)
    if options.seq_len is not None:
        arguments.append(f"--training.seq_len={options.seq_len}")
    job = load_job(arguments, "fit")
    count = from_text(options.count, PositiveInt, "--count")
    if options.global_batch_size is not None:
        sequences = from_text(options.global_batch_size, PositiveInt, "--global-batch-size")
    else:
        sequences = job.training.global_batch_size
    if sequences == -1:
        raise ConfigError(
            "the job leaves training.global_batch_size to the number of GPUs, and layouts are compared for the same batch: "
            "give --global-batch-size"
        )
    number, _, name = options.gpus.partition("x")
    if not name:
        raise ConfigError(
            f"--gpus {options.gpus}: write the number and the name of the GPUs, such as 64xH100"
        )
    gpus = from_text(number, PositiveInt, "--gpus")
    began = time.monotonic()
    search = _search(job, arguments, gpus, name, options.hardware, sequences, count)
    best_layouts = search.found[:count]
    assumptions = list(dict.fromkeys(note for each in best_layouts for note in each.forecast.notes))
    if options.json:
        print(json.dumps(_as_json(search, best_layouts, assumptions), indent=2))
    else:
        print(f"{gpus} x {name}, {counted(sequences, 'sequence')} of {job.training.seq_len:,} tokens a step")
        print("\n".join([*_lines(search, best_layouts), *assumptions]))
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.write and best_layouts:
        name, _, _ = parse_arguments(arguments)
        assert name is not None  # load_job has read it
        settings, file = best_layouts[0].layout.settings(), Path(name)
        if options.seq_len is not None:
            settings["training"]["seq_len"] = job.training.seq_len
        write_settings(file, settings)
        print(f"wrote layout 1 into {file}", file=sys.stderr)
    return 0 if best_layouts else 1


def _search(
    job: JobConfig,
    arguments: list[str],
    gpus: int,
    name: str,
    hardware: Path | None,
    sequences: int,
    count: int,
) -> "Search":
    from titanplans.foresight import processes

    processes.prepare()
    from titanplans.foresight.hardware import find_gpu
    from titanplans.foresight.search import Search
    from titanplans.parallel.mesh.process_group import available_cores

    gpu, replicas = find_gpu(name, hardware), job.parallelism.data_parallel_replicate_degree
    if gpus % replicas:
        raise ConfigError(
            f"--gpus {gpus}: parallelism.data_parallel_replicate_degree = {replicas} does not divide it"
        )
    at_once = min(_MOST_PROCESSES, max(2, available_cores()))
    with processes.rehearsing(gpu, at_once) as pool:
        rehearsals = _Rehearsals(pool, arguments, gpus, gpu)
        degrees, excluded, pipelines = _possible(pool, job, gpus, sequences)
        search = Search(
            gpu,
            sequences,
            rehearsals,
            pipelines,
            has_expandable_segments(),
            count,
            at_once,
            lambda text: print(text, file=sys.stderr),
            excluded=excluded,
        )
        search.run(degrees)
    return search


class _Rehearsals:
    """Rehearses layouts of a job in other processes."""

    def __init__(self, pool: "ProcessPoolExecutor", arguments: list[str], gpus: int, gpu: "Gpu"):
        self._pool, self._arguments, self._gpus, self._gpu = pool, arguments, gpus, gpu

    def sample(self, layout: "JobLayout") -> "Future[LayoutSample]":
        """Begin to sample a layout."""
        from titanplans.foresight.processes import sample_in_process

        return self._submit(sample_in_process, layout)

    def forecast(self, layout: "JobLayout") -> "Future[Forecast]":
        """Begin to forecast a layout."""
        from titanplans.foresight.processes import forecast_in_process

        return self._submit(forecast_in_process, layout)

    def _submit(self, rehearse: "Callable[[JobConfig, int, Gpu], T]", layout: "JobLayout") -> "Future[T]":
        try:
            job = load_job([*self._arguments, *(f"--{each}" for each in layout.options())], "fit")
        except UserError as error:
            refused: Future[T] = Future()
            refused.set_exception(error)
            return refused
        return self._pool.submit(rehearse, job, self._gpus, self._gpu)


def _possible(
    pool: "ProcessPoolExecutor", job: JobConfig, gpus: int, sequences: int
) -> "tuple[list[Degrees], list[Excluded], dict[int, PipelineShape]]":
    """Return the degrees that the batch, the stages and the plan allow; the excluded degrees with the reasons; and the shape
    of the pipeline for each number of stages."""
    from titanplans.foresight import processes
    from titanplans.foresight.layouts import Excluded, candidates, divisors, with_experts
    from titanplans.foresight.predict import PipelineShape
    from titanplans.plan.degrees import Degrees

    replicas = job.parallelism.data_parallel_replicate_degree
    counts = [each for each in divisors(gpus // replicas) if each > 1]
    stages = pool.submit(processes.stages_in_process, job, counts)
    # The plan of a model without experts refuses every expert-parallel degree above 1.
    no_experts = pool.submit(processes.refusals_in_process, job, [Degrees(ep=2)])
    pipelines: dict[int, PipelineShape] = {}
    refused_counts: dict[int, str] = {}
    for count, starts in zip(counts, stages.result(), strict=True):
        try:
            if isinstance(starts, str):
                refused_counts[count] = starts
            else:
                pipelines[count] = PipelineShape(job, count, starts)
        except UserError as error:
            refused_counts[count] = str(error)
    has_experts = no_experts.result() == [None]
    degrees, excluded = [], []
    for candidate in candidates(gpus, sequences, replicas):
        if isinstance(candidate, Excluded):
            excluded.append(candidate)
        elif candidate.pp in refused_counts:
            excluded.append(Excluded(candidate, refused_counts[candidate.pp]))
        else:
            degrees += with_experts(candidate, has_experts)
    # Whether the plan refuses a layout depends neither on FSDP's degrees nor on the pipeline's.
    shapes = sorted({(each.tp, each.cp, each.ep) for each in degrees})
    halves = shapes[::2], shapes[1::2]
    tasks = [
        pool.submit(processes.refusals_in_process, job, [Degrees(tp=tp, cp=cp, ep=ep) for tp, cp, ep in half])
        for half in halves
    ]
    refusals = {
        shape: why
        for half, task in zip(halves, tasks, strict=True)
        for shape, why in zip(half, task.result(), strict=True)
    }
    excluded += [
        Excluded(each, why) for each in degrees if (why := refusals[each.tp, each.cp, each.ep]) is not None
    ]
    return [each for each in degrees if refusals[each.tp, each.cp, each.ep] is None], excluded, pipelines


def _lines(search: "Search", found: "list[Estimated]") -> list[str]:
    from titanplans.foresight.search import WORTHWHILE

    rows = [("", "s a step", "tokens/s a GPU", "MFU", "reserved GiB", "layout", "most of the time")]
    for index, each in enumerate(found, 1):
        forecast = each.forecast
        rows.append(
            (
                str(index),
                f"{each.seconds:.2f}",
                f"{each.tokens_per_second:,.0f}",
                f"{each.mfu:.0%}",
                gib(forecast.reserved(search.expandable)),
                str(each.layout),
                ", ".join(f"{part} {share:.0%}" for part, share in binding(forecast)[:2]),
            )
        )
    lines = columns(rows, right={1, 2, 3, 4}) if found else ["no layout fits"]
    if 0 < len(found) < search.count:
        lines.append(f"no other layout that fits takes at most {WORTHWHILE} times as long as the first")
    if found:
        lines += ["", "layout 1:", *(f"  {line}" for line in toml_lines(found[0].layout))]
    by_reason: dict[str, list[str]] = {}
    for each in search.excluded:
        if each.has_one_axis:
            by_reason.setdefault(each.why, []).append(each.what)
    lines += ["", "not among them:", *(f"  {'; '.join(whats)}: {why}" for why, whats in by_reason.items())]
    if others := sum(not each.has_one_axis for each in search.excluded):
        lines.append(
            f"  and {counted(others, 'combination')} of such degrees (--json names all, with the reasons)"
        )
    return lines


def binding(forecast: "Forecast") -> list[tuple[str, float]]:
    """Return the parts of a step's time as fractions of it, the largest first."""
    from titanplans.foresight.time import IDLE

    rank = max(forecast.ranks, key=lambda rank: rank.time.seconds)
    fractions = {part: seconds / forecast.seconds for part, seconds in rank.time.parts.items()}
    if forecast.idle:
        fractions[IDLE] = 1 - sum(fractions.values())
    return sorted(fractions.items(), key=lambda item: -item[1])


def toml_lines(layout: "JobLayout") -> list[str]:
    """Return the lines of a job's file that set `layout`."""
    return [
        line
        for section, keys in layout.settings().items()
        for line in (f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in keys.items()))
    ]


def _toml(value: int | str) -> str:
    return json.dumps(value)


def write_settings(file: Path, settings: Mapping[str, Mapping[str, int | str]]) -> None:
    """Set keys, by section, in a job's file, and leave all other lines as they are.

    Raises:
        ConfigError: the file sets a section in another form than a table, such as [section].
    """
    text = file.read_text()
    for section, keys in settings.items():
        for key, value in keys.items():
            text = _with_key(text, section, key, _toml(value))
    try:
        written = tomli.loads(text)
    except tomli.TOMLDecodeError:  # a section is in another form, and was added again as a table
        written = {}
    for section, keys in settings.items():
        if any(written.get(section, {}).get(key) != value for key, value in keys.items()):
            raise ConfigError(
                f"{file}: [{section}] is not a table with a key in each line, so it can't be changed: set by hand "
                + ", ".join(f"{key} = {_toml(value)}" for key, value in keys.items())
            )
    write_atomically(file, text)


def _with_key(text: str, section: str, key: str, value: str) -> str:
    lines = text.splitlines()
    header = next(
        (i for i, line in enumerate(lines) if re.match(rf"\s*\[{re.escape(section)}\]", line)), None
    )
    if header is None:
        return "\n".join([*lines, "", f"[{section}]", f"{key} = {value}", ""])
    end = next((i for i in range(header + 1, len(lines)) if re.match(r"\s*\[", lines[i])), len(lines))
    for index in range(header + 1, end):
        if re.match(rf"\s*{re.escape(key)}\s*=", lines[index]):
            comment = re.search(r"\s+#[^\"']*$", lines[index])
            lines[index] = f"{key} = {value}{comment[0] if comment else ''}"
            break
    else:
        lines.insert(header + 1, f"{key} = {value}")
    return "\n".join([*lines, ""])


def _as_json(search: "Search", found: "list[Estimated]", assumptions: list[str]) -> dict[str, Any]:
    return {
        "layouts": [
            {
                "settings": each.layout.settings(),
                "seconds": each.seconds,
                "tokens_per_second_per_gpu": each.tokens_per_second,
                "mfu": each.mfu,
                "reserved": each.forecast.reserved(search.expandable),
                "shares": dict(binding(each.forecast)),
            }
            for each in found
        ],
        "excluded": [{"what": each.what, "why": each.why} for each in search.excluded],
        "assumptions": assumptions,
    }
