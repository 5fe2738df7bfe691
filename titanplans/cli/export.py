"""`titanplans export` and `titanplans import`: convert a distributed checkpoint to a Hugging Face folder, and back.

The conversions are in `titanplans.training.checkpoint`, `export` and `convert`, and are imported after the options are
checked, which needs no torch.
"""

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from titanplans.disk import is_taken
from titanplans.errors import ConfigError, did_you_mean
from titanplans.training.launch.logs import init_logging
from titanplans.training.launch.signals import stop_on_signals

_COMMANDS = {
    "export": (
        "Write the weights of a distributed checkpoint to a Hugging Face folder, which from_pretrained loads.",
        {"checkpoint": "a step-N folder, or a folder of peft's adapters", "folder": "the new folder"},
    ),
    "import": (
        "Write a Hugging Face folder to a distributed checkpoint, for a job's checkpoint.initial_load_path.",
        {
            "folder": "a folder with safetensors files, or owner/name of the Hub",
            "checkpoint": "the new folder",
        },
    ),
}
"""The description of each command, and the names and help of its source and target."""


def main(argv: list[str]) -> int:
    """Run the command `argv[0]` with the arguments after it; return 0.

    Raises:
        UserError, RunError: the conversion can't be done, or it fails.
    """
    command, *rest = argv
    arguments = parser(command).parse_args(rest)
    with redirect_stdout(sys.stderr):  # logs go to stderr: stdout is for the result
        init_logging(0)
    with stop_on_signals():
        _check_folders(command, arguments)
        if command == "import":
            _import(**vars(arguments))
            return 0
        _export(**vars(arguments))
    return 0


def _import(*, folder: Path, **options: Any) -> None:
    from titanplans.hub import local_folder

    # Download before torch is imported and after the target is checked, since the download may take hours.
    local = Path(local_folder(str(folder), f"import {folder}", weights=True))
    from titanplans.training.checkpoint.convert import import_folder

    print(f"{'' if local == folder else f'{folder}, from {local}; '}{import_folder(local, **options)}")


def _export(*, push_to_hub: str | None, private: bool, **options: Any) -> None:
    if push_to_hub is None and private:
        raise ConfigError(
            "export: --private is for a new repository; name the repository with --push-to-hub, or remove --private"
        )
    if push_to_hub is not None:
        from titanplans.hub import check_access

        check_access(push_to_hub)  # before the conversion, which takes minutes
    from titanplans.training.checkpoint.export import export

    print(export(**options, title=push_to_hub), flush=True)
    if push_to_hub is not None:
        from titanplans.hub import push

        message = f"{options['checkpoint'].name}, exported by titanplans"
        print(push(options["folder"], push_to_hub, private=private, message=message))


def _check_folders(command: str, arguments: argparse.Namespace) -> None:
    """Refuse a source that does not exist and a target that exists, before torch is imported."""
    source, target = (getattr(arguments, name) for name in _COMMANDS[command][1])
    if not source.is_dir() and not (command == "import" and _is_repository(source)):
        siblings = sorted(path.name for path in source.parent.glob("*/"))
        remedy = did_you_mean(source.name, siblings, "name one that is there")
        raise ConfigError(f"{command} {source}: there is no such folder; {remedy}")
    if is_taken(target):
        raise ConfigError(f"{command}: {target} already exists and is not overwritten; name a new folder")


def _is_repository(source: Path) -> bool:
    from titanplans.hub import repository_of

    return repository_of(str(source)) is not None


def parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of the options of `command`, "export" or "import"."""
    description, folders = _COMMANDS[command]
    parser = argparse.ArgumentParser(
        prog=f"titanplans {command}",
        description=description,
        epilog="exit status: 0 written, 1 the disk or the Hub refuses, 2 can't be run as written",
        allow_abbrev=False,
    )
    add = parser.add_argument
    for name, help_text in folders.items():
        add(name, metavar=name.upper(), type=Path, help=help_text)
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="dtype of the written weights; default: unchanged")
    words = "a config.json, or a folder or repository with one; needed for torchtitan's checkpoints, which have no config"
    add("--config", help=words)
    if command == "export":
        add("--max-shard-size", default="5GB", metavar="SIZE", help="maximum size of a file; default: 5GB")
        words = "write only the adapters, in peft's format, instead of adding them to the weights"
        add("--adapter", action="store_true", help=words)
        words = "weights to which adapters are added: a Hugging Face or step-N folder, or owner/name; default: the job's"
        add("--base", metavar="FOLDER", help=words)
        add(
            "--tokenizer",
            metavar="FOLDER",
            help="folder or owner/name of the tokenizer to copy; default: the job's",
        )
        words = "a Jinja file that replaces the tokenizer's template; default: the job's chat_template"
        add("--chat-template", metavar="FILE", help=words)
        words = "then upload the folder to this repository of the Hugging Face Hub, which is created if it does not exist"
        add("--push-to-hub", metavar="OWNER/NAME", help=words)
        add("--private", action="store_true", help="a repository that --push-to-hub creates is private")
    return parser
