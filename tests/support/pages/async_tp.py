"""The table of docs/generated/async_tp.md: what becomes of the collectives of a block of every registered architecture.

python docs/generate.py async_tp.md     # writes it; five to ten minutes on two quiet cores
"""

import sys

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
    """Decide as `titanplans async-tp NAME` does, of the debug flavor with a small vocabulary."""
    request = parse(["async-tp", name, "--vocab-size", "512", *options])
    return decide(Subject(name, modeling.load_config(name, "debug")), request, 2, lambda words: None)


def line(name):
    """Return the row of an architecture, decided now, and the decision; None if there is none."""
    try:
        decision = decided(name, "--batch-size", "1")
    except VerifyError as error:
        return failed(name, error), None
    return row(name, decision), decision


def row(name, decision):
    """Return a row of the table."""
    verdicts = [verdict for blocks in decision.blocks for verdict in blocks.collectives]
    counts = []
    for backward in (False, True):
        fused, overlapped, total = decision.count(backward=backward).values()
        counts.append(f"{fused + overlapped}/{total}" + (f", {overlapped} overlapped" if overlapped else ""))
    meanwhile = [f"{_where(v)}: {', '.join(v.overlapped)}" for v in verdicts if v.overlapped]
    neither = [f"{_where(v)}: {_short(v.obstacle)}" for v in verdicts if not v.hidden]
    return _line(name, *counts, "; ".join(dict.fromkeys(meanwhile)), "; ".join(dict.fromkeys(neither)))


def failed(name, error):
    """Return the row of an architecture whose blocks dynamo can't take apart."""
    reason = str(error).partition("as in training: ")[2].partition("; leave out")[0]
    return _line(name, "", "", "", f"not decided, since dynamo fails at its blocks: {reason}")


def _line(name, *cells):
    return f"| `{name}` | {' | '.join(cells)} |"


def _where(verdict):
    words = ["" if verdict.backward else "forward", verdict.module, verdict.operation.replace("_", "-")]
    return " ".join(filter(None, words))


def _short(obstacle):
    """Leave out what the page says once: that some operators are never fused."""
    return "alone" if obstacle.endswith("never fused") else obstacle


def main():
    """Write the table into the page."""
    if sys.argv[1:] != ["--page"]:
        print(__doc__)
        return 2
    kernels.install("cpu")
    rows = "".join(line(name)[0] + "\n" for name in every_model())
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{HEAD}{rows}{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
