"""`JobConfig`, the tree of sections, and what can be read off it: keys, types, defaults, documentation."""

import ast
import functools
import inspect
import itertools
import textwrap
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, get_type_hints

from titanplans.config.sections.checkpoint import Checkpoint
from titanplans.config.sections.model import Model, Training, Validation
from titanplans.config.sections.optimization import LRScheduler, Optimizer
from titanplans.config.sections.parallelism import DDP, ActivationCheckpoint, Compile, Parallelism
from titanplans.config.sections.quantize import Quantize
from titanplans.config.sections.run import Comm, Debug, Experimental, Job, Metrics, Profiling
from titanplans.config.toml import write_toml


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A job: sections and keys are torchtitan's up to 0.2.2, with our own added."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    ddp: DDP = field(default_factory=DDP)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    quantize: Quantize = field(default_factory=Quantize)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    experimental: Experimental = field(default_factory=Experimental)

    notes: tuple[str, ...] = field(default=(), compare=False)
    """Not a section: what rank 0 says when the job starts, its description and which keys were read under another name."""

    def to_toml(self) -> str:
        """Write every key with its value as TOML that reads back as an equal job."""
        return write_toml(_tables(self))


class Key(NamedTuple):
    """A key of the job: "training.seq_len" without its section is its name."""

    section: str
    name: str
    hint: Any
    default: Any
    doc: str


@functools.cache
def keys() -> dict[str, Key]:
    """Return every key by its dotted name, in the order of the sections."""
    return {f"{key.section}.{key.name}": key for key in _keys(JobConfig, "")}


def build_job(values: dict[str, Any]) -> JobConfig:
    """Return the job with these values, by dotted key, and defaults elsewhere; they are of their types already."""
    return _build(JobConfig, "", values)


def _keys(cls: type, section: str) -> list[Key]:
    found, nested, docs = [], [], _docs(cls)
    hints, default = get_type_hints(cls, include_extras=True), cls()
    for item in fields(cls):
        hint = hints[item.name]
        if is_dataclass(hint):
            nested += _keys(hint, f"{section}.{item.name}".lstrip("."))
        elif section:
            found.append(Key(section, item.name, hint, getattr(default, item.name), docs[item.name]))
    return found + nested


def _docs(cls: type) -> dict[str, str]:
    """Return the string that stands under each field in the source, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # pyrefly: ignore[missing-attribute]
    docs = {}
    for statement, below in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(statement.target, ast.Name)
            docs[statement.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs


def _build(cls: type, section: str, values: dict[str, Any]) -> Any:
    given, hints = {}, get_type_hints(cls)
    for item in fields(cls):
        name = f"{section}.{item.name}".lstrip(".")
        if is_dataclass(hints[item.name]):
            given[item.name] = _build(hints[item.name], name, values)
        elif name in values:
            given[item.name] = values[name]
    return cls(**given)


def _tables(job: JobConfig) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for key in keys().values():
        node: Any = job
        for part in key.section.split("."):
            node = getattr(node, part)
        tables.setdefault(key.section, {})[key.name] = getattr(node, key.name)
    return tables
