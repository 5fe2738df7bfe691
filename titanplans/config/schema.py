"""`JobConfig`, the tree of sections; its keys by their dotted names; and the strategy that a job asks for."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from titanplans.config.compatibility import job
from titanplans.config.options import Field, Options, get, options_of
from titanplans.config.sections.checkpoint import Checkpoint
from titanplans.config.sections.data import Data
from titanplans.config.sections.model import Model, Training, Validation
from titanplans.config.sections.optimization import Loss, LRScheduler, Optimizer
from titanplans.config.sections.parallelism import DDP, ActivationCheckpoint, Compile, Parallelism
from titanplans.config.sections.run import Comm, Debug, Experimental, Job, Metrics, Profiling
from titanplans.config.sections.weights import Float8, LoRA, Quantize
from titanplans.config.strategies import DDPConfig, FSDP2Config
from titanplans.config.values import is_options, without_none_type
from titanplans.errors import OptionError


class JobConfig(Options, refuses=job.refusals):
    """A job: sections and keys are torchtitan's up to 0.2.2, with our own added.

    Where a job's default is not that of the group of options, it stands here.
    """

    job: Job = Job()
    model: Model = Model()
    training: Training = Training(mixed_precision_param="bfloat16", mixed_precision_reduce="float32")
    data: Data = Data()
    lora: LoRA = LoRA()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    loss: Loss = Loss()
    parallelism: Parallelism = Parallelism()
    ddp: DDP = DDP()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint(mode="selective")
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    checkpoint: Checkpoint = Checkpoint()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    debug: Debug = Debug()
    experimental: Experimental = Experimental()

    notes: ClassVar[tuple[str, ...]] = ()
    """Not a section: what rank 0 says when the job starts, its description and which keys were read under another name."""


@functools.cache
def keys() -> dict[str, Field]:
    """Return every key by its dotted name, in the order of the sections."""
    return {f"{key.section}.{key.name}": key for key in _keys(JobConfig(), "")}


def _keys(options: Options, section: str) -> list[Field]:
    found, nested = [], []
    for field in options_of(type(options)):
        value = get(options, field.name)
        if is_options(field.hint):
            nested += _keys(value, f"{section}.{field.name}".lstrip("."))
        else:
            # None has no word in TOML, so it is only ever a default.
            hint = field.hint if value is None else without_none_type(field.hint)
            found.append(field._replace(section=section, hint=hint, default=value))
    return found + nested


def build_job(values: dict[str, Any]) -> JobConfig:
    """Return the job with these values, by dotted key, and defaults elsewhere.

    Raises:
        OptionError: two options contradict each other.
    """
    return _build(JobConfig(), "", values)


def _build(default: Any, section: str, values: dict[str, Any]) -> Any:
    given = {}
    for field in options_of(type(default)):
        name, value = f"{section}.{field.name}".lstrip("."), get(default, field.name)
        given[field.name] = (
            _build(value, name, values) if isinstance(value, Options) else values.get(name, value)
        )
    return type(default)(**given)


def strategy_of(job: JobConfig) -> FSDP2Config | DDPConfig:
    """Return how `job` spreads its model: the options of a strategy, each from the section that has it.

    [compile] enable and [quantize.linear.float8] recipe_name are switches: without them their sections wait.

    Raises:
        OptionError: two options exclude each other; named by the job's keys.
    """
    nested = {
        "activation_checkpoint": job.activation_checkpoint,
        "lora": job.lora if job.lora.rank else LoRA(),
        "compile": job.compile if job.compile.enable else Compile(),
        "float8": job.quantize.linear.float8 if job.quantize.linear.float8.recipe_name else Float8(),
    }
    ddp = job.parallelism.data_parallel_strategy == "ddp"
    cls = DDPConfig if ddp else FSDP2Config
    flat = vars(job.parallelism) | vars(job.training) | vars(job.model) | (vars(job.ddp) if ddp else {})
    given = {field.name: flat[field.name] for field in options_of(cls) if field.name not in nested}
    if ddp and given["autocast_dtype"] is None and job.training.mixed_precision_param == "bfloat16":
        # FSDP2's mixed precision has no counterpart under DDP; autocast is what torchtitan takes, too.
        given["autocast_dtype"] = "bfloat16"
    with rename_option_errors():
        return cls(**given, **nested)


@contextmanager
def rename_option_errors() -> Iterator[None]:
    """Name options by the job's keys in the OptionErrors of the body."""
    try:
        yield
    except OptionError as error:
        name = error.option
        key = f"quantize.linear.{name}" if name.startswith("float8.") else _flat_keys().get(name, name)
        raise error.renamed(key) from error


@functools.cache
def _flat_keys() -> dict[str, str]:
    """Return the job's keys by the options of strategies: "parallelism.fsdp_towers" for "fsdp_towers"."""
    strategies = [field.name for cls in (FSDP2Config, DDPConfig) for field in options_of(cls)]
    sections = ("parallelism", "training", "model", "ddp")
    return {
        name: f"{section}.{name}"
        for name in strategies
        for section in sections
        if f"{section}.{name}" in keys()
    }
