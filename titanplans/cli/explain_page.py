"""`page`: an explanation as one HTML file, with a picture of each kind of block and of the memory over the step."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from titanplans.cli.estimate import gib, summary_of_time, verdict
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
    rows_of_transfers,
    shape_of_output,
)
from titanplans.text import counted

if TYPE_CHECKING:
    from titanplans.foresight.explanation import (
        ExplainedBlock,
        ExplainedModule,
        Explanation,
        Stretch,
        Transfer,
    )
    from titanplans.foresight.memory import MemoryForecast

_LEGEND = {
    "split": "its weights are split over the ranks",
    "partial": "replicated weights, applied to a part of the tokens or heads",
    "replicated": "replicated weights, applied to all tokens",
    "code": "code without weights",
}
_SEGMENTS = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "backward",
    "clip": "update",
    "update": "update",
}
_ARROWS = {"forward": "&darr;", "backward": "&uarr;"}


def page(title: str, explanation: "Explanation", assumptions: Sequence[str], expandable: bool) -> str:
    """Return the page.

    Args:
        title: the model and the batch.
        explanation: the explanation of the job.
        assumptions: what the forecast of the explanation assumes.
        expandable: whether torch's allocator uses expandable segments.
    """
    forecast = explanation.forecast
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [
        f"<p class=lead>{escape(line)}</p>"
        for line in (verdict(forecast, expandable), summary_of_time(forecast))
    ]
    for stage, rank in zip(explanation.stages, forecast.ranks, strict=True):
        if len(explanation.stages) > 1:
            parts.append(f"<h2>Pipeline stage {stage.stage}</h2>")
        facts = (line.partition(": ") for line in origin(stage))
        parts.append(_definitions((label, words) for label, _, words in facts))
        for blocks in alike(stage):
            names = numbered([name for block in blocks for name in block.names])
            parts.append(f"<h3>{escape(blocks[0].kind)}: {escape(names)}</h3>")
            parts.append(_picture(max(blocks, key=lambda block: len(block.names))))
            parts += [f"<p>{escape(line)}</p>" for line in lines_of_recomputation(blocks)]
            parts.append(_modules("Modules of the block", blocks[0].modules))
        if stage.others:
            parts.append(_modules("Modules outside of blocks", stage.others))
        if transfers := list(all_transfers(stage)):
            rows = rows_of_transfers(transfers)
            parts.append(
                f"<h3>Received by a rank in a step</h3>{_table(rows[0], rows[1:], numbers=len(PHASES))}"
            )
        parts.append(f"<h3>Memory of a rank</h3>{_memory(rank.memory, expandable, forecast.gpu.usable)}")
    parts += [f"<p class=note>{escape(each)}</p>" for each in assumptions]
    return _PAGE.format(title=escape(title), style=_STYLE, body="\n".join(parts))


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in rows) + "</dl>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """Return a table whose last `numbers` columns are aligned to the right."""
    first_number = len(header) - numbers

    def row(cells: Sequence[str], tag: str) -> str:
        classes = [" class=n" if column >= first_number else "" for column in range(len(cells))]
        return "".join(f"<{tag}{c}>{escape(cell)}</{tag}>" for c, cell in zip(classes, cells, strict=True))

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return f"<div class=scroll><table><tr>{row(header, 'th')}</tr>{body}</table></div>"


def _modules(title: str, modules: "Iterable[ExplainedModule]") -> str:
    header = ("module", "class", "style", "parameter", "full", "on a rank", "placement", "output of a rank")
    rows = []
    for module in modules:
        first = (module.name or "the block", module.kind, module.style)
        output = shape_of_output(module)
        for p in module.parameters:
            rows.append((*first, p.name, by(p.shape), by(p.local), placement(p), output))
            first, output = ("", "", ""), ""
        if not module.parameters:
            rows.append((*first, "", "", "", "", output))
    return f"<details><summary>{title}</summary>{_table(header, rows)}</details>"


def _picture(block: "ExplainedBlock") -> str:
    """Return the forward of a block from top to bottom: a box for each module, an arrow for each collective."""
    backward, modules = _by_arrow(block), {module.name: module for module in block.modules}
    # A module's operators may run in several stretches. Its weights are shown in the stretch with the most arithmetic.
    main = {each.module: each for each in sorted(block.forward, key=lambda each: (each.flops, each.bytes))}
    parts = [_arrow([], backward.pop(-1))] if -1 in backward else []
    numbered_stretches = enumerate(block.forward)
    for child, run in groupby(numbered_stretches, lambda item: item[1].module.partition(".")[0]):
        inner = [
            _box(stretch, modules.get(stretch.module), is_main=main[stretch.module] is stretch)
            if stretch.transfer is None
            else _arrow([stretch.transfer], backward.pop(number, []))
            for number, stretch in run
        ]
        region = modules.get(child)
        if region is None or len(inner) == 1:
            parts += inner
        else:
            style = f" <small>{escape(region.style)}</small>" if region.style else ""
            parts.append(f"<div class=region><h4>{escape(child)}{style}</h4>{''.join(inner)}</div>")
    legend = "".join(f"<span class='key {kind}'></span>{words} " for kind, words in _LEGEND.items())
    end = "<div class=end>residual stream</div>"
    return f"<p class=legend>{legend}</p><div class=flow>{end}{''.join(parts)}{end}</div>{_fsdp(block)}"


def _by_arrow(block: "ExplainedBlock") -> "dict[int, list[Transfer]]":
    """Return where collectives of the backward are drawn: lists of them, by the index of a stretch of the forward.

    The backward of a module runs its collectives in reverse. A collective without a counterpart in the forward is drawn next
    to the module's first collective, or has the key -1 if the module's forward has none.
    """
    arrows: dict[int, list[Transfer]] = {}
    for module in dict.fromkeys(each.module for each in block.backward):
        forward_indices = [
            index for index, s in enumerate(block.forward) if s.transfer and s.module == module
        ]
        transfers = [each for each in block.backward if each.module == module]
        for position, transfer in enumerate(transfers):
            if position < len(forward_indices):
                drawn_at = forward_indices[-1 - position]
            else:
                drawn_at = forward_indices[0] if forward_indices else -1
            arrows.setdefault(drawn_at, []).append(transfer)
    return arrows


def _fsdp(block: "ExplainedBlock") -> str:
    words = [
        f"{t.operation.replace('_', '-')} over {t.mesh} in the {t.phase}, {binary(t.bytes / len(block.names))}"
        for t in block.transfers
        if t.is_fsdp
    ]
    return f"<p>FSDP, for each of these blocks in a step: {escape('; '.join(words))}</p>" if words else ""


def _arrow(forward: "Sequence[Transfer]", backward: "Sequence[Transfer]") -> str:
    labels = [
        (_ARROWS[phase], t) for phase, side in (("forward", forward), ("backward", backward)) for t in side
    ]
    badges = "".join(
        f"<span class='send {'back' if arrow == _ARROWS['backward'] else ''}'>{arrow} "
        f"{t.operation.replace('_', '-')} {t.mesh} &middot; {binary(t.bytes)}</span>"
        for arrow, t in labels
    )
    return f"<div class=arrow>{badges}</div>"


def _box(stretch: "Stretch", module: "ExplainedModule | None", *, is_main: bool) -> str:
    """Return the box of a stretch of operators.

    If `is_main`, the box shows the weights of `module`. Otherwise it shows only code, and its title says so.
    """
    kind, lines, title = "code", list[str](), stretch.module or "the block"
    if is_main and module is not None and module.parameters:
        shards = [p for p in module.parameters if p.local != p.shape]
        is_partial = None not in (module.output, module.unsplit) and module.output != module.unsplit
        kind = "split" if shards else "partial" if is_partial else "replicated"
        lines += [module.style] if module.style else []
        lines += [f"{p.name} {by(p.local)} of {by(p.shape)}" for p in shards]
        lines += [f"output {shape_of_output(module)}"] if module.output is not None else []
    else:
        title = f"code of {title}"
    words = [counted(stretch.operators, "operator")]
    if stretch.kernels:
        words.append(f"{len(stretch.kernels)} of Triton")
    words.append(f"{stretch.flops / 1e9:,.1f} GFLOP" if stretch.flops else binary(stretch.bytes))
    lines.append(", ".join(words))
    spans = "".join(f"<span>{escape(line)}</span>" for line in lines)
    if stretch.recomputed:
        how_often = (
            "runs again" if stretch.recomputed == stretch.operators else f"{stretch.recomputed} run again"
        )
        spans += f"<em>{how_often} in the backward</em>"
    hover = f" title='{escape(', '.join(stretch.kernels))}'" if stretch.kernels else ""
    return f"<div class='box {kind}'{hover}><b>{escape(title)}</b>{spans}</div>"


def _memory(memory: "MemoryForecast", expandable: bool, usable: int) -> str:
    from titanplans.foresight.memory import PARTS

    reserved = (memory.expandable if expandable else memory.standard).reserved
    top = max(reserved, max(size for _, size in memory.timeline))
    width = 1000 / len(memory.timeline)
    bars = []
    for index, (segment, size) in enumerate(memory.timeline):
        height = 200 * size / top
        kind = _SEGMENTS.get(segment.kind, "other")
        peak = " peak" if segment == memory.when else ""
        block = "" if segment.block is None else f" of block {segment.block}"
        bars.append(
            f"<rect class='{kind}{peak}' x='{index * width:.2f}' y='{200 - height:.2f}' "
            f"width='{max(width - 0.3, 0.3):.2f}' height='{height:.2f}'><title>{escape(segment.kind)}{block}, "
            f"batch {segment.batch}: {gib(size)} GiB</title></rect>"
        )
    picture = (
        "<svg viewBox='0 0 1000 200' preserveAspectRatio='none' role='img' aria-label='memory over the step'>"
        f"{''.join(bars)}</svg>"
    )
    keys = "".join(
        f"<span class='key {kind}'></span>{kind} " for kind in ("forward", "loss", "backward", "update")
    )
    caption = (
        f"The second step from left to right; the highest bar is the peak, {gib(memory.live)} GiB in {memory.when_text}. "
        f"torch's allocator reserves {gib(reserved)} GiB of {gib(usable)} GiB."
    )
    parts = [(part, gib(size), PARTS[part]) for part, size in memory.parts.items() if size >= 2**20]
    bar = "".join(
        f"<span class='part p{index}' style='flex:{size}' title='{escape(part)}: {gib(size)} GiB'></span>"
        for index, (part, size) in enumerate(memory.parts.items())
    )
    rows = "".join(
        f"<tr><td><span class='key p{list(memory.parts).index(part)}'></span>{escape(part)}</td>"
        f"<td class=n>{size}</td><td>{escape(meaning)}</td></tr>"
        for part, size, meaning in parts
    )
    table = f"<div class=scroll><table><tr><th>at the peak</th><th class=n>GiB</th><th></th></tr>{rows}</table></div>"
    return f"{picture}<p class=legend>{keys}</p><p>{escape(caption)}</p><div class=bar>{bar}</div>{table}"


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #c9d1d9; --paper: #ffffff; --panel: #f6f8fa;
  --split: #cfe3ff; --partial: #d3f2dc; --replicated: #fdebc8; --code: #eceff2; --send: #8250df; --back: #bc4c00;
  --forward: #4c8dff; --loss: #d29922; --backward: #2da44e; --update: #8250df; --other: #8c959f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --paper: #0d1117;
  --panel: #151b23; --split: #143d6f; --partial: #17452a; --replicated: #57420f; --code: #262c36; --send: #b794ff;
  --back: #ffa657; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.3rem; margin: 2.5rem 0 0; } h3 { margin: 2rem 0 .5rem; }
.lead { margin: .1rem 0; } .note, .legend, small, dt { color: var(--soft); } .legend { font-size: 13px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dd { margin: 0; overflow-wrap: anywhere; }
.flow { display: flex; flex-direction: column; align-items: center; max-width: 44rem; margin: 0 auto; }
.end { color: var(--soft); padding: .3rem; }
.region { width: 100%; border: 1px solid var(--line); border-radius: 10px; background: var(--panel);
  padding: .4rem .8rem .8rem; margin: .4rem 0; display: flex; flex-direction: column; align-items: center; }
.region h4 { margin: .1rem 0 .3rem; align-self: flex-start; }
.box { width: min(100%, 30rem); border: 1px solid var(--line); border-radius: 8px; padding: .35rem .7rem; margin: .2rem 0;
  display: flex; flex-wrap: wrap; gap: 0 .9rem; font-size: 13px; }
.box b { width: 100%; font-size: 14px; } .box em { color: var(--back); font-style: normal; }
.split { background: var(--split); } .partial { background: var(--partial); }
.replicated { background: var(--replicated); } .code { background: var(--code); }
.arrow { position: relative; display: flex; flex-wrap: wrap; justify-content: center; gap: .4rem; padding: .35rem 0; }
.send { border: 1.5px solid var(--send); color: var(--send); border-radius: 99px; padding: 0 .7rem; font-size: 13px;
  background: var(--paper); } .send.back { border-color: var(--back); color: var(--back); }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; border: 1px solid var(--line);
  margin: 0 .35em 0 .6em; vertical-align: -.05em; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } .n { text-align: right; }
details { margin: .8rem 0; } summary { cursor: pointer; }
svg { width: 100%; height: 200px; border-bottom: 1px solid var(--line); }
rect.forward { fill: var(--forward); } rect.loss { fill: var(--loss); } rect.backward { fill: var(--backward); }
rect.update { fill: var(--update); } rect.other { fill: var(--other); } rect.peak { fill: var(--back); }
.key.forward { background: var(--forward); } .key.loss { background: var(--loss); }
.key.backward { background: var(--backward); } .key.update { background: var(--update); }
.bar { display: flex; height: 1.4rem; border-radius: 6px; overflow: hidden; margin: .6rem 0; }
.p0 { background: #4c8dff; } .p1 { background: #2da44e; } .p2 { background: #8250df; } .p3 { background: #d29922; }
.p4 { background: #e5534b; } .p5 { background: #39a0a8; } .p6 { background: #bf4b8a; } .p7 { background: #8c959f; }
.p8 { background: #6f42c1; } .p9 { background: #57606a; }
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
