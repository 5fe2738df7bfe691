"""The table of docs/generated/async_tp.md: what becomes of the collectives of a block of every registered architecture.

python docs/generate.py async_tp.md     # writes it; five to ten minutes on two quiet cores
"""

import sys
from pathlib import Path

from titanplans import kernels, modeling
from titanplans.cli.async_tp.decide import decide
from titanplans.cli.async_tp.screen import to_dict
from titanplans.cli.verify.arguments import parse
from titanplans.cli.verify.subject import Subject, every_model
from titanplans.errors import VerifyError

PAGE = Path(__file__).parents[1] / "docs" / "generated" / "async_tp.md"
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
    return row(name, to_dict(decision)), decision


def row(name, decision):
    """Return a row of the table from a decision as JSON has it."""
    blocks = [blocks for blocks in decision["blocks"] if blocks["names"]]
    all_of_them = [verdict for held in blocks for verdict in held["collectives"]]
    counts = []
    for backward in (False, True):
        those = [v for v in all_of_them if v["backward"] == backward]
        overlapped = sum(bool(v["overlapped"]) for v in those)
        fused = sum(v["fused"] for v in those)
        counts.append(
            f"{fused + overlapped}/{len(those)}" + (f", {overlapped} overlapped" if overlapped else "")
        )
    meanwhile = [f"{_where(v)}: {', '.join(v['overlapped'])}" for v in all_of_them if v["overlapped"]]
    neither = [
        f"{_where(v)}: {_short(v['obstacle'])}" for v in all_of_them if not v["fused"] and not v["overlapped"]
    ]
    return _line(name, *counts, "; ".join(dict.fromkeys(meanwhile)), "; ".join(dict.fromkeys(neither)))


def failed(name, error):
    """Return the row of an architecture whose blocks dynamo can't take apart."""
    reason = str(error).partition("as in training: ")[2].partition("; leave out")[0]
    return _line(name, "", "", "", f"not decided, since dynamo fails at its blocks: {reason}")


def _line(name, *cells):
    return f"| `{name}` | {' | '.join(cells)} |"


def _where(verdict):
    operation = verdict["operation"].replace("_", "-")
    of = [] if operation in ("all-gather", "reduce-scatter") else [operation]
    return " ".join(filter(None, ["" if verdict["backward"] else "forward", verdict["place"], *of]))


def _short(obstacle):
    """Leave out what the page says once: why nothing is overlapped, and that some operators are never fused."""
    why = obstacle.partition("; not overlapped: ")[0]
    return "alone" if why.endswith("never fused") else why


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
