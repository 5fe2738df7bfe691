"""`check_job`: check, before any rank starts, that a job can run on this machine with its data, model and checkpoint.

Before that, `titanplans.config.compatibility` has refused options that contradict each other.
"""

import json
import logging
import os
from collections.abc import Collection
from operator import attrgetter
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from titanplans import kernels, modeling
from titanplans.config import (
    ConfigError,
    DDPConfig,
    FSDP2Config,
    JobConfig,
    rename_option_errors,
    strategy_of,
)
from titanplans.errors import DataError
from titanplans.extras import is_installed, missing_library
from titanplans.loss import FusedLoss
from titanplans.modeling.user_model import is_user_model
from titanplans.parallel.mesh.process_group import default_device_type
from titanplans.parallel.optimizers.build import group_parameters
from titanplans.parallel.optimizers.load_balance import DEEPSEEK_V3_STEP_SIZE
from titanplans.parallel.parallelize import dry_run
from titanplans.plan.degrees import Degrees
from titanplans.split.decoder import has_fla_module, is_present
from titanplans.split.experts.loads import find_mixtures
from titanplans.split.guards.dropout import dropouts
from titanplans.split.stages.schedules import check_schedule
from titanplans.split.stages.stages import Stages
from titanplans.text import show
from titanplans.torchrun import restarted
from titanplans.training.checkpoint.folder import checkpoint_folder
from titanplans.training.checkpoint.manifest import damage
from titanplans.training.checkpoint.match import (
    check_finished,
    check_optimizer,
    check_saved,
    compared_fields,
    damaged,
    describe_model_changes,
)
from titanplans.training.checkpoint.resume import FOLDER_OPTION, decide_resume
from titanplans.training.data.chat.chat import ChatFormat
from titanplans.training.data.checks import check_dataset, read_position
from titanplans.training.data.vocabulary import check_tokenizer
from titanplans.training.job import repositories, resolve
from titanplans.training.job.derived import keep_derived_plan
from titanplans.training.job.outputs import check_outputs
from titanplans.training.pipeline.stage import check_stages_on_meta, stages_of
from titanplans.training.trainer import documents
from titanplans.training.trainer.memory import check_memory
from titanplans.user_code import import_module
from titanplans.weights.adapters import check_adapter
from titanplans.weights.folder import open_folder
from titanplans.weights.load import match_folder

_log = logging.getLogger(__name__)


def check_job(job: JobConfig, world_size: int) -> None:
    """Refuse a job that can't run on `world_size` processes like this one.

    Under torchrun every rank calls this function and comes to the same result. Ranks communicate only to wait for the rank
    that downloads weights from the Hugging Face Hub. With `model.derive` it may derive a plan first, which may take minutes.

    Raises:
        UserError: names the first fault: the option, its value and what would work.
    """
    strategy = strategy_of(job)
    data_parallel = resolve.data_parallel_degree(job, world_size)
    resolve.global_batch_size(job, data_parallel)
    device_type = default_device_type()
    check_device(job, device_type)
    if job.metrics.enable_wandb and not is_installed("wandb"):
        raise missing_library("wandb", "metrics.enable_wandb = true")
    check_outputs(job)
    import_custom(job)
    if (folder := resolve.hf_weights_folder(job)) is not None and not os.path.isdir(folder):
        raise ConfigError(
            f'{resolve.hf_weights_option(job)} = "{folder}" is not a directory, but checkpoint.initial_load_in_hf = true '
            "needs one"
        )
    # Cheap checks first: tokenizer and data take longer to read than the model's config.
    config = resolve.hf_config(job)
    tokens, notes = check_data(job)
    for note in notes:
        _log.info(note)
    kernels.install(device_type)  # without them some models can't be built on a CPU
    model = modeling.build(config)
    vocab_size = config.get_text_config().vocab_size
    if tokens > vocab_size:
        raise ConfigError(
            f'model.hf_assets_path = "{resolve.tokenizer_path(job)}" has {tokens} tokens, but '
            f"{' '.join(resolve.model_name(job))} has vocab_size = {vocab_size}; take the tokenizer that belongs to the "
            "model, or raise vocab_size in the model's config"
        )
    if job.lr_scheduler.warmup_steps > job.training.steps and job.lr_scheduler.total_steps is None:
        _log.info(
            f"lr_scheduler.warmup_steps = {job.lr_scheduler.warmup_steps} is more than training.steps = "
            f"{job.training.steps}: the learning rate does not reach optimizer.lr"
        )
    documents.check_documents(job, config)
    check_positions(job, model)
    keep_derived_plan(job, model)
    stages = check_pipeline(job, model)
    check_parallelism(job, strategy, model)
    if stages is not None:
        check_stages_train(stages, model)
    if job.loss.fused:
        FusedLoss(model)  # raises if the head can't compute the loss
    check_experts(job, model)
    # Raises for groups that match no parameter. `check_parallelism` has already added the adapters to the model.
    group_parameters(model, job.optimizer)
    check_memory(job, model, world_size, device_type)
    if job.checkpoint.create_seed_checkpoint and world_size != 1:
        raise ConfigError(
            f"checkpoint.create_seed_checkpoint = true needs 1 process, not {world_size}, since the weights are saved "
            "unsharded; start one process"
        )
    if job.checkpoint.enable:
        check_checkpoint(job, model, world_size)


def check_device(job: JobConfig, device_type: str) -> None:
    """Refuse options that need CUDA on another device, and async tensor parallelism without NCCL."""
    if device_type == "cuda":
        if job.parallelism.enable_async_tensor_parallel and not dist.is_nccl_available():
            raise ConfigError(
                "parallelism.enable_async_tensor_parallel = true needs NCCL, which this torch lacks; remove this key"
            )
        return
    only_cuda: dict[str, bool | str] = {
        "parallelism.enable_async_tensor_parallel": True,
        "parallelism.enable_fsdp_symm_mem": True,
        "profiling.enable_memory_snapshot": True,
        "checkpoint.async_mode": "async_with_pinned_mem",
        "optimizer.implementation": "fused_opt_states_bf16",
    }
    if device_type == "cpu":
        only_cuda["training.enable_cpu_offload"] = True
        # On a CPU, torch.autocast supports 16-bit dtypes only, and switches itself off for others.
        only_cuda["training.autocast_dtype"] = "float32"
    for key, value in only_cuda.items():
        if attrgetter(key)(job) == value:
            raise ConfigError(
                f"{key} = {show(value)} needs CUDA, but this machine trains on {device_type}; remove this key"
            )


def import_custom(job: JobConfig) -> None:
    """Import the user's module experimental.custom_import, which may register plans."""
    name = job.experimental.custom_import
    if name:
        import_module(name, f'experimental.custom_import = "{name}"', ConfigError)


def check_data(job: JobConfig) -> tuple[int, list[str]]:
    """Refuse data sets and a tokenizer that can't be read; return the vocabulary size, and lines to log."""
    tokenizer = resolve.tokenizer_path(job)
    vocab_size, notes = check_tokenizer(tokenizer), list[str]()
    settings = {"": resolve.training_data(job)}
    if job.validation.enable:
        settings["[validation] "] = resolve.validation_data(job)
    for section, data in settings.items():
        for source in data.sources:
            title = f"data.sources, {source.title}: " if job.data.sources else ""
            chat = ChatFormat(source.chat, tokenizer, data.seq_len) if source.chat.enable else None
            try:
                lines = check_dataset(source, tokenizer_path=tokenizer, seq_len=data.seq_len, chat=chat)
            except DataError as error:
                raise DataError(f"{section}{title}{error}") from None
            # If training and validation use the same split, their lines are equal: log one.
            notes += [line for line in (f"{title}{line}" for line in lines) if line not in notes]
            vocab_size = max(vocab_size, chat.vocabulary if chat else 0)
    return vocab_size, notes


def check_positions(job: JobConfig, model: PreTrainedModel) -> None:
    """Refuse sequences longer than the model's learned position embeddings; log if they exceed the limit in its config."""
    config, length = model.config.get_text_config(), job.training.seq_len
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and module.num_embeddings == positions != config.vocab_size:
                raise ConfigError(
                    f"training.seq_len = {length}: {name} has only {positions} learned positions; lower seq_len to "
                    f"{positions}, or train a model with more positions"
                )
        _log.info(
            f"training.seq_len = {length} exceeds the model's max_position_embeddings = {positions}, which stays in its "
            "config.json; [model.config_overrides] can change it, and the scaling of rope"
        )


def check_parallelism(job: JobConfig, strategy: FSDP2Config | DDPConfig, model: nn.Module) -> None:
    """Refuse a model that does not support the job's float8, adapters, plan, degrees or recomputation; see `dry_run`."""
    with rename_option_errors():
        p = job.parallelism
        degrees = Degrees(
            tp=p.tensor_parallel_degree, cp=p.context_parallel_degree, ep=p.expert_parallel_degree
        )
        dry_run(model, strategy, degrees, default_device_type())
    if default_device_type() == "cpu" and strategy.autocast_dtype is not None and has_fla_module(model):
        key = "autocast_dtype" if job.training.autocast_dtype else "mixed_precision_param"
        raise ConfigError(
            f'training.{key} = "{strategy.autocast_dtype}" means autocast here, which flash-linear-attention supports only '
            "on accelerators: on this CPU "
            + ('set it to "float32"' if key == "mixed_precision_param" else "leave it out")
        )


def check_pipeline(job: JobConfig, model: PreTrainedModel) -> Stages | None:
    """Return a job's pipeline stages, or None without a pipeline; refuse what the model or the schedule does not support."""
    p, batch = job.parallelism, job.training.local_batch_size
    if (ranks := p.pipeline_parallel_degree) == 1:
        return None
    # All ranks have the same seed, and a checkpoint holds one state of the generators for all ranks.
    dropout_options = [*dropouts(model)]
    if job.lora.rank is not None and job.lora.dropout:
        dropout_options.append(f"lora.dropout = {job.lora.dropout}")
    if dropout_options:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {ranks}: {dropout_options[0]}, but all stages would draw the same "
            "random numbers, and would draw other numbers after a resume; set it to 0"
        )
    with rename_option_errors():
        stages = stages_of(model, p, ranks, job.training.seq_len)
        batches = [batch, resolve.validation_data(job).local_batch_size] if job.validation.enable else [batch]
        for sequences in batches:
            microbatches = sequences // p.pipeline_parallel_microbatch_size
            check_schedule(p.pipeline_parallel_schedule, ranks, len(stages), microbatches)
        lengths = {job.training.seq_len}
        if job.validation.enable:
            lengths.add(resolve.validation_data(job).seq_len)
        for length in lengths:
            check_stages_on_meta(model, stages, length)
    return stages


def check_stages_train(stages: Stages, model: nn.Module) -> None:
    """Refuse a stage without trainable parameters, whose rank would have no optimizer."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for index, absent in enumerate(stages.absent):
        if not any(is_present(name, absent) for name in trained):
            raise ConfigError(
                f"training.freeze: nothing trains in stage {index} of {len(stages)}; set "
                "parallelism.pipeline_parallel_split_points so that each stage has parameters that train"
            )


def check_experts(job: JobConfig, model: PreTrainedModel) -> None:
    """Log how the model's router biases change; refuse load_balance_coeff for a model without router biases."""
    biases = [mixture for mixture in find_mixtures(model) if mixture.bias is not None]
    coefficient = job.optimizer.load_balance_coeff
    if coefficient is not None and not biases:
        raise ConfigError(
            f"optimizer.load_balance_coeff = {show(coefficient)}: no router of {' '.join(resolve.model_name(job))} has a "
            "bias that keeps its experts equally busy; leave it out"
        )
    if biases:
        step_size = DEEPSEEK_V3_STEP_SIZE if coefficient is None else coefficient
        change = (
            f"change by {step_size:g} per step (optimizer.load_balance_coeff)"
            if step_size
            else "are not changed (optimizer.load_balance_coeff = 0)"
        )
        _log.info(f"the biases that keep experts equally busy, in {len(biases)} routers, {change}")


def check_checkpoint(job: JobConfig, model: PreTrainedModel, world_size: int) -> None:
    """Refuse a checkpoint that is missing, belongs to another model, or can't be resumed from."""
    checkpoint, overrides = job.checkpoint, job.model.config_overrides or ()
    resume = decide_resume(job, checkpoint_folder(job), restarted=restarted(os.environ))
    is_own = resume.key == FOLDER_OPTION
    if not is_own and checkpoint.initial_adapter_path is not None:
        check_adapter(model, checkpoint.initial_adapter_path)
    if resume.source is None:
        return
    if resume.in_hf or (is_own and checkpoint.save_adapters_only):
        repositories.download_weights(job)  # last, since it may take hours
    if resume.in_hf:
        check_hf_folder(str(resume.source), model, overrides)
        return
    if not is_own and not os.path.isfile(resume.source / ".metadata"):
        is_hf_folder = os.path.isfile(resume.source / "config.json")
        hint = "; checkpoint.initial_load_in_hf = true loads a Hugging Face folder" if is_hf_folder else ""
        raise ConfigError(
            f'{resume.key} = "{resume.source}" is not a checkpoint (a folder step-N with .metadata){hint}'
        )
    resumes = resume.contents == "training"
    check_saved(resume.source, model, resume.key, resumes=resumes, overrides=() if is_own else overrides)
    if resume.is_finished:
        check_finished(resume.source, job)
    elif resumes:
        _check_resumed(job, model, world_size, resume.source, resume.key)


def _check_resumed(job: JobConfig, model: PreTrainedModel, world_size: int, saved: Path, key: str) -> None:
    """Refuse a checkpoint if the job can't continue from its position in the data or its optimizer state."""
    if "dataloader" not in job.checkpoint.exclude_from_loading:
        from titanplans.training.job.loaders import open_training_data  # which imports torchtitan

        documents_apart = documents.are_apart(job, documents.document_keyword(job, model.config))
        try:
            if position := read_position(saved):
                open_training_data(job, world_size, documents_apart=documents_apart, as_single_rank=False)[
                    0
                ].check_state(position)
        except (CheckpointException, json.JSONDecodeError):
            # A damaged file can cause many errors. The checksums, which take longer, tell which file it is.
            if (fault := damage(saved)) is not None:
                raise damaged(saved, key, fault) from None
            raise
    if "optimizer" not in job.checkpoint.exclude_from_loading:
        check_optimizer(saved, group_parameters(model, job.optimizer), key)


def check_hf_folder(folder: str, model: PreTrainedModel, overrides: Collection[str] = ()) -> None:
    """Refuse a Hugging Face folder that is damaged, or whose weights are another model's.

    Args:
        folder: the folder.
        model: the job's model; may be on meta.
        overrides: fields of the config that may differ.

    Raises:
        ConfigError: the folder's config.json differs from the job's model.
        ModelError: the folder is damaged, or tensors differ in names, shapes or dtypes (names them).
    """
    if not is_user_model(model.config) and os.path.exists(os.path.join(folder, "config.json")):
        folder_fields = compared_fields(modeling.load_config_file(folder))
        if differences := describe_model_changes(folder_fields, model.config, overrides, token_ids=False):
            raise ConfigError(
                f"the job's model differs from the model in {folder} ({differences}): remove model.name, flavor and config "
                "to use the folder's model; model.config_overrides can change lengths, rope and dropout"
            )
    match_folder(model, open_folder(folder))
