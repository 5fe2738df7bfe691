"""The words of an explanation, for its text and for its page."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanplans.foresight.explanation import (
        ExplainedBlock,
        ExplainedModule,
        ExplainedParameter,
        ExplainedStage,
        Transfer,
    )

PHASES = ("forward", "recomputed", "backward", "update")
"""The phases of a step in which ranks send something, in the order of the table's columns."""


def origin(stage: "ExplainedStage") -> list[str]:
    """Return lines about the plan, the mesh and the recomputation of a rank: a label, a colon and words."""
    report = stage.report
    parts = [report[key] for key in ("tensor_parallel", "context_parallel", "expert_parallel") if report[key]]
    plan = parts[0]["origin"] if parts else "none, since no tensor, context or expert parallelism splits it"
    degrees = [f"{name} {degree}" for name, degree in report["degrees"].items() if degree > 1]
    lines = [f"plan: {plan}", f"mesh: {', '.join(degrees) or 'one rank'}"]
    options = ("sequence_parallel", "loss_parallel")
    lines += [f"{name.replace('_', ' ')}: off" for name in options if parts and not parts[0].get(name, True)]
    recomputation = report["recomputation"]
    return [*lines, f"recomputed: {recomputation['policy'] if recomputation else 'nothing'}"]


def placement(parameter: "ExplainedParameter") -> str:
    """Return the placement of a parameter by dimension of the mesh, in words."""
    placements = ", ".join(f"{dim} {placement}" for dim, placement in parameter.placements)
    return placements + ("; its gradient is summed" if parameter.sums_gradient else "")


def by(shape: Sequence[int]) -> str:
    """Return a shape as text: "1024 x 512"."""
    return " x ".join(map(str, shape)) or "1 number"


def shape_of_output(module: "ExplainedModule") -> str:
    """Return the shape of a module's output; a dimension that is split is written as a fraction, such as 2048/2."""
    if module.output is None:
        return ""
    if module.unsplit is None or len(module.unsplit) != len(module.output):
        return by(module.output)
    sizes = [
        str(local)
        if local == full
        else f"{full}/{full // local}"
        if full % local == 0
        else f"{local} of {full}"
        for local, full in zip(module.output, module.unsplit, strict=True)
    ]
    return " x ".join(sizes)


def numbered(names: Sequence[str]) -> str:
    """Return names of blocks with their numbers as ranges: "model.layers 0-2, 5"."""
    groups: dict[str, list[int]] = {}
    for name in names:
        parent, _, number = name.rpartition(".")
        groups.setdefault(parent, []).append(int(number))
    return "; ".join(f"{parent} {', '.join(_ranges(sorted(group)))}" for parent, group in groups.items())


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        run_numbers = [number for _, number in run]
        first, last = run_numbers[0], run_numbers[-1]
        yield str(first) if first == last else f"{first}-{last}"


def alike(stage: "ExplainedStage") -> "Iterable[list[ExplainedBlock]]":
    """Return the blocks of a rank in lists. The blocks of a list are split in the same way; they may recompute different
    operators."""
    groups: dict[Any, list[ExplainedBlock]] = {}
    for block in stage.blocks:
        groups.setdefault(block.modules, []).append(block)
    return groups.values()


def lines_of_recomputation(blocks: "Sequence[ExplainedBlock]") -> list[str]:
    """Return lines that say which operators of blocks run again in the backward; none if none does."""
    by_words: dict[str, list[str]] = {}
    for block in blocks:
        by_words.setdefault(recomputed_operators(block), []).extend(block.names)
    return [
        f"operators that run again in the backward{f' of {numbered(names)}' if len(by_words) > 1 else ''}: {words}"
        for words, names in by_words.items()
        if words
    ]


def recomputed_operators(block: "ExplainedBlock") -> str:
    """Return how many operators of each module run again in the backward, in words; "" if none does."""
    totals: dict[str, tuple[int, int]] = {}
    for stretch in block.forward:
        again, operators = totals.get(stretch.module, (0, 0))
        totals[stretch.module] = again + stretch.recomputed, operators + stretch.operators
    if all(again == operators for again, operators in totals.values()):
        return "all"
    return ", ".join(
        f"{name or 'the block'} {again} of {operators}"
        for name, (again, operators) in totals.items()
        if again
    )


def all_transfers(stage: "ExplainedStage") -> "Iterator[Transfer]":
    """Yield all transfers of a step, each with the class and the number of its blocks before the module's name."""
    blocks = Counter[str]()
    for block in stage.blocks:
        blocks[block.kind] += len(block.names)
    for block in stage.blocks:
        where = f"{block.kind} x {blocks[block.kind]}"
        for transfer in block.transfers:
            module = f"{where}: {transfer.module}" if transfer.module else where
            yield transfer._replace(module=module)
    yield from stage.transfers


def rows_of_transfers(transfers: "Sequence[Transfer]") -> list[tuple[str, ...]]:
    """Return a table of what a rank receives in a step: rows of modules, columns of phases."""
    rows: list[tuple[str, ...]] = [("received by a rank in a step", "collective", "over", *PHASES)]
    cells: dict[tuple[str, str, str], dict[str, tuple[float, float]]] = {}
    totals: dict[tuple[str, str, str], dict[str, tuple[float, float]]] = {}
    for t in transfers:
        for table, key in (
            (cells, (t.module or "outside of the model", t.operation, t.mesh)),
            (totals, ("sum", "", t.mesh)),
        ):
            row = table.setdefault(key, {})
            count, size = row.get(t.phase, (0.0, 0.0))
            row[t.phase] = count + t.count, size + t.bytes
    for key, row in (*cells.items(), *totals.items()):
        rows.append((*key, *(_amount(*row[phase]) if phase in row else "" for phase in PHASES)))
    return rows


def _amount(count: float, size: float) -> str:
    return f"{binary(size)} in {count:,.0f}"


def binary(size: float) -> str:
    """Return a number of bytes with its binary unit: "1.50 GiB", "12.0 MiB"."""
    for unit, exponent, digits in (("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1)):
        if size >= 2**exponent:
            return f"{size / 2**exponent:,.{digits}f} {unit}"
    return f"{size:,.0f} B"
