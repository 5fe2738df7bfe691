"""`titanplans check`: whether checkpoints are as they were written, file by file, by the checksums in their cards.

Needs no torch.
"""

import argparse
import sys
from pathlib import Path

from titanplans.errors import ConfigError, UserError
from titanplans.text import columns
from titanplans.training.checkpoint.card import CARD, Card, damage, read_card
from titanplans.training.checkpoint.folder import checkpoint_path, steps
from titanplans.training.launch.exit_status import refuse


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="titanplans check",
        description="Read every file of the checkpoints in a folder, and compare it with the checksum that was taken as "
        "it was written.",
        epilog="exit status: 0 all are whole, 1 a file is damaged or gone, 2 no checkpoint is there",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="the folder of a job's checkpoints, or one step-N in it"
    )
    return parser


def main(argv: list[str]) -> int:
    """Check what `argv` names; return 0, 1 if something is damaged, or 2 if there is nothing to check."""
    folder = Path(parser().parse_args(argv).folder)
    try:
        checkpoints = _checkpoints(folder)
    except UserError as error:
        return refuse(error, rank=0)
    rows, whole = [["checkpoint", "holds", "files", "GB", ""]], True
    for checkpoint in checkpoints:
        found = _look(checkpoint)
        wrong = found if isinstance(found, str) else damage(checkpoint)
        whole = whole and wrong is None
        shown = ("", "", "") if isinstance(found, str) else _sizes(found)
        rows.append([checkpoint.name, *shown, wrong or "whole"])
    print("\n".join(columns(rows)))
    if not whole:
        print("resume from a whole one by checkpoint.load_step, and move the damaged away", file=sys.stderr)
    return 0 if whole else 1


def _checkpoints(folder: Path) -> list[Path]:
    if (folder / CARD).is_file():
        return [folder]
    if not folder.is_dir():
        raise ConfigError(f"check {folder}: there is no such folder")
    found = [checkpoint_path(folder, step) for step in steps(folder)]
    if not found:
        raise ConfigError(
            f"check {folder}: there is no step-N folder with a {CARD} in it; name a job's dump_folder/checkpoint"
        )
    return found


def _look(checkpoint: Path) -> Card | str:
    try:
        return read_card(checkpoint)
    except ConfigError as error:
        return str(error)


def _sizes(card: Card) -> tuple[str, str, str]:
    size = sum(size for size, _ in card.files.values())
    return card.holds, str(len(card.files)), f"{size / 1e9:.3f}"
