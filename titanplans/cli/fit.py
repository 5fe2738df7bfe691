"""`titanplans fit JOB --gpus 64xH100`: the layouts of a job that fit the memory of GPUs, the fastest first."""

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from titanplans.cli.estimate import gib, has_expandable_segments
from titanplans.cli.machines import add_hardware_option
from titanplans.config import JobConfig, load_job
from titanplans.config.arguments import parse_arguments
from titanplans.config.values import PositiveInt, from_text
from titanplans.disk import write_atomically
from titanplans.errors import ConfigError, UserError
from titanplans.text import columns, counted

if TYPE_CHECKING:
    from titanplans.foresight.forecast import Forecast
    from titanplans.foresight.layouts import Estimated, JobLayout, Search

_PROCESSES = 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options; all other arguments are those of the job."""
    parser = argparse.ArgumentParser(
        prog="titanplans fit",
        usage="titanplans fit JOB.toml --gpus 64xH100 [--write] [--section.key value ...]",
        description="Print the layouts of a job (degrees, what is recomputed, the batch of a rank) that fit the memory of "
        "these GPUs, with the estimated time of a step, the fastest first, and why others are not among them. Needs no GPU, "
        "data or weights.",
        epilog="exit status: 0 at least one layout fits, 1 none does, 2 the job can't be estimated",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", required=True, metavar="NxGPU", help="such as 64xH100")
    parser.add_argument(
        "--global-batch-size",
        metavar="N",
        help="sequences of a step; default: training.global_batch_size",
    )
    parser.add_argument("--seq-len", metavar="N", help="tokens of a sequence; default: training.seq_len")
    parser.add_argument("--count", metavar="N", default="5", help="how many layouts; default: 5")
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
    search, assumptions = _search(job, arguments, gpus, name, options.hardware, sequences, count)
    found = search.found[:count]
    if options.json:
        print(json.dumps(_as_json(search, found, assumptions), indent=2))
    else:
        print(f"{gpus} x {name}, {counted(sequences, 'sequence')} of {job.training.seq_len:,} tokens a step")
        print("\n".join([*_lines(search, found), *assumptions]))
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.write and found:
        name, _, _ = parse_arguments(arguments)
        assert name is not None  # load_job has read it
        settings, file = found[0].layout.settings(), Path(name)
        if options.seq_len is not None:
            settings["training"]["seq_len"] = job.training.seq_len
        write_settings(file, settings)
        print(f"wrote layout 1 into {file}", file=sys.stderr)
    return 0 if found else 1


def _search(
    job: JobConfig,
    arguments: list[str],
    gpus: int,
    name: str,
    hardware: Path | None,
    sequences: int,
    count: int,
) -> "tuple[Search, list[str]]":
    """Return the search, and what its forecasts assume."""
    from titanplans.foresight import processes

    processes.prepare()
    from titanplans.foresight.hardware import find_gpu
    from titanplans.foresight.layouts import Excluded, Search, candidates, with_experts
    from titanplans.plan.degrees import Degrees

    gpu, replicas = find_gpu(name, hardware), job.parallelism.data_parallel_replicate_degree
    if gpus % replicas:
        raise ConfigError(
            f"--gpus {gpus}: parallelism.data_parallel_replicate_degree = {replicas} does not divide it"
        )
    assumptions: dict[str, None] = {}
    with processes.rehearsing(gpu, _PROCESSES) as pool:

        def evaluate(layouts: Sequence["JobLayout"]) -> "list[Forecast | UserError]":
            tasks: list[Any] = []
            for layout in layouts:
                try:
                    variant = load_job([*arguments, *(f"--{each}" for each in layout.options())], "fit")
                    tasks.append(pool.submit(processes.forecast_in_process, variant, gpus, gpu))
                except UserError as error:
                    tasks.append(error)
            return [each if isinstance(each, UserError) else result(each) for each in tasks]

        def result(task: Any) -> "Forecast | UserError":
            try:
                forecast, assumed = task.result()
            except UserError as error:
                return error
            assumptions.update(dict.fromkeys([*assumed, *forecast.notes]))
            return forecast

        search = Search(
            gpu,
            sequences,
            evaluate,
            has_expandable_segments(),
            count,
            lambda text: print(text, file=sys.stderr),
        )
        met = list(candidates(gpus, sequences, replicas))
        search.excluded += [each for each in met if isinstance(each, Excluded)]
        plain = [each for each in met if not isinstance(each, Excluded)]
        # A model without experts refuses any degree of them. Two tasks at once start both processes.
        no_experts = pool.submit(processes.refusals_in_process, job, [Degrees(dp_shard=2, ep=2)])
        pool.submit(processes.refusals_in_process, job, [])
        has_experts = no_experts.result() == [None]
        degrees = [each for some in plain for each in with_experts(some, has_experts)]
        # The plan does not depend on what shards the parameters.
        shapes = list(dict.fromkeys(replace(each, dp_shard=-1) for each in degrees))
        reasons = dict(
            zip(shapes, pool.submit(processes.refusals_in_process, job, shapes).result(), strict=True)
        )
        refusals = [reasons[replace(each, dp_shard=-1)] for each in degrees]
        search.excluded += [
            Excluded(d, why) for d, why in zip(degrees, refusals, strict=True) if why is not None
        ]
        search.run(each for each, why in zip(degrees, refusals, strict=True) if why is None)
    return search, list(assumptions)


def _lines(search: "Search", found: "list[Estimated]") -> list[str]:
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
    if found:
        lines += ["", "layout 1:", *(f"  {line}" for line in toml_lines(found[0].layout))]
    alone = [each for each in search.excluded if each.has_one_axis]
    lines += ["", "not among them:", *(f"  {each.what}: {each.why}" for each in alone)]
    if others := len(search.excluded) - len(alone):
        lines.append(
            f"  and {counted(others, 'combination')} of such degrees (--json names all, with the reasons)"
        )
    return lines


def binding(forecast: "Forecast") -> list[tuple[str, float]]:
    """Return the parts of a step's time with their shares, the largest first."""
    from titanplans.foresight.time import IDLE

    rank = max(forecast.ranks, key=lambda rank: rank.time.seconds)
    shares = {part: seconds / forecast.seconds for part, seconds in rank.time.parts.items()}
    if forecast.idle:
        shares[IDLE] = 1 - sum(shares.values())
    return sorted(shares.items(), key=lambda item: -item[1])


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
