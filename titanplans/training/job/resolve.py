"""The values of a job's unset keys; some depend on the number of processes.

`titanplans.training.job.checks`, `titanplans.training.job.parts` and the trainer share them.
"""

import math
from typing import NamedTuple

from pydantic_core import to_jsonable_python
from transformers import PretrainedConfig

from titanplans import modeling
from titanplans.config import ConfigError, JobConfig
from titanplans.config.families import DEFAULT_FLAVOR, DEFAULT_NAME
from titanplans.config.options import options_of
from titanplans.config.sections.data import Corpus, DataSource, SourceChat
from titanplans.config.sections.parallelism import Parallelism
from titanplans.errors import ModelError, either, near_multiples
from titanplans.parallel.mesh.process_group import default_device_type
from titanplans.training.data.vocabulary import default_tokenizer_path


def published_folder(job: JobConfig) -> str | None:
    """Return the Hugging Face folder that a job starts from."""
    if not job.checkpoint.initial_load_in_hf:
        return None
    return job.checkpoint.initial_load_path or job.model.hf_assets_path


def published_key(job: JobConfig) -> str:
    """Return the key that names `published_folder`."""
    return (
        "model.hf_assets_path" if job.checkpoint.initial_load_path is None else "checkpoint.initial_load_path"
    )


def model_name(job: JobConfig) -> tuple[str, str]:
    """Return the model's name and flavor; for a config file, its path and "config"."""
    if job.model.class_ is not None:
        return job.model.class_, "own"
    named = job.model.name or job.model.flavor
    if (path := job.model.config or (None if named else published_folder(job))) is not None:
        return path, "config"
    return job.model.name or DEFAULT_NAME, job.model.flavor or DEFAULT_FLAVOR


def hf_config(job: JobConfig) -> PretrainedConfig:
    """Return the model's configuration.

    Raises:
        ModelError: unknown name or flavor, a file that is no Hugging Face configuration, or one that asks for what only the
            model's own loss would do: a job's loss is torchtitan's cross entropy of its logits.
    """
    if job.model.class_ is not None:
        return modeling.own_config(job.model.class_, job.model.arguments or {})
    name, flavor = model_name(job)
    config = modeling.load_config_file(name) if flavor == "config" else modeling.load_config(name, flavor)
    if job.model.config_overrides:
        config = modeling.adjusted(config, to_jsonable_python(job.model.config_overrides))
    if getattr(config, "use_l2warp", False):
        raise ModelError(
            f"use_l2warp = True ({name} {flavor}) is a penalty in flash-linear-attention's own loss, and a job's loss is "
            "computed from the logits, without it: set use_l2warp = false in the model's config"
        )
    return config


def tokenizer_path(job: JobConfig) -> str:
    """Return the folder that holds the tokenizer.json."""
    return job.model.hf_assets_path or published_folder(job) or default_tokenizer_path()


class DataSettings(NamedTuple):
    """What one data loader reads, in rows of `seq_len` tokens."""

    sources: tuple[DataSource, ...]
    seq_len: int
    local_batch_size: int


def training_data(job: JobConfig) -> DataSettings:
    """Return the training data's settings: the sources of [data], or the one that [training] names."""
    t, sources = job.training, job.data.sources
    if not sources:
        named = {field.name: getattr(t, field.name) for field in options_of(Corpus)}
        sources = (DataSource(**named, chat=SourceChat(**vars(t.chat))),)
    return DataSettings(sources, t.seq_len, t.local_batch_size)


def validation_data(job: JobConfig) -> DataSettings:
    """Return the validation data's settings; keys that [validation] leaves unset are those of the training data."""
    t, v = job.training, job.validation
    sources = []
    for of in training_data(job).sources:
        # A data set of its own does not take the training set's path.
        path = v.dataset_path if v.dataset_path is not None or v.dataset is not None else of.dataset_path
        named = {"dataset": v.dataset or of.dataset, "dataset_path": path, "dataset_split": v.dataset_split}
        sources.append(of.replace(**named, text_column=v.text_column or of.text_column, weight=1.0))
    if v.dataset is not None or v.dataset_path is not None:
        sources = sources[:1]  # one in place of all
    return DataSettings(tuple(sources), v.seq_len or t.seq_len, v.local_batch_size or t.local_batch_size)


def fewest_processes(job: JobConfig) -> int:
    """Return the number of processes that the degrees of `job` need at least."""
    p = job.parallelism
    degrees = [p.tensor_parallel_degree, p.context_parallel_degree, p.pipeline_parallel_degree]
    shards = _shards_for_experts(p) if p.shard_degree == -1 else p.shard_degree
    return math.prod(degrees) * p.data_parallel_replicate_degree * shards


def _shards_for_experts(p: Parallelism) -> int:
    """Return the least shard degree with which the ranks of a copy of the weights can divide the experts."""
    return p.expert_parallel_degree // math.gcd(
        p.expert_parallel_degree, p.tensor_parallel_degree * p.context_parallel_degree
    )


def data_parallel_degree(job: JobConfig, world_size: int) -> int:
    """Return the number of ranks that the batch is divided among: replicas times shards.

    Raises:
        ConfigError: the degrees don't multiply to `world_size`, or leave too few ranks for the experts; the message does
            the arithmetic.
    """
    p = job.parallelism
    axes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
    degrees = {f"{axis}_degree": getattr(p, f"{axis}_degree") for axis in axes}
    degrees |= {"data_parallel_shard_degree": p.shard_degree}
    product = math.prod(degree for degree in degrees.values() if degree != -1)
    if world_size % product == 0 if p.shard_degree == -1 else world_size == product:
        one_batch = p.tensor_parallel_degree * p.context_parallel_degree * p.pipeline_parallel_degree
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
        return world_size // one_batch
    given = {name: degree for name, degree in degrees.items() if degree > 1}
    given = given or {"data_parallel_replicate_degree": 1}
    what = f"{' x '.join(given)} = {' x '.join(map(str, given.values()))}"
    if len(given) > 1:
        what += f" = {product}"
    if p.shard_degree == -1:
        divisors = either([n for n in range(1, world_size + 1) if world_size % n == 0])
        why = f"does not divide the number of processes, {world_size}: {divisors} would"
    else:
        why = f"is not the number of processes, {world_size}: make it so"
        if p.data_parallel_strategy != "ddp":
            why += " (data_parallel_shard_degree = -1 takes the rest)"
    raise ConfigError(f"parallelism.{what} {why}, or start {product}")


def trace_buf_size(job: JobConfig) -> int:
    """Return the number of events that torch's flight recorder holds; NCCL alone writes them out."""
    given = job.comm.trace_buf_size
    return given if given is not None else 0 if default_device_type() == "cpu" else 20_000


def global_batch_size(job: JobConfig, data_parallel: int) -> int:
    """Return the sequences in one optimizer step.

    Raises:
        ConfigError: it is not a multiple of the sequences that the data-parallel ranks process at a time.
    """
    training = job.training
    at_a_time = training.local_batch_size * data_parallel
    if training.global_batch_size == -1:
        return at_a_time * training.gradient_accumulation_steps
    if training.global_batch_size % at_a_time:
        works = near_multiples(training.global_batch_size, at_a_time)
        raise ConfigError(
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of local_batch_size x "
            f"data-parallel degree = {training.local_batch_size} x {data_parallel} = {at_a_time}; {works} would work"
        )
    return training.global_batch_size
