"""From the command line of `plot` to an exit status: 0 drawn, 2 there is nothing to draw, or not so."""

import argparse
import os
import shutil
import sys
from pathlib import Path

from titanplans.cli.plot.read import read
from titanplans.disk import naming
from titanplans.errors import UserError
from titanplans.training.launch.exit_status import refuse


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="titanplans plot",
        description="Draw losses, norms of the gradient and tokens/s of runs over their steps, as they were logged with "
        "--metrics.enable_jsonl, or the table of one sweep.",
        epilog="exit status: 0 drawn, 2 there is nothing to draw, or not so",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a job's dump_folder; or one sweep's folder, alone"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="a picture, .png, .svg or .pdf, instead of the terminal; pip install 'titanplans[plot]'",
    )
    return parser


def main(argv: list[str]) -> int:
    """Draw what `argv` names; return the exit status."""
    arguments = parser().parse_args(argv)
    # Not at the top: what draws is imported after the options were read.
    from titanplans.cli.plot.draw import check_output, draw, write

    try:
        if arguments.output is not None:
            check_output(arguments.output)
        panels, notes = read(arguments.runs)
    except UserError as error:
        return refuse(error, rank=0)
    if arguments.output is not None:
        with naming(arguments.output):
            write(panels, arguments.output)
        print(arguments.output)
    else:
        colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(draw(panels, width=shutil.get_terminal_size((100, 24)).columns, colors=colors))
    print("".join(f"{note}\n" for note in notes), end="")
    return 0
