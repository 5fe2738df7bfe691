"""The cells of a sweep: the command line and the job of each, and its record on disk.

A record is one JSON file, `cell.json` in the cell's folder: written before the cell starts, with state "interrupted", and
after it has ended. What depends on the machine, the data and the model is refused when the job runs; `refusal` checks it
without.
"""

import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

from titanplans.cli.sweep.spec import Settings, Spec
from titanplans.config import ConfigError, JobConfig, load_job
from titanplans.config.schema import keys
from titanplans.config.translate import flatten
from titanplans.disk import is_taken, write_whole
from titanplans.errors import UserError
from titanplans.text import show

FILE_NAME = "cell.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{,199}")  # file systems take 255 bytes


class Cell:
    """One job of a sweep, whose settings may contradict each other.

    Attributes:
        name: also that of its folder, the job's dump_folder.
        settings: what differs from the base job.
        arguments: what `titanplans train` is given.
        job: the whole job; None if its settings contradict each other, as `refusal` says.
        identity: what decides the results, as JSON has it: every key of the job, and the content of its model's file.
        record: what cell.json holds: `cell`, `command`, `settings`, `job` (the identity), `state`, `exit_status`, `line`
            (why it did not finish), `seconds`, and `figures` if it finished.
    """

    def __init__(self, spec: Spec, name: str, settings: Settings) -> None:
        self.name, self.settings, self.folder = name, settings, spec.folder / name
        self.arguments = [spec.header.base, f"--job.dump_folder={self.folder}", "--metrics.enable_jsonl=true"]
        self.arguments += [f"--{key}={word}" for key, word in settings.items()]
        self.job: JobConfig | None = None
        self.refusal: str | None = None
        self.record: dict[str, Any] | None = None
        # The base job has been read, so what is refused now are the settings.
        try:
            self.job = load_job(self.arguments)
            self.identity: dict[str, Any] = dict(flatten(self.job.to_dict()))
        except ConfigError as error:
            self.refusal = str(error)
            self.identity = {"refusal": self.refusal, **settings}
        config = self.identity.get("model.config")
        if config is not None and Path(config).is_file():
            content = hashlib.sha256(Path(config).read_bytes()).hexdigest()
            self.identity["SHA-256 of model.config"] = content

    @property
    def command(self) -> str:
        """The command that runs this cell alone."""
        return shlex.join(["titanplans", "train", *self.arguments])

    @property
    def state(self) -> str:
        """The recorded state; "not run" if the settings are others now."""
        return "not run" if self.record is None or self.changes() else self.record["state"]

    def changes(self) -> list[str]:
        """Return how the cell differs from the one that was run: "training.steps = 10, now 12"."""
        before, found = self.identity if self.record is None else self.record["job"], []
        for key in sorted(self.identity | before):
            # A key that another release did not have counts as its default.
            default = keys()[key].default if key in keys() else None
            then, now = (values.get(key, default) for values in (before, self.identity))
            if then != now:
                found.append(f"{key} = {show_or_unset(then)}, now {show_or_unset(now)}")
        return found

    def kept(self) -> str | None:
        """Say what a cell whose settings have changed has that only --rerun may delete: a result or a checkpoint."""
        if self.record is None or not (changed := self.changes()):
            return None
        checkpoints = self.record["job"].get("checkpoint.folder")
        if self.record["state"] == "finished":
            return f"has finished with other settings: {'; '.join(changed)}"
        if checkpoints is not None and (self.folder / checkpoints).exists():
            return f"has a checkpoint with other settings: {'; '.join(changed)}"
        return None

    def begin(self) -> None:
        """Write the record of a cell that is about to run."""
        self.record = {"cell": self.name, "command": self.command, "settings": self.settings}
        self.update(
            job=dict(self.identity),
            state="interrupted",
            exit_status=None,
            line=None,
            seconds=None,
            figures={},
        )

    def update(self, **values: Any) -> None:
        """Write the record with these values."""
        self.record = (self.record or {}) | values
        write_whole(self.folder / FILE_NAME, json.dumps(self.record, indent=1) + "\n")

    def read(self) -> None:
        """Read the record, if there is one.

        Raises:
            ConfigError: the folder is there and is no cell's, or the record is not one of this release's.
        """
        path = self.folder / FILE_NAME
        if not path.is_file():
            if is_taken(self.folder):
                raise ConfigError(
                    f"{self.folder} holds files, but no {FILE_NAME}, so it is not a sweep's; move it away, or give "
                    "[sweep] another dump_folder"
                )
            return
        try:
            self.record = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(self.record, dict) or not {"job", "state"} <= self.record.keys():
                raise ValueError("it is no record of this release")
        except ValueError as error:  # not JSON, too
            raise ConfigError(
                f"{path} can't be read ({error}); remove the folder to run the cell again"
            ) from None


def make_cells(spec: Spec) -> list[Cell]:
    """Return the cells in the order of the file.

    Raises:
        ConfigError: two cells of equal settings, a name that is no file's, or a job without a seed.
    """
    cells = []
    for name, settings in spec.cells.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f'{spec.path}: cell "{name}": a name is its folder\'s, so it is up to 200 letters, digits and ._=,+-, the '
                "first a letter or digit; give it a name: [[axis]] names, or [[cells]] name"
            )
        cell = Cell(spec, name, settings)
        for other in cells:
            if cell.identity | {"job.dump_folder": ""} == other.identity | {"job.dump_folder": ""}:
                raise ConfigError(
                    f"{spec.path}: cells {other.name} and {name} have equal settings, so they are one experiment; "
                    "leave one out"
                )
        if cell.job is not None and cell.job.debug.seed is None:
            raise ConfigError(
                f"{spec.path}: debug.seed is unset in cell {name}, so that each run would draw its own, and "
                "losses would differ by that alone; give it in [set], or in the base job"
            )
        cells.append(cell)
    return cells


def refusal(cell: Cell) -> str | None:
    """Return why this machine would refuse the cell before it runs, or None. Imports the model libraries."""
    if cell.job is None:
        return cell.refusal
    from titanplans.training.job.checks import check_job
    from titanplans.training.launch.launcher import local_ranks
    from titanplans.training.trainer.device import prepare_device

    prepare_device()
    try:
        check_job(cell.job, local_ranks(cell.job))
    except UserError as error:
        return str(error)
    return None


def show_or_unset(value: Any) -> str:
    """Return a job's value as TOML has it, or "unset"."""
    return "unset" if value is None else show(value)
