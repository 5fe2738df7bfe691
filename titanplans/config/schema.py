"""`JobConfig`, the tree of a job's sections; `keys`, a job's keys by dotted name; and `strategy_of`, a job's strategy."""

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
    """A job. It has the sections and keys of torchtitan up to version 0.2.2, and more.

    Some defaults in a job differ from the defaults of a section's class; these are set here.
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
    """Lines that rank 0 logs when the job starts: the description, and notes on keys that were renamed. Not a section."""


@functools.cache
def keys() -> dict[str, Field]:
    """Return every key by its dotted name, in the order of the sections."""
    return {f"{key.section}.{key.name}": key for key in _keys(JobConfig(), "")}


def _keys(options: Options, section: str) -> list[Field]:
    fields_here, nested = [], []
    for field in options_of(type(options)):
        value = get(options, field.name)
        if is_options(field.hint):
            nested += _keys(value, f"{section}.{field.name}".lstrip("."))
        else:
            # TOML can't express None, so it can only be a default.
            hint = field.hint if value is None else without_none_type(field.hint)
            fields_here.append(field._replace(section=section, hint=hint, default=value))
    return fields_here + nested


def build_job(values: dict[str, Any]) -> JobConfig:
    """Return the job with these values (by dotted key), and defaults for all other keys.

    Raises:
        OptionError: two options contradict each other.
    """
    return _build(JobConfig(), "", values)


def _build(default: Any, section: str, values: dict[str, Any]) -> Any:
    fields = {}
    for field in options_of(type(default)):
        name, value = f"{section}.{field.name}".lstrip("."), get(default, field.name)
        fields[field.name] = (
            _build(value, name, values) if isinstance(value, Options) else values.get(name, value)
        )
    return type(default)(**fields)


def strategy_of(job: JobConfig) -> FSDP2Config | DDPConfig:
    """Return the strategy of a job, whose options are in several of the job's sections.

    The sections [compile], [quantize.linear.float8] and [lora] are left out if enable, recipe_name or rank is not set.

    Raises:
        OptionError: two options exclude each other; the message names the job's keys.
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
    values = {field.name: flat[field.name] for field in options_of(cls) if field.name not in nested}
    if ddp and values["autocast_dtype"] is None and job.training.mixed_precision_param == "bfloat16":
        # DDP has no mixed precision of parameters. As in torchtitan, autocast is used instead.
        values["autocast_dtype"] = "bfloat16"
    with rename_option_errors():
        return cls(**values, **nested)


@contextmanager
def rename_option_errors() -> Iterator[None]:
    """In the body, make OptionErrors of a strategy name the job's keys."""
    try:
        yield
    except OptionError as error:
        name = error.option
        key = f"quantize.linear.{name}" if name.startswith("float8.") else _flat_keys().get(name, name)
        raise error.renamed(key) from error


@functools.cache
def _flat_keys() -> dict[str, str]:
    """Map each option of a strategy to the job's key: {"fsdp_towers": "parallelism.fsdp_towers", ...}."""
    strategies = [field.name for cls in (FSDP2Config, DDPConfig) for field in options_of(cls)]
    sections = ("parallelism", "training", "model", "ddp")
    return {
        name: f"{section}.{name}"
        for name in strategies
        for section in sections
        if f"{section}.{name}" in keys()
    }
