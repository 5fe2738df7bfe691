"""`titanplans explain JOB|MODEL`: how a model is split, what its ranks send each other, and what a step needs."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from titanplans.cli.estimate import (
    as_json,
    lines_of_memory,
    summary_of_time,
    verdict,
)
from titanplans.cli.explain_page import page
from titanplans.cli.explain_text import (
    PHASES,
    alike,
    all_transfers,
    binary,
    by,
    lines_of_recomputation,
    numbered,
    origin,
    placement,
    recomputed_operators,
    rows_of_transfers,
    shape_of_output,
)
from titanplans.cli.machines import add_machine_options, gpu_of, world_size_of
from titanplans.config import JobConfig, load_job
from titanplans.config.arguments import parse_arguments
from titanplans.config.families import DEFAULT_FLAVOR
from titanplans.disk import write_atomically
from titanplans.errors import ConfigError
from titanplans.foresight.allocator import has_expandable_segments
from titanplans.text import columns, fitted

if TYPE_CHECKING:
    from titanplans.foresight.explanation import (
        ExplainedModule,
        ExplainedParameter,
        Explanation,
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options. All other arguments are arguments of the job."""
    parser = argparse.ArgumentParser(
        prog="titanplans explain",
        usage="titanplans explain JOB.toml | MODEL [--html FILE] [--diff OTHER.toml | MODEL] [--gpu H100] [--nodes N] "
        "[--section.key value ...]",
        description="Print how a job's model is split: the plan and where it is from; the style, the placement and the "
        "local shape of each module; what is sent, over which dimension of the mesh; what is recomputed in the backward; "
        "and the memory of a step by part. MODEL is a registered model, which is explained at a tensor-parallel "
        "degree of 2 unless an option says otherwise. Needs no GPU, data or weights.",
        epilog="exit status: 0 explained, 2 it can't be",
        allow_abbrev=False,
    )
    add_machine_options(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a picture of a block")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--diff",
        metavar="OTHER",
        help="print only what differs from another job or model, with the same options",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the command with these arguments and return the exit status.

    Raises:
        UserError: an argument, or the job, can't be used.
    """
    options, arguments = parser().parse_known_args(argv)
    if options.diff is not None and (options.html is not None or options.json):
        raise ConfigError("--diff prints a table; leave out --html and --json")
    name = parse_arguments(arguments)[0] or ""
    jobs = [load_job(arguments, "explain", accepts_model=True)]
    if options.diff is not None:
        others = [options.diff, *(argument for argument in arguments if argument != name)]
        jobs.append(load_job(others, "explain", accepts_model=True))
    explained = _explained(jobs, options)
    if options.diff is not None:
        facts = [_facts(explanation) for explanation, _ in explained]
        print("\n".join(_difference((name, options.diff), facts)))
        return 0
    (job,), (explanation, assumptions) = jobs, explained[0]
    expandable = has_expandable_segments()
    if options.html is not None:
        text = page(_title(job, name), explanation, assumptions, expandable)
        write_atomically(options.html, text)
        print(f"written: {options.html}", file=sys.stderr)
    if options.json:
        split = [asdict(stage) for stage in explanation.stages]
        print(
            json.dumps({"split": split, **as_json(explanation.forecast, assumptions, expandable)}, indent=2)
        )
    elif options.html is None:
        print("\n".join([_title(job, name), *_lines(explanation, expandable), *assumptions]))
    return 0


def _explained(
    jobs: Iterable[JobConfig], options: argparse.Namespace
) -> "list[tuple[Explanation, list[str]]]":
    from titanplans.foresight.processes import explain_in_process, prepare, rehearsing

    prepare()
    gpu = gpu_of(options)
    sizes = [(job, world_size_of(job, options, gpu)) for job in jobs]
    with rehearsing(gpu) as pool:
        tasks = [pool.submit(explain_in_process, job, world_size, gpu) for job, world_size in sizes]
        return [task.result() for task in tasks]


def _title(job: JobConfig, name: str) -> str:
    flavor = job.model.flavor or DEFAULT_FLAVOR
    model = f"{job.model.name} {flavor}" if job.model.name else name
    return f"{model}, {job.training.local_batch_size} x {job.training.seq_len:,} tokens a data-parallel rank"


def _lines(explanation: "Explanation", expandable: bool) -> Iterator[str]:
    forecast = explanation.forecast
    for stage, rank in zip(explanation.stages, forecast.ranks, strict=True):
        of = f" of stage {stage.stage}" if len(explanation.stages) > 1 else ""
        yield from map(fitted, origin(stage))
        for blocks in alike(stage):
            yield ""
            yield f"{numbered([name for block in blocks for name in block.names])}: {blocks[0].kind}"
            yield from columns([_HEADER, *_rows(blocks[0].modules)])
            yield from map(fitted, lines_of_recomputation(blocks))
        if stage.others:
            yield ""
            yield from columns([("outside of blocks", *_HEADER[1:]), *_rows(stage.others)])
        if transfers := list(all_transfers(stage)):
            yield ""
            yield from columns(rows_of_transfers(transfers), right={3, 4, 5, 6})
        yield ""
        yield from lines_of_memory(rank.memory, f"memory of a rank{of}", expandable)
    yield verdict(forecast, expandable)
    yield summary_of_time(forecast)


_HEADER = ("module", "style", "parameter", "full", "on a rank", "placement", "output of a rank")


def _rows(modules: "Iterable[ExplainedModule]") -> Iterator[tuple[str, ...]]:
    for module in modules:
        output = shape_of_output(module)
        first = (module.name or "the block", module.style or "-")
        for parameter in module.parameters or (None,):
            yield (*first, *_cells(parameter), output)
            first, output = ("", ""), ""


def _cells(parameter: "ExplainedParameter | None") -> tuple[str, str, str, str]:
    if parameter is None:
        return ("-", "", "", "")
    style = f" ({parameter.style})" if parameter.style else ""
    return (parameter.name + style, by(parameter.shape), by(parameter.local), placement(parameter))


def _facts(explanation: "Explanation") -> dict[str, str]:
    """Return the facts of an explanation by subject, such as a module. Different facts of equally named subjects (blocks of
    one class) are joined by " | "."""
    facts, expandable, forecast = dict[str, str](), has_expandable_segments(), explanation.forecast

    def add(about: str, fact: str) -> None:
        facts_so_far = facts.get(about, "").split(" | ")
        if fact and fact not in facts_so_far:
            facts[about] = f"{facts[about]} | {fact}" if about in facts else fact

    for stage, rank in zip(explanation.stages, forecast.ranks, strict=True):
        of = f"stage {stage.stage}: " if len(explanation.stages) > 1 else ""
        for line in origin(stage):
            label, _, words = line.partition(": ")
            add(f"{of}{label}", words)
        for block in stage.blocks:
            add(f"{of}{block.kind}", numbered(block.names))
            add(f"{of}{block.kind} runs again in the backward", recomputed_operators(block) or "nothing")
            for module in block.modules:
                for about, fact in _facts_of(module):
                    add(f"{of}{block.kind} {module.name}".rstrip() + about, fact)
        for module in stage.others:
            for about, fact in _facts_of(module):
                add(f"{of}{module.name}{about}", fact)
        for row in rows_of_transfers(list(all_transfers(stage)))[1:]:
            for phase, cell in zip(PHASES, row[3:], strict=True):
                add(f"{of}received: {' '.join(part for part in row[:3] if part)}, {phase}", cell)
        for part, size in rank.memory.parts.items():
            add(f"{of}memory: {part}", binary(size))
    add("memory", verdict(forecast, expandable))
    add("time", summary_of_time(forecast))
    return facts


def _facts_of(module: "ExplainedModule") -> Iterator[tuple[str, str]]:
    yield ": style", module.style
    yield ": output of a rank", shape_of_output(module)
    for parameter in module.parameters:
        yield f".{parameter.name}", f"{by(parameter.local)}, {placement(parameter)}"


def _difference(names: Sequence[str], facts: Sequence[dict[str, str]]) -> list[str]:
    first, second = facts
    labels = [*first, *(label for label in second if label not in first)]
    rows = [
        (label, first.get(label, "-"), second.get(label, "-"))
        for label in labels
        if first.get(label) != second.get(label)
    ]
    return columns([("", *names), *rows]) if rows else ["nothing differs"]
