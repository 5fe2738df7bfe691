"""The table of docs/generated/async_tp.md: how async TP hides the collectives of each registered architecture's blocks.

python docs/generate.py async_tp.md     # writes the table; takes five to ten minutes on two idle cores
"""

import sys

from tests import zoo
from tests.support.paths import GENERATED
from titanplans import kernels, modeling
from titanplans.cli.async_tp import decide
from titanplans.cli.verify.arguments import parse
from titanplans.cli.verify.subject import Subject, every_model
from titanplans.errors import VerifyError

PAGE = GENERATED / "async_tp.md"
BEGIN, END = "<!-- architectures -->\n", "<!-- /architectures -->"
HEAD = "| architecture | forward | backward | overlapped with | neither |\n|---|---|---|---|---|\n"


def decided(name, *options):
    """Return what `titanplans async-tp NAME` decides for the debug flavor with a small vocabulary."""
    request = parse(["async-tp", name, "--vocab-size", "512", *options])
    return decide(Subject(name, modeling.load_config(name, "debug")), request, 2, lambda words: None)


def line(name):
    """Decide about an architecture; return its row of the table and the decision, which is None if dynamo fails."""
    try:
        decision = decided(name, "--batch-size", "1")
    except VerifyError as error:
        return failed(name, error), None
    return row(name, decision), decision


def row(name, decision):
    """Return the row of a decision: how many collectives are hidden of how many, by what, and why others are not
    hidden."""
    verdicts = [verdict for blocks in decision.blocks for verdict in blocks.collectives]
    counts = []
    for backward in (False, True):
        fused, overlapped, total = decision.count(backward=backward).values()
        counts.append(f"{fused + overlapped}/{total}" + (f", {overlapped} overlapped" if overlapped else ""))
    overlaps = [f"{_where(v)}: {', '.join(v.overlapped)}" for v in verdicts if v.overlapped]
    exposed = [f"{_where(v)}: {_short(v.obstacle)}" for v in verdicts if not v.hidden]
    return _line(name, *counts, "; ".join(dict.fromkeys(overlaps)), "; ".join(dict.fromkeys(exposed)))


def failed(name, error):
    """Return the row of an architecture whose blocks dynamo can't compile."""
    reason = str(error).partition("as in training: ")[2].partition("; leave out")[0]
    return _line(name, "", "", "", f"not decided, since dynamo fails at its blocks: {reason}")


def _line(name, *cells):
    return f"| `{name}` | {' | '.join(cells)} |"


def _where(verdict):
    words = ["" if verdict.backward else "forward", verdict.module, verdict.operation.replace("_", "-")]
    return " ".join(filter(None, words))


def _short(obstacle):
    """Return `obstacle`, or "alone" for operators that are never fused; the page explains this word once."""
    return "alone" if obstacle.endswith("never fused") else obstacle


def listed_models() -> list[str]:
    """Return the architectures of the table."""
    return [name for name in every_model() if name not in zoo.FURTHER]


def main():
    """Write the table into the page."""
    if sys.argv[1:] != ["--page"]:
        print(__doc__)
        return 2
    kernels.install("cpu")
    rows = "".join(line(name)[0] + "\n" for name in listed_models())
    head, _, tail = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{HEAD}{rows}{END}{tail.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
