"""What a person sees of a decision, and what JSON holds."""

from dataclasses import asdict
from typing import Any

import torch

from titanplans.cli.async_tp.decide import Blocks, Decision
from titanplans.observe.async_tp.verdict import Verdict
from titanplans.text import columns, counted


def text(decision: Decision) -> str:
    """Return `decision` as text: a table for each kind of block, and the verdict on the last line."""
    lines = [
        decision.subject,
        f"  tp {decision.degree}, {decision.batch_size} sequences of {decision.seq_len} tokens; graphs of torch "
        f"{torch.__version__.partition('+')[0]}, on no GPU",
        *(f"  {note}" for note in decision.notes),
    ]
    for blocks in decision.blocks:
        lines += ["", *_table(blocks)]
    if decision.graph_breaks:
        ends = ", ".join(f"{name} ({number})" for name, number in decision.graph_breaks.items())
        lines += ["", f"graphs end at {ends}"]
    return "\n".join([*lines, "", verdict(decision)])


def verdict(decision: Decision) -> str:
    """Return the outcome on one line."""
    counts = ", ".join(
        f"{direction} {count.hidden} of {count.total}"
        + (f" ({count.overlapped} overlapped)" if count.overlapped else "")
        for direction, count in (
            ("forward", decision.count(backward=False)),
            ("backward", decision.count(backward=True)),
        )
    )
    words = (
        "all that can be is fused or overlapped with products"
        if decision.complete
        else "NOT all is fused or overlapped that could be"
    )
    return f"{words}: {counts}; {decision.seconds:.1f} s"


def to_dict(decision: Decision) -> dict[str, Any]:
    """Return the decision as JSON has it."""
    return asdict(decision) | {
        "torch": torch.__version__,
        "complete": decision.complete,
        "forward": decision.count(backward=False)._asdict(),
        "backward": decision.count(backward=True)._asdict(),
        "seconds": round(decision.seconds, 2),
    }


def _table(blocks: Blocks) -> list[str]:
    rows = [
        (
            "backward" if v.backward else "forward",
            v.operation.replace("_", "-"),
            v.place,
            _outcome(v),
        )
        for v in blocks.collectives
    ]
    title = blocks.title
    if blocks.names:
        title = f"{len(blocks.names)} x {blocks.title}, {counted(blocks.graphs, 'graph')}"
    return [title, *(f"  {line}" for line in columns(rows))]


def _outcome(verdict: Verdict) -> str:
    if verdict.fused:
        rest = f", {verdict.obstacle}" if verdict.obstacle else ""
        return f"fused with {', '.join(verdict.products) or 'its product'}{rest}"
    if verdict.overlapped:
        return f"overlapped with {', '.join(verdict.overlapped)}; not fused: {verdict.obstacle}"
    return f"{'not fused' if verdict.possible else 'not supported'}: {verdict.obstacle}"
