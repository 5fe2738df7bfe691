"""The report of what took effect (`effect`) in words, for a log: a few lines at start, a few after the measured step."""

from collections.abc import Iterable
from typing import Any

Report = dict[str, Any]


def at_start(report: Report) -> list[str]:
    """Return what was done to the model, as lines."""
    meshes = [f"{name} {mesh['ranks']} ({mesh['backend']})" for name, mesh in report["meshes"].items()]
    where = ", ".join([f"{report['strategy']} on {_of(report['world_size'], 'rank')}", *meshes])
    parts = [_data_parallel(report["data_parallel"])]
    if (tp := report["tensor_parallel"]) is not None:
        on = [name.replace("_", " ") for name in ("sequence_parallel", "loss_parallel") if tp[name]]
        parts.insert(0, " with ".join([tp["plan"], *([" and ".join(on)] if on else [])]))
    if (recomputed := report["recomputation"]) is not None:
        policy = str(recomputed["policy"]).partition("(")[0]
        parts.append(f"{recomputed['blocks']} of {_of(recomputed['of'], 'block')} recomputed ({policy})")
    else:
        parts.append("nothing recomputed")
    if (compiled := report["compile"]) is not None:
        blocks = f"{compiled['blocks']} of {_of(compiled['of'], 'block')}"
        others = [name for name in ("loss", "optimizer") if compiled[name]]
        parts.append(f"compiled by {compiled['backend']}: {', '.join([blocks, *others])}")
    else:
        parts.append("nothing compiled")
    parts.append("no float8" if report["float8"] is None else _float8(report["float8"]))
    return [
        f"In effect: {where}; in this order: {', '.join(report['steps_taken']) or 'nothing'}",
        f"In effect: {'; '.join(parts)}",
    ]


def after_step(report: Report) -> list[str]:
    """Return what the measured step did, as lines."""
    step, number = report["step"], report["measured_after_step"]
    if step["bytes"] is None:
        lines = [f"Step {number}: collectives not counted: {step['reason']}"]
    else:
        groups = ", ".join(f"{sums['collectives']} over {name}" for name, sums in step["by_group"].items())
        total = f"{_of(step['collectives'], 'collective')}, {_size(step['bytes'])} received by this rank"
        fused = f"; {step['fused']} fused with matrix products" if step["collectives"] else ""
        lines = [f"Step {number}: {total}" + (f" ({groups})" if groups else "") + fused]
    for kind in report["blocks"]:
        if kind["collectives"]:
            size = sum(row["bytes"] for row in kind["collectives"])
            name = kind["names"][0] if len(kind["names"]) == 1 else f"each of {len(kind['names'])}"
            lines.append(f"{kind['class']}, {name}: {_phases(kind['collectives'])}, {_size(size)}")
    for kind in (report["compile"] or {}).get("kinds") or []:
        parts = [_of(kind["graphs"], "graph"), _of(kind["graph_breaks"], "graph break")]
        if kind["recompilations"]:
            parts.append(f"{_of(kind['recompilations'], 'piece')} of code compiled once more")
        ran = f"{kind['ran_compiled']} of {_of(kind['blocks'], kind['class'])} ran compiled"
        lines.append(f"{ran}: {', '.join(parts)}")
    if beside := (report["compile"] or {}).get("graphs_beside_blocks"):
        lines.append(f"Beside the blocks {_of(beside, 'graph')} of the loss or the optimizer's step")
    return lines


def _data_parallel(found: Report) -> str:
    if "units" in found:
        kind = f"{found['kind']} in {_of(found['units'], 'unit')}, {_of(found['shards'], 'shard')} each"
    else:
        kind = found["kind"]
    return kind + (f", {found['copies']} copies" if found["copies"] > 1 else "")


def _float8(found: Report) -> str:
    how = f"{found['recipe']}, emulated" if found["emulated"] else found["recipe"]
    words = f"{_of(len(found['converted']), 'Linear')} in float8 ({how}), {len(found['filtered'])} left out"
    sides = [side for border in found["borders"].values() for side in border.values()]
    if sides:
        words += f", {sides.count('in float8')} of {len(sides)} crossings of regions' borders in float8"
    if found["fsdp_all_gather"]:
        words += ", weights gathered in float8"
    return words


def _phases(rows: Iterable[Report]) -> str:
    phases: dict[str, list[str]] = {}
    for row in rows:
        fused = " fused" if row["fused"] else ""
        phases.setdefault(row["phase"], []).append(
            f"{row['count']} {row['operation']}{fused} over {row['group']}"
        )
    return "; ".join(f"{phase} {', '.join(found)}" for phase, found in phases.items())


def _of(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB"
