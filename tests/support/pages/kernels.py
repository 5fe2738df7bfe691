"""The tables of docs/generated/kernels.md: which FLA kernels were compared with their stand-ins, and how much they differ.

python docs/generate.py kernels.md     # runs tests/kernels/interpreted/test_calls.py; takes half an hour
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.support.paths import GENERATED, ROOT
from titanplans.kernels.table import NOT_TRITON, REFERENCES

PAGE = GENERATED / "kernels.md"
HEAD = """# Kernels compared

FLA's Triton kernels, run by Triton's interpreter, compared with the stand-ins that replace them on a CPU. For what this
shows and does not show see [kernels.md](../kernels.md). `python docs/generate.py kernels.md` writes the tables, from the
calls that the layers of the tests' tiny models (tests/zoo.py) make.

"""
COLUMNS = """| kernel | models | calls | with documents | with states | backward | worst | why it exceeds 1e-5 |
|---|---:|---:|---|---|---|---:|---|
"""


def page(lines: Iterable[str]) -> str:
    """Return the page made of the lines of JSON that test_calls.py wrote."""
    calls: dict[str, list[dict]] = {}
    for line in lines:
        calls.setdefault((call := json.loads(line))["place"], []).append(call)
    rows = [_row(place, calls[place]) for place in REFERENCES if place in calls]
    not_called = [place for place in REFERENCES if place not in calls and place not in NOT_TRITON]
    worst = (
        "*Models*: how many models call the kernel. *Worst*: the largest difference of an output or "
        "gradient,\nnorm(difference) / norm(value), in float32."
    )
    text = HEAD + worst + "\n\n" + COLUMNS + "\n".join(rows)
    text += (
        "\n\n## Compared separately\n\nNo layer here calls these kernels; `tests/kernels/interpreted/test_direct.py` "
        "compares them.\n\n"
    )
    text += _listed(not_called)
    text += (
        "\n\n## Not run\n\nKernels of other packages (flash-attn, ...), kernels of torch, and code that calls a "
        "kernel and refuses CPU tensors.\n\n"
    )
    return text + _listed(sorted(NOT_TRITON)) + "\n"


def _row(place: str, calls: list[dict]) -> str:
    def some(condition: str) -> str:
        return "yes" if any(call["condition"] == condition for call in calls) else ""

    models = len({call["model"] for call in calls})
    backward = "yes" if any(call["backward"] for call in calls) else ""
    worst = max(call["worst"] for call in calls)
    reasons = sorted({call["why"] for call in calls} - {""})
    if not reasons and worst > 1e-5:
        reasons = ["the kernel and the float32 reference differ equally from float64"]
    cells = [
        f"`{place.removeprefix('fla.')}`",
        models,
        len(calls),
        some("documents"),
        some("states"),
        backward,
    ]
    return "| " + " | ".join(map(str, [*cells, f"{worst:.0e}", "; ".join(reasons)])) + " |"


def _listed(places: Iterable[str]) -> str:
    return "\n".join(f"- `{place.removeprefix('fla.')}`" for place in places)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calls.jsonl"
        command = ["make", "test-kernels", "ARGS=-k test_calls"]
        result = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"KERNELS_COMPARED": str(file)}, check=False
        )
        if result.returncode:
            sys.exit(result.returncode)
        PAGE.write_text(page(file.read_text().splitlines()))


if __name__ == "__main__":
    main()
