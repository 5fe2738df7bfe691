"""`titanplans completion SHELL`: a script that completes commands, options and what they choose from, written by shtab.

It is made of the commands' own parsers and of the keys of a job. Needs no torch.
"""

import argparse
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import shtab

from titanplans.cli import check, data, export, plot
from titanplans.cli.sweep import main as sweep
from titanplans.cli.verify.arguments import add_commands
from titanplans.config.families import families
from titanplans.config.schema import keys
from titanplans.config.translate import takes_no_value
from titanplans.config.values import FilePath

_SHELLS = ("bash", "zsh")
_FILES = ("runs", "sweep", "folder", "checkpoint", "output", "config")
_SUBJECTS = ("subject", "model", "model_types")
"""Arguments that are paths, and those that are a model's name or a path."""
_SUBJECT = "_titanplans_subject"
"""The function that completes a model's name or a path."""


def main(argv: list[str]) -> int:
    """Print the script for the shell that `argv` names; return the exit status."""
    names = " ".join(families())
    functions: Any = {
        "bash": f'{_SUBJECT}() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}',
        "zsh": f'{_SUBJECT}() {{ _alternative "models:model:({names})" "files:file:_files" }}',
    }
    print(shtab.complete(_all_commands(), parser().parse_args(argv).shell, preamble=functions), end="")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of this command's own options."""
    parser = argparse.ArgumentParser(
        prog="titanplans completion",
        description="Print a script that completes commands, options and values in a shell.",
        epilog='bash: eval "$(titanplans completion bash)" in ~/.bashrc; zsh: titanplans completion zsh > '
        "~/.zfunc/_titanplans, a folder of fpath",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=_SHELLS, help="which shell")
    return parser


def _all_commands() -> argparse.ArgumentParser:
    everything = argparse.ArgumentParser(prog="titanplans", add_help=False)
    everything.add_argument("--version", action="store_true", help="print the version")
    commands = everything.add_subparsers()
    train = commands.add_parser("train", help="train the job", add_help=False)
    train.add_argument("--max-restarts", metavar="N", help="start all ranks again, N times at most")
    described: dict[str, Any] = {"help": "what a job's model will see", "conflict_handler": "resolve"}
    _add_keys(train)
    _add_keys(commands.add_parser("evaluate", help="validate a job's checkpoint", add_help=False))
    _add_keys(commands.add_parser("data", parents=[data.parser()], add_help=False, **described))
    add_commands(commands)
    others = {"sweep": sweep.parser(), "plot": plot.parser(), "check": check.parser(), "completion": parser()}
    others |= {command: export.parser(command) for command in ("export", "import")}
    for name, own in others.items():
        commands.add_parser(name, parents=[own], help=own.description, add_help=False)
    for command in commands.choices.values():
        for action in command._actions:
            if action.dest in _FILES or action.metavar == "FOLDER":
                action.complete = shtab.FILE  # type: ignore[attr-defined]  shtab's way
            if action.dest in _SUBJECTS:
                action.complete = dict.fromkeys(_SHELLS, _SUBJECT)  # type: ignore[attr-defined]
    return everything


def _add_keys(command: argparse.ArgumentParser) -> None:
    """Add the keys of a job; a key without values to choose from, which is no path, completes to nothing."""
    job: Any = command.add_argument("job", nargs="?", help="a job's TOML file")
    job.complete = shtab.FILE
    command.add_argument(
        "--help", metavar="SECTION", choices=sorted({key.section for key in keys().values()})
    )
    command.add_argument("--print-config", action="store_true", help="print the job as it would run")
    for name, key in keys().items():
        words = key.doc.replace("%", "%%")
        if takes_no_value(name):
            section, _, last = name.rpartition(".")
            command.add_argument(f"--{name}", f"--{section}.no-{last}", action="store_true", help=words)
            continue
        choices = list(families() if name == "model.name" else _choices(key.hint)) or None
        option: Any = command.add_argument(f"--{name}", choices=choices, help=words)
        if FilePath in (key.hint, *get_args(key.hint)):
            option.complete = shtab.FILE


def _choices(hint: Any) -> Iterator[str]:
    """Yield the words of the Literals in a type."""
    for part in get_args(hint):
        if get_origin(hint) is Literal:
            yield str(part)
        else:
            yield from _choices(part)
