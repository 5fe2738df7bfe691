"""`titanplans check`: compare the files of checkpoints with the checksums in their manifests. Needs no torch."""

import argparse
import sys
from pathlib import Path

from titanplans.errors import ConfigError
from titanplans.text import columns
from titanplans.training.checkpoint.folder import checkpoint_path, steps
from titanplans.training.checkpoint.manifest import MANIFEST, damage


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="titanplans check",
        description="Compare every file of the checkpoints in a folder with the checksum that was computed when the file "
        "was written.",
        epilog="exit status: 0 no file is damaged, 1 a file is damaged or missing, 2 there is no checkpoint",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="a job's dump_folder/checkpoint, or one folder step-N in it"
    )
    return parser


def main(argv: list[str]) -> int:
    """Check the checkpoints named in `argv`; return 0, or 1 if a file is damaged or missing.

    Raises:
        UserError: there is no checkpoint.
    """
    damages = {
        checkpoint.name: damage(checkpoint)
        for checkpoint in _checkpoints(Path(parser().parse_args(argv).folder))
    }
    print("\n".join(columns([(name, reason or "intact") for name, reason in damages.items()])))
    if any(damages.values()):
        print(
            "remove the damaged checkpoints: the job resumes from the newest remaining one", file=sys.stderr
        )
        return 1
    return 0


def _checkpoints(folder: Path) -> list[Path]:
    if (folder / MANIFEST).is_file():
        return [folder]
    if not folder.is_dir():
        raise ConfigError(f"check {folder}: there is no such folder")
    checkpoints = [checkpoint_path(folder, step) for step in steps(folder)]
    if not checkpoints:
        raise ConfigError(
            f"check {folder}: there is no folder step-N with a {MANIFEST} in it; name a job's dump_folder/checkpoint"
        )
    return checkpoints
