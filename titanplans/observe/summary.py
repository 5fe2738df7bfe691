"""The parallelism report as lines of a log: at the start (`at_start`) and after the measured step (`after_step`)."""

from collections.abc import Iterable, Iterator
from typing import Any

from titanplans.text import counted, format_bytes

Report = dict[str, Any]


def at_start(report: Report) -> list[str]:
    """Return the static part of the report as lines."""
    meshes = [f"{name} {mesh['ranks']} ({mesh['backend']})" for name, mesh in report["meshes"].items()]
    where = ", ".join([f"{report['strategy']} on {counted(report['world_size'], 'rank')}", *meshes])
    features = ("tensor_parallel", "recomputation", "compile", "float8")
    absent = [f"no {name.replace('_', ' ')}" for name in features if report[name] is None]
    lines = [
        f"Parallelism: {where}; applied in order: {', '.join(report['steps_taken']) or 'nothing'}",
        f"Parallelism: {'; '.join([*_features(report), *absent])}",
    ]
    if (compiled := report["compile"]) is not None:
        components = ", ".join("blocks" if name == "model" else name for name in compiled["components"])
        lines.append(
            f"compiling {components} with {compiled['backend']} in the first step, which may take minutes; its line "
            "follows"
        )
    return lines


def _features(report: Report) -> Iterator[str]:
    if (pipeline := report["pipeline"]) is not None:
        yield f"rank 0 has {_stages(pipeline)}"
    if (tp := report["tensor_parallel"]) is not None:
        options = [name.replace("_", " ") for name in ("sequence_parallel", "loss_parallel") if tp[name]]
        yield " with ".join([tp["plan"], *([" and ".join(options)] if options else [])])
    if (context := report["context_parallel"]) is not None:
        yield f"{context['plan']} over tokens, exchanged for heads in {counted(len(context['regions']), 'mixer')}"
    if (experts := report["expert_parallel"]) is not None:
        yield f"{experts['plan']} with experts distributed in {counted(len(experts['experts']), 'mixture')}"
    yield _data_parallel(report["data_parallel"])
    if (recomputed := report["recomputation"]) is not None:
        policy = str(recomputed["policy"]).partition("(")[0]
        yield f"{recomputed['blocks']} of {counted(recomputed['of'], 'block')} recomputed ({policy})"
    if (compiled := report["compile"]) is not None:
        blocks = f"{compiled['blocks']} of {counted(compiled['of'], 'block')}"
        others = [name for name in compiled["components"] if name != "model"]
        yield f"compiled by {compiled['backend']}: {', '.join([blocks, *others])}"
    if report["float8"] is not None:
        yield _float8(report["float8"])


def after_step(report: Report) -> list[str]:
    """Return the measured part of the report as lines."""
    step, number = report["step"], report["measured_after_step"]
    if step is None:
        return [f"Step {number}: collectives and graphs not counted: {report['reasons']['step']}"]
    groups = ", ".join(f"{sums['collectives']} over {name}" for name, sums in step["by_group"].items())
    total = (
        f"{counted(step['collectives'], 'collective')}, {format_bytes(step['bytes'])} received by this rank"
    )
    fused = f"; {step['fused']} fused with matrix products" if step["collectives"] else ""
    lines = [f"Step {number}: {total}" + (f" ({groups})" if groups else "") + fused]
    for kind in report["blocks"]:
        if kind["collectives"]:
            size = sum(row["bytes"] for row in kind["collectives"])
            name = kind["names"][0] if len(kind["names"]) == 1 else f"each of {len(kind['names'])}"
            lines.append(f"{kind['class']}, {name}: {_phases(kind['collectives'])}, {format_bytes(size)}")
    graphs = report["graphs"] or {"blocks": (), "outside_blocks": 0}
    for kind in graphs["blocks"]:
        counts = [counted(kind["graphs"], "graph"), counted(kind["graph_breaks"], "graph break")]
        if kind["recompilations"]:
            counts.append(counted(kind["recompilations"], "recompilation"))
        ran = f"{kind['ran_compiled']} of {counted(kind['blocks'], kind['class'])} ran compiled"
        lines.append(f"{ran}: {', '.join(counts)}")
    if outside := graphs["outside_blocks"]:
        lines.append(f"{counted(outside, 'graph')} outside the blocks: the loss or the optimizer's step")
    return lines


def pipeline_after_step(report: Report) -> list[str]:
    """Return the measurement of a pipeline's step as lines."""
    pipeline, measured = report["pipeline"], report["pipeline"]["measured"]
    return [
        f"Step {measured['step']}: the pipeline took {measured['seconds']:.3f} s, ranks idle for "
        f"{measured['idle_fraction']:.1%} of it "
        f"(computed: {pipeline['idle_fraction']:.1%})"
    ]


def _stages(pipeline: Report) -> str:
    """Return the stages of rank 0 in words."""
    stages = [
        (index, stage["blocks"]) for index, stage in enumerate(pipeline["stages"]) if stage["rank"] == 0
    ]
    words = ", ".join(f"{index} ({' to '.join(dict.fromkeys(blocks))})" for index, blocks in stages)
    return f"stage{'' if len(stages) == 1 else 's'} {words} of {len(pipeline['stages'])}"


def _data_parallel(section: Report) -> str:
    kind = section["kind"]
    if "fsdp_modules" in section:
        modules, shards = section["fsdp_modules"], section["shards"]
        kind += f" in {counted(modules, 'FSDP module')}, {counted(shards, 'shard')} each"
    return kind + (f", {section['replicas']} replicas" if section["replicas"] > 1 else "")


def _float8(section: Report) -> str:
    recipe = f"{section['recipe']}, emulated" if section["emulated"] else section["recipe"]
    words = (
        f"{counted(len(section['converted']), 'Linear')} in float8 ({recipe}), "
        f"{len(section['filtered'])} left out"
    )
    sides = [side for border in section["borders"].values() for side in border.values()]
    if sides:
        words += f", {sides.count('in float8')} of {len(sides)} crossings of regions' borders in float8"
    if section["fsdp_all_gather"]:
        words += ", weights gathered in float8"
    return words


def _phases(rows: Iterable[Report]) -> str:
    phases: dict[str, list[str]] = {}
    for row in rows:
        fused = " fused" if row["fused"] else ""
        phases.setdefault(row["phase"], []).append(
            f"{row['count']} {row['operation']}{fused} over {row['group']}"
        )
    return "; ".join(f"{phase} {', '.join(collectives)}" for phase, collectives in phases.items())
