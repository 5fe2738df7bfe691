"""`trainer_config` turns a job into torchtitan 0.3's config objects, section by section.

Importing this imports torchtitan, so `trainer.device.prepare_device` comes first. `titanplans.config.JobConfig`
documents the keys; `titanplans.training.job.resolve` gives unset ones their values.
"""

import logging
import math
import os
from dataclasses import replace
from pathlib import Path

from torchtitan.config.configs import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.tools.profiler import Profiler

from titanplans.config import JobConfig, strategy_of
from titanplans.config.compatibility.job import schedule_steps
from titanplans.config.sections.data import DataLoader
from titanplans.torchrun import restarted
from titanplans.training.checkpoint.card import chat_templates_of
from titanplans.training.checkpoint.manager import CheckpointManager
from titanplans.training.checkpoint.match import job_values
from titanplans.training.data.loader import TextDataLoader
from titanplans.training.data.text_tokenizer import TextTokenizer
from titanplans.training.job import resolve
from titanplans.training.trainer import documents
from titanplans.training.trainer.loss import CrossEntropyLoss
from titanplans.training.trainer.metrics import MetricsProcessor
from titanplans.training.trainer.model import model_spec
from titanplans.training.trainer.optimizer import LRSchedulers, optimizers_config
from titanplans.training.trainer.trainer import Trainer
from titanplans.training.trainer.validator import Validator

_log = logging.getLogger(__name__)


def trainer_config(job: JobConfig, world_size: int | None = None) -> Trainer.Config:
    """Return the config of a Trainer for `job`; `Trainer(trainer_config(job)).train()` runs it.

    Args:
        job: already checked by `titanplans.training.job.checks.check_job`, whose errors name the job's keys.
        world_size: number of processes; None reads torchrun's WORLD_SIZE, and 1 where there is none.

    Raises:
        ConfigError: the degrees don't fit the processes, the batch the degrees, or an option of the strategy another.
        ModelError: the model is unknown.
    """
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    name, flavor = resolve.model_name(job)
    if (published := resolve.published_folder(job)) is not None:
        _log.info(
            f"model from {name if flavor == 'config' else f'{name} {flavor}'}, tokenizer from "
            f"{resolve.tokenizer_path(job)}; a run that resumes nothing takes its weights from {published}"
        )
    spread, config = strategy_of(job), resolve.hf_config(job)
    apart = documents.keyword(job, config)
    return Trainer.Config(
        strategy=spread,
        skip_nan_inf=job.training.skip_nan_inf,
        skip_nan_inf_limit=job.training.skip_nan_inf_limit,
        load_balance_coeff=job.optimizer.load_balance_coeff,
        model_spec=model_spec(
            config, name=name, flavor=flavor, strategy=spread, pipeline=job.parallelism, documents=apart
        ),
        hf_assets_path=resolve.tokenizer_path(job),
        tokenizer=TextTokenizer.Config(),
        dump_folder=job.job.dump_folder,
        profiler=Profiler.Config(**vars(job.profiling)),
        metrics=MetricsProcessor.Config(**vars(job.metrics)),
        dataloader=training_loader(job, world_size, apart=documents.are_apart(job, apart)),
        optimizer=optimizers_config(job),
        lr_scheduler=LRSchedulers.Config(**vars(job.lr_scheduler) | {"total_steps": schedule_steps(job)}),
        training=_training(job, world_size),
        parallelism=_parallelism(job),
        checkpoint=_checkpoint(job),
        activation_checkpoint=None,  # as the strategy says
        # torchtitan hands it to the loss, which is ours.
        compile=spread.compile,  # pyrefly: ignore[bad-argument-type]
        comm=CommConfig(**vars(job.comm) | {"trace_buf_size": resolve.trace_buf_size(job)}),
        validator=_validator(job, world_size, apart=documents.are_apart(job, apart)),
        debug=DebugConfig(
            **vars(job.debug), print_config=job.job.print_config, save_config_file=job.job.save_config_file
        ),
        loss=CrossEntropyLoss.Config(**vars(job.loss)),
    )


def training_loader(job: JobConfig, world_size: int, *, apart: bool) -> TextDataLoader.Config:
    """Return the training data's loader; `apart`: documents of a row do not see each other."""
    return replace(
        _dataloader(job, resolve.training_data(job), job.training.dataloader, apart=apart, infinite=True),
        global_batch_size=resolve.global_batch_size(job, resolve.data_parallel_degree(job, world_size)),
        epochs=job.training.epochs,
    )


def open_training_data(
    job: JobConfig, world_size: int, *, apart: bool, alone: bool
) -> tuple[TextDataLoader, TextTokenizer]:
    """Return the loader of the first of the data-parallel ranks, or of all as if it were `alone`, and its tokenizer.

    Alone it reads a single source once: a mixture by weight goes on.
    """
    tokenizer = TextTokenizer.Config().build(tokenizer_path=resolve.tokenizer_path(job))
    config = training_loader(job, world_size, apart=apart)
    if alone and len(config.data.sources) == 1:
        config = replace(config, epochs=1)
    loader = config.build(
        dp_rank=0,
        dp_world_size=1 if alone else resolve.data_parallel_degree(job, world_size),
        tokenizer=tokenizer,
        seq_len=job.training.seq_len,
        local_batch_size=job.training.local_batch_size,
    )
    return loader, tokenizer


def _dataloader(
    job: JobConfig, data: resolve.DataSettings, workers: DataLoader, *, apart: bool, infinite: bool
) -> TextDataLoader.Config:
    return TextDataLoader.Config(
        data=job.data.replace(sources=data.sources, documents="apart" if apart else "joined"),
        infinite=infinite,
        # The order of the documents must not be drawn anew when a job resumes.
        seed=job.debug.seed or 0,
        **vars(workers),
    )


def _training(job: JobConfig, world_size: int) -> TrainingConfig:
    same = (
        "local_batch_size",
        "seq_len",
        "steps",
        "enable_cpu_offload",
        "dtype",
        "gc_freq",
        "gc_debug",
    )
    return TrainingConfig(
        **{name: getattr(job.training, name) for name in same},
        max_norm=job.training.max_norm or math.inf,
        global_batch_size=resolve.global_batch_size(job, resolve.data_parallel_degree(job, world_size)),
        # Capture needs static addresses and no synchronisation with the host, which nothing here promises.
        disable_cuda_graphs=True,
    )


def _parallelism(job: JobConfig) -> ParallelismConfig:
    p = job.parallelism
    return ParallelismConfig(
        data_parallel_replicate_degree=p.data_parallel_replicate_degree,
        data_parallel_shard_degree=p.shard_degree,
        enable_fsdp_symm_mem=p.enable_fsdp_symm_mem,
        tensor_parallel_degree=p.tensor_parallel_degree,
        enable_sequence_parallel=p.enable_sequence_parallel,
        pipeline_parallel_degree=p.pipeline_parallel_degree,
        pipeline_parallel_microbatch_size=p.pipeline_parallel_microbatch_size,
        # Not the job's, which reaches the stages through the model spec: with this one torchtitan takes rank 0 to know the
        # loss, as here each rank does.
        pipeline_parallel_schedule="ZBVZeroBubble",
        context_parallel_degree=p.context_parallel_degree,
        expert_parallel_degree=p.expert_parallel_degree,
        # The other backends want modules that declare their sharding in torchtitan's own way.
        spmd_backend="partial_dtensor",
    )


def _checkpoint(job: JobConfig) -> CheckpointManager.Config:
    initial = resolve.published_folder(job) or job.checkpoint.initial_load_path
    adapter = job.checkpoint.initial_adapter_path
    values, template = job_values(job), None
    if job.checkpoint.last_save_in_hf:  # a job with several is refused
        template = next(iter(chat_templates_of(values)), None)
    return CheckpointManager.Config(
        **vars(job.checkpoint)
        | {
            "initial_load_path": initial and str(Path(initial).absolute()),
            "initial_adapter_path": adapter and str(Path(adapter).absolute()),
            # Without a path it has no effect, and torchtitan warns that it is set: it is its default.
            "initial_load_model_only": initial is not None and job.checkpoint.initial_load_model_only,
            "job": values,
            "restarted": restarted(os.environ),
            "hf_config": resolve.hf_config(job),
            "tokenizer": resolve.tokenizer_path(job),
            # Read now: the file may change while the job runs.
            "chat_template": template and Path(template).read_text(encoding="utf-8"),
        }
    )


def validation_loaders(job: JobConfig, world_size: int) -> dict[str, TextDataLoader.Config]:
    """Return the loader of each source of the validation data, by its title."""
    apart = documents.are_apart(job, documents.keyword(job, resolve.hf_config(job)))
    data = resolve.validation_data(job)
    return {
        source.title: _validation_loader(job, data._replace(sources=(source,)), world_size, apart=apart)
        for source in data.sources
    }


def _validation_loader(
    job: JobConfig, data: resolve.DataSettings, world_size: int, *, apart: bool
) -> TextDataLoader.Config:
    # torchtitan makes it endless where `steps` are counted. A pipeline reads it by micro batches.
    loader = _dataloader(job, data, job.validation.dataloader, apart=apart, infinite=False)
    batch = data.local_batch_size * resolve.data_parallel_degree(job, world_size)
    return replace(loader, global_batch_size=batch)


def _validator(job: JobConfig, world_size: int, *, apart: bool) -> Validator.Config:
    v, data = job.validation, resolve.validation_data(job)
    return Validator.Config(
        enable=v.enable,
        freq=v.freq,
        steps=v.steps,
        dataloader=_validation_loader(job, data, world_size, apart=apart),
        own_batch_size=data.local_batch_size,
        own_seq_len=data.seq_len,
        unshard=v.unshard,
    )
