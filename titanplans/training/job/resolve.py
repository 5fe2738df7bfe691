"""Values that a job leaves open or that follow from several options, e.g. batch sizes and the data-parallel degree."""

import math
from operator import attrgetter
from typing import NamedTuple

from pydantic_core import to_jsonable_python
from transformers import PretrainedConfig

from titanplans import hub, modeling
from titanplans.config import ConfigError, JobConfig
from titanplans.config.families import DEFAULT_FLAVOR, DEFAULT_NAME
from titanplans.config.options import options_of
from titanplans.config.sections.data import Corpus, DataSource, SourceChat
from titanplans.config.sections.parallelism import Parallelism
from titanplans.errors import ModelError, either, near_multiples
from titanplans.parallel.mesh.process_group import default_device_type
from titanplans.text import show
from titanplans.training.data.vocabulary import default_tokenizer_path

HUB_OPTIONS = ("model.hf_assets_path", "model.config", "checkpoint.initial_load_path")
"""The options that may name a repository of the Hugging Face Hub instead of a local path."""


def hub_path(job: JobConfig, option: str) -> str | None:
    """Return the value of one of HUB_OPTIONS; None if it is unset, or names a distributed checkpoint, which is local."""
    if option == "checkpoint.initial_load_path" and not job.checkpoint.initial_load_in_hf:
        return None
    return attrgetter(option)(job)


def required_files(job: JobConfig, option: str) -> tuple[str, ...]:
    """Return the files, other than weights, that a job needs from the folder that `option`, one of HUB_OPTIONS, names."""
    is_weights = job.checkpoint.initial_load_in_hf and option == hf_weights_option(job)
    is_tokenizer = option == "model.hf_assets_path" or (is_weights and job.model.hf_assets_path is None)
    has_config = is_weights or option == "model.config"
    return (*([hub.CONFIG] if has_config else []), *([hub.TOKENIZER] if is_tokenizer else []))


def _folder(job: JobConfig, option: str) -> str:
    """Return the local folder of the repository that one of HUB_OPTIONS names, or the local path that it names."""
    path = str(hub_path(job, option))
    return hub.local_folder(path, f"{option} = {show(path)}", required_files(job, option))


def hf_weights_path(job: JobConfig) -> str | None:
    """Return the folder or the repository of a job's initial weights, as written in the job; None if it names none."""
    if not job.checkpoint.initial_load_in_hf:
        return None
    return job.checkpoint.initial_load_path or job.model.hf_assets_path


def hf_weights_folder(job: JobConfig) -> str | None:
    """Return the local folder of `hf_weights_path`, which may lack the weights of a repository; None if a job uses none.

    `repositories.download_weights` downloads them.
    """
    return None if hf_weights_path(job) is None else _folder(job, hf_weights_option(job))


def hf_weights_option(job: JobConfig) -> str:
    """Return the option that names the folder that `hf_weights_folder` returns."""
    return (
        "model.hf_assets_path" if job.checkpoint.initial_load_path is None else "checkpoint.initial_load_path"
    )


def model_name(job: JobConfig) -> tuple[str, str]:
    """Return the model's name and flavor; (path, "config") for a config file, (class, "own") for a user's class."""
    if job.model.class_ is not None:
        return job.model.class_, "own"
    is_named = job.model.name or job.model.flavor
    if (path := job.model.config or (None if is_named else hf_weights_folder(job))) is not None:
        return path, "config"
    return job.model.name or DEFAULT_NAME, job.model.flavor or DEFAULT_FLAVOR


def hf_config(job: JobConfig) -> PretrainedConfig:
    """Return the model's configuration.

    Raises:
        ModelError: the name or flavor is unknown, the file is not a Hugging Face configuration, or the configuration changes
            the model's built-in loss (use_l2warp), which a job does not use.
    """
    if job.model.class_ is not None:
        return modeling.user_model_config(job.model.class_, job.model.arguments or {})
    name, flavor = model_name(job)
    config = modeling.load_config_file(name) if flavor == "config" else modeling.load_config(name, flavor)
    if job.model.config_overrides:
        config = modeling.adjusted(config, to_jsonable_python(job.model.config_overrides))
    if getattr(config, "use_l2warp", False):
        raise ModelError(
            f"use_l2warp = True ({name} {flavor}) is a penalty in the loss of flash-linear-attention, which a job does not "
            "use: set use_l2warp = false in the model's config"
        )
    return config


def tokenizer_path(job: JobConfig) -> str:
    """Return the folder that holds the tokenizer.json."""
    if job.model.hf_assets_path is not None:
        return _folder(job, "model.hf_assets_path")
    return hf_weights_folder(job) or default_tokenizer_path()


class DataSettings(NamedTuple):
    """What one data loader reads: the sources, the tokens per sequence, and the sequences per local batch."""

    sources: tuple[DataSource, ...]
    seq_len: int
    local_batch_size: int


def training_data(job: JobConfig) -> DataSettings:
    """Return the training data's settings: the sources of [data], or the source that [training] names."""
    t, sources = job.training, job.data.sources
    if not sources:
        corpus = {field.name: getattr(t, field.name) for field in options_of(Corpus)}
        sources = (DataSource(**corpus, chat=SourceChat(**vars(t.chat))),)
    return DataSettings(sources, t.seq_len, t.local_batch_size)


def validation_data(job: JobConfig) -> DataSettings:
    """Return the validation data's settings; options that [validation] leaves unset have the training data's values."""
    t, v = job.training, job.validation
    sources = []
    for source in training_data(job).sources:
        # If [validation] names a data set, the training set's path does not belong to it.
        path = v.dataset_path if v.dataset_path is not None or v.dataset is not None else source.dataset_path
        corpus = {
            "dataset": v.dataset or source.dataset,
            "dataset_path": path,
            "dataset_split": v.dataset_split,
        }
        sources.append(source.replace(**corpus, text_column=v.text_column or source.text_column, weight=1.0))
    if v.dataset is not None or v.dataset_path is not None:
        sources = sources[:1]  # the data set of [validation] replaces all training sources
    return DataSettings(tuple(sources), v.seq_len or t.seq_len, v.local_batch_size or t.local_batch_size)


def fewest_processes(job: JobConfig) -> int:
    """Return the smallest number of processes that the degrees of `job` allow."""
    p = job.parallelism
    degrees = [p.tensor_parallel_degree, p.context_parallel_degree, p.pipeline_parallel_degree]
    shards = _shards_for_experts(p) if p.shard_degree == -1 else p.shard_degree
    return math.prod(degrees) * p.data_parallel_replicate_degree * shards


def _shards_for_experts(p: Parallelism) -> int:
    """Return the smallest shard degree for which expert_parallel_degree divides shard degree x TP x CP."""
    return p.expert_parallel_degree // math.gcd(
        p.expert_parallel_degree, p.tensor_parallel_degree * p.context_parallel_degree
    )


def data_parallel_degree(job: JobConfig, world_size: int) -> int:
    """Return the data-parallel degree, i.e. replicate degree x shard degree: the number of ranks with different batches.

    Raises:
        ConfigError: the degrees don't multiply to `world_size`, or expert_parallel_degree does not divide the ranks that
            experts are distributed over.
    """
    p = job.parallelism
    axes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
    degrees = {f"{axis}_degree": getattr(p, f"{axis}_degree") for axis in axes}
    degrees |= {"data_parallel_shard_degree": p.shard_degree}
    product = math.prod(degree for degree in degrees.values() if degree != -1)
    if world_size % product == 0 if p.shard_degree == -1 else world_size == product:
        ranks_per_batch = p.tensor_parallel_degree * p.context_parallel_degree * p.pipeline_parallel_degree
        ranks = world_size // (p.pipeline_parallel_degree * p.data_parallel_replicate_degree)
        if ranks % p.expert_parallel_degree:
            tp = p.tensor_parallel_degree
            works = either([n for n in range(1, ranks + 1) if ranks % n == 0 and (n == 1 or n % tp == 0)])
            axes = "data_parallel_shard_degree x context_parallel_degree x tensor_parallel_degree"
            raise ConfigError(
                f"parallelism.expert_parallel_degree = {p.expert_parallel_degree} does not divide the ranks that experts "
                f"are distributed over, {axes} = {ranks}: {works} would, or a data_parallel_shard_degree that is a multiple "
                f"of {_shards_for_experts(p)}"
            )
        return world_size // ranks_per_batch
    factors = {name: degree for name, degree in degrees.items() if degree > 1}
    factors = factors or {"data_parallel_replicate_degree": 1}
    product_text = f"{' x '.join(factors)} = {' x '.join(map(str, factors.values()))}"
    if len(factors) > 1:
        product_text += f" = {product}"
    if p.shard_degree == -1:
        divisors = either([n for n in range(1, world_size + 1) if world_size % n == 0])
        reason = f"does not divide the number of processes, {world_size}: {divisors} would"
    else:
        reason = f"is not the number of processes, {world_size}: change a degree"
        if p.data_parallel_strategy != "ddp":
            reason += " (data_parallel_shard_degree = -1 takes the remaining ones)"
    raise ConfigError(f"parallelism.{product_text} {reason}, or start {product}")


def trace_buf_size(job: JobConfig) -> int:
    """Return how many events torch's flight recorder keeps. If unset, it is 0 on a CPU, since only NCCL records them."""
    size = job.comm.trace_buf_size
    return size if size is not None else 0 if default_device_type() == "cpu" else 20_000


def global_batch_size(job: JobConfig, data_parallel: int) -> int:
    """Return the number of sequences in one optimizer step, given the data-parallel degree.

    Raises:
        ConfigError: it is not a multiple of local_batch_size x data-parallel degree.
    """
    training = job.training
    sequences = training.local_batch_size * data_parallel  # in one forward on all ranks
    if training.global_batch_size == -1:
        return sequences * training.gradient_accumulation_steps
    if training.global_batch_size % sequences:
        works = near_multiples(training.global_batch_size, sequences)
        raise ConfigError(
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of local_batch_size x "
            f"data-parallel degree = {training.local_batch_size} x {data_parallel} = {sequences}; {works} would work"
        )
    return training.global_batch_size
