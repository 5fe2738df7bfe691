"""`titanplans export` and `titanplans import`: a distributed checkpoint to a Hugging Face folder, and back.

What they do is in `titanplans.training.checkpoint`, `export` and `convert`. Options need no torch.
"""

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

from titanplans.disk import is_taken
from titanplans.errors import ConfigError, did_you_mean
from titanplans.training.launch.logs import init_logging
from titanplans.training.launch.signals import stop_on_signals

_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str]) -> int:
    """Do what `argv`, which begins with the command, says; return 0, or raise a UserError or a RunError."""
    command, *rest = argv
    arguments = parser(command).parse_args(rest)
    with redirect_stdout(sys.stderr):  # whatever libraries log
        init_logging(0)
    with stop_on_signals():
        _check_folders(command, arguments)
        print(_converted(command, arguments))
    return 0


def _check_folders(command: str, arguments: argparse.Namespace) -> None:
    """Refuse what needs no torch: a source that is not there, and a target that is."""
    folders = arguments.checkpoint, arguments.folder
    source, target = folders if command == "export" else folders[::-1]
    if not source.is_dir():
        beside = sorted(path.name for path in source.parent.glob("*/"))
        instead = did_you_mean(source.name, beside, "name one that is there")
        raise ConfigError(f"{command} {source}: there is no such folder; {instead}")
    if is_taken(target):
        raise ConfigError(f"{command}: {target} already exists and is not overwritten; name a new folder")


def _converted(command: str, arguments: argparse.Namespace) -> str:
    """Do it, and return in words what was done."""
    if command == "import":
        from titanplans.training.checkpoint.convert import import_folder

        return import_folder(
            arguments.folder, arguments.checkpoint, config=arguments.config, dtype=arguments.dtype
        )
    from titanplans.training.checkpoint.export import export

    return export(
        arguments.checkpoint,
        arguments.folder,
        config=arguments.config,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        tokenizer=arguments.tokenizer,
        adapter=arguments.adapter,
        base=arguments.base,
    )


def parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of the options of `command`, "export" or "import"."""
    exports = command == "export"
    parser = argparse.ArgumentParser(
        prog=f"titanplans {command}",
        description="Write the weights of a distributed checkpoint as a Hugging Face folder, which from_pretrained loads."
        if exports
        else "Write a Hugging Face folder as a distributed checkpoint: a job's checkpoint.initial_load_path.",
        epilog="exit status: 0 written, 1 the disk refuses, 2 it can't be done as written",
        allow_abbrev=False,
    )
    checkpoint, folder = (
        ("a step-N folder, or one of peft's adapters", "the new folder")
        if exports
        else ("the new folder", "a folder of safetensors")
    )
    names = [("checkpoint", checkpoint), ("folder", folder)]
    for name, what in names if exports else names[::-1]:
        parser.add_argument(name, metavar=name.upper(), type=Path, help=what)
    parser.add_argument("--dtype", choices=_DTYPES, help="of the written weights; as they are if left out")
    parser.add_argument(
        "--config",
        help="a config.json, or the folder of one; for a checkpoint of torchtitan's, which has none",
    )
    if exports:
        parser.add_argument(
            "--max-shard-size", default="5GB", metavar="SIZE", help="of a file at most, e.g. 500MB; 5GB"
        )
        parser.add_argument(
            "--adapter",
            action="store_true",
            help="the adapters alone, as peft reads them; not added to the weights",
        )
        parser.add_argument(
            "--base",
            metavar="FOLDER",
            help="of adapters alone: the weights that they are added to, a Hugging Face folder or a step-N folder; that of "
            "the job, or of adapter_config.json, if left out",
        )
        parser.add_argument(
            "--tokenizer", metavar="FOLDER", help="copied into the folder; default: the job's"
        )
    return parser
