"""Contradictions between the sections of a job."""

import math
from typing import Any

from titanplans.config.compatibility.strategy import (
    NO_CAPACITY,
    NOTHING_IS_SPLIT,
    async_tensor_parallel,
    no_float8,
)
from titanplans.config.options import Refusals, default, fields, get, needs
from titanplans.config.sections.parallelism import DDP, FSDP2, MixedPrecision, Offload
from titanplans.errors import near_multiples

STRATEGY = "parallelism.data_parallel_strategy"
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Pipeline schedules that compute the gradients of weights later than the gradients of inputs."""


WITHOUT_STAGES = (
    "parallelism.fsdp_defer_grad_sync",
    "parallelism.fsdp_keep_gathered",
    "checkpoint.initial_adapter_path",
    "training.enable_cpu_offload",
    "validation.unshard",
)
"""Options that pipeline stages do not support, e.g. because torch sums the gradients of all micro batches at once."""


def schedule_steps(job: Any) -> int:
    """Return the length of the learning-rate schedule in steps: by default the steps of the run, but at least the
    warm-up."""
    return job.lr_scheduler.total_steps or max(job.training.steps, job.lr_scheduler.warmup_steps)


def refusals(job: Any) -> Refusals:
    """Yield the contradictions between the sections of a job."""
    yield from _parallelism(job)
    yield from pipeline(job)
    yield from _data(job)
    yield from _schedule(job)
    yield from _weights(job)


def _parallelism(job: Any) -> Refusals:
    p = job.parallelism
    if p.data_parallel_strategy == "megatron_fsdp":
        yield (
            STRATEGY,
            "it is not supported in a job, since torchtitan's trainer can't initialise and save its wrapper; use "
            '"fsdp2", or ParallelManager(MegatronFSDPConfig()) in your own loop',
        )
    # Options that a strategy does not have. Under DDP, mixed_precision_param is autocast.
    yield from needs(job, STRATEGY, ("ddp",), *(f"ddp.{name}" for name in fields(DDP)))
    of_training = [name for name in fields(Offload, MixedPrecision) if name != "mixed_precision_param"]
    of_fsdp2 = [f"parallelism.{name}" for name in (*fields(FSDP2), "tensor_parallel_degree")]
    of_fsdp2 += [f"training.{name}" for name in of_training]
    yield from needs(job, STRATEGY, ("fsdp2",), *of_fsdp2, "validation.unshard")
    if p.data_parallel_strategy == "ddp" and p.data_parallel_shard_degree > 1:
        yield (
            "parallelism.data_parallel_shard_degree",
            f'DDP replicates the full model and shards nothing; use {STRATEGY} = "fsdp2" with '
            "data_parallel_replicate_degree for the replicas, or remove this key",
        )
    degree, context = p.tensor_parallel_degree, p.context_parallel_degree
    experts = p.expert_parallel_degree
    if job.model.plan is not None and degree == context == experts == 1:
        yield "model.plan", f"parallelism.{NOTHING_IS_SPLIT}"
    if job.model.derive and degree == context == experts == 1:
        yield "model.derive", f"parallelism.{NOTHING_IS_SPLIT}"
    if experts > 1 and experts % degree:
        yield (
            "parallelism.expert_parallel_degree",
            f"it is not a multiple of tensor_parallel_degree = {degree}, whose ranks have the same tokens; "
            f"{near_multiples(experts, degree)} would work",
        )
    if experts == 1 and p.expert_capacity_factor is not None:
        yield "parallelism.expert_capacity_factor", NO_CAPACITY
    if experts > 1 and p.data_parallel_strategy == "ddp":
        yield (
            "parallelism.expert_parallel_degree",
            f'DDP replicates the full model and shards nothing; use {STRATEGY} = "fsdp2", or remove this key',
        )
    yield from _length(p, job.training.seq_len)
    if context > 1 and job.quantize.linear.float8.recipe_name is not None:
        yield "quantize.linear.float8.recipe_name", no_float8(context)
    splits = {"tensor_parallel_degree above 1": degree > 1}
    yield from async_tensor_parallel("parallelism.enable_async_tensor_parallel", p, job.compile, **splits)


def _length(p: Any, length: int) -> Refusals:
    """Refuse a sequence length that sequence and context parallelism can't split evenly. Validation accepts any length."""
    degrees = {"tensor_parallel_degree": p.tensor_parallel_degree if p.enable_sequence_parallel else 1}
    degrees["context_parallel_degree"] = p.context_parallel_degree
    # torchtitan requires this factor, for the load balancing of its context parallelism.
    degrees["2"] = 2 if p.context_parallel_degree > 1 else 1
    multiple = math.prod(degrees.values())
    if length % multiple:
        product = " x ".join(name for name, degree in degrees.items() if degree > 1)
        without = "" if p.context_parallel_degree > 1 else ", or parallelism.enable_sequence_parallel = false"
        yield (
            "training.seq_len",
            f"it has to be a multiple of {product} = {multiple}, since a sequence is split evenly over ranks; "
            f"{near_multiples(length, multiple)} would work{without}",
        )


def pipeline(job: Any) -> Refusals:
    """Yield the contradictions of a job with pipeline parallelism."""
    p, batch = job.parallelism, job.training.local_batch_size
    size, schedule = p.pipeline_parallel_microbatch_size, p.pipeline_parallel_schedule
    if p.pipeline_parallel_degree == 1:
        return
    if p.data_parallel_strategy == "ddp":
        yield (
            "parallelism.pipeline_parallel_degree",
            f'DDP replicates the full model and shards nothing; use {STRATEGY} = "fsdp2", or remove this key',
        )
    for option in WITHOUT_STAGES:
        if get(job, option) != default(job, option):
            yield option, "pipeline stages do not support it; remove this key"
    batches = {"training": batch}
    if job.validation.enable:
        batches["validation"] = job.validation.local_batch_size or batch
    for section, sequences in batches.items():
        if sequences % size:
            yield (
                f"{section}.local_batch_size",
                f"{sequences} is not a multiple of parallelism.pipeline_parallel_microbatch_size = {size}; "
                f"{near_multiples(sequences, size)} would work",
            )
    if p.pipeline_parallel_layers_per_stage is not None and p.pipeline_parallel_split_points:
        yield (
            "parallelism.pipeline_parallel_layers_per_stage",
            "pipeline_parallel_split_points already defines the stages; remove one of the two",
        )
    if schedule in SPLIT_BACKWARD and job.compile.blocks:
        yield (
            "parallelism.pipeline_parallel_schedule",
            "it computes gradients of inputs and of weights separately, but the backward of a compiled block is one graph; "
            "use Interleaved1F1B, or set compile.enable = false",
        )
    mode, ac = job.activation_checkpoint.mode, job.activation_checkpoint
    keeps = mode == "keep_mixer" or (mode == "selective" and ac.selective_ac_option == "op")
    if schedule in SPLIT_BACKWARD and keeps:
        yield (
            "parallelism.pipeline_parallel_schedule",
            "it runs a backward in two passes, but torch returns a kept activation only once; use Interleaved1F1B, or set "
            'activation_checkpoint.mode = "full"',
        )
    if schedule in SPLIT_BACKWARD and (job.lora.rank is not None or job.training.freeze):
        yield (
            "parallelism.pipeline_parallel_schedule",
            "it computes gradients of weights separately, and these are wrong in torch if other weights are frozen; use "
            "Interleaved1F1B",
        )
    if schedule in SPLIT_BACKWARD and job.loss.fused:
        yield (
            "loss.fused",
            f"{schedule} runs a backward in two passes, but the head keeps its gradients for only one of them; "
            "remove this key, or use Interleaved1F1B",
        )
    if job.checkpoint.last_save_in_hf and job.lora.rank is not None:
        yield (
            "checkpoint.last_save_in_hf",
            "adapters of a pipeline's stages are not gathered; convert the last checkpoint with titanplans export",
        )


def _data(job: Any) -> Refusals:
    t = job.training
    tokens = t.local_batch_size * t.seq_len
    if job.quantize.linear.float8.recipe_name is not None and tokens % 16:
        yield (
            "training.local_batch_size",
            f"with training.seq_len = {t.seq_len} a batch has {tokens} tokens, but float8 needs a multiple of 16; "
            f"{near_multiples(tokens, 16)} tokens would work",
        )
    sources = job.data.sources
    templates = {each.chat.chat_template or "the tokenizer's" for each in sources if each.chat.enable}
    if job.checkpoint.last_save_in_hf and len(templates) > 1:
        yield (
            "checkpoint.last_save_in_hf",
            f"its folder has one chat template, but the sources have {' and '.join(sorted(templates))}; set the same for "
            "all, or convert the last checkpoint with titanplans export --chat-template",
        )
    for key in ("dataset", "dataset_path", "dataset_split", "text_column", "chat.enable"):
        if sources and get(t, key) != default(t, key):
            yield (
                f"training.{key}",
                "the data is set by [[data.sources]]; move it into one of them, or remove this key",
            )
    if t.epochs is not None and job.data.exhausted == "end":
        yield (
            "training.epochs",
            'data.exhausted = "end" already ends the job after one epoch; remove one of the two',
        )
    chats = [source.chat for source in sources] or [t.chat]
    if all(chat.enable for chat in chats):
        why = "each conversation is packed in full, and attends only to itself (see packing in its chat); remove this key"
        for key in ("documents", "packing"):
            if get(job.data, key) != default(job.data, key):
                yield f"data.{key}", why
    if any(chat.enable for chat in chats) and job.validation.text_column is not None:
        yield (
            "validation.text_column",
            "validation reads conversations, too; remove this key",
        )
    for loader in ("training.dataloader", "validation.dataloader"):
        why = f"has no effect unless {loader}.num_workers is above 0; raise it or remove this key"
        for key in ("persistent_workers", "prefetch_factor"):
            if get(job, f"{loader}.{key}") and get(job, f"{loader}.num_workers") == 0:
                yield f"{loader}.{key}", why


def _schedule(job: Any) -> Refusals:
    s, steps, length = job.lr_scheduler, job.training.steps, schedule_steps(job)
    if length < steps:
        yield (
            "lr_scheduler.total_steps",
            f"it ends before training.steps = {steps}, so the learning rate would become negative; set it to at least "
            f"{steps}, or remove this key",
        )
    if s.warmup_steps > length:
        why = f"it is longer than lr_scheduler.total_steps = {length}; lower it, or raise total_steps"
        yield "lr_scheduler.warmup_steps", why
    decay = round(length * (s.decay_ratio or 0))
    if s.decay_ratio is not None and s.warmup_steps + decay > length:
        yield (
            "lr_scheduler.decay_ratio",
            f"its {decay} steps and lr_scheduler.warmup_steps = {s.warmup_steps} exceed the schedule's {length}; "
            "lower one of them, or set lr_scheduler.total_steps to the length of the run",
        )
    compiled = job.compile.enable and "optimizer" in job.compile.components
    if compiled and "Muon" in (job.optimizer.name, *(group.name for group in job.optimizer.groups)):
        why = 'the step of Muon communicates between its products, and can\'t be compiled; remove "optimizer"'
        yield "compile.components", why
    if compiled and job.optimizer.implementation.startswith("fused"):
        yield (
            "optimizer.implementation",
            'it is one kernel and needs no compilation; set it to "foreach", or remove "optimizer" from '
            "compile.components",
        )


def _weights(job: Any) -> Refusals:
    c = job.checkpoint
    for key in ("initial_adapter_path", "save_adapters_only"):
        if getattr(c, key) and job.lora.rank is None:
            yield f"checkpoint.{key}", "has no effect unless lora.rank is set; set it or remove this key"
    if c.initial_load_in_hf and c.initial_load_path is None and job.model.hf_assets_path is None:
        why = "it needs a folder; set checkpoint.initial_load_path or model.hf_assets_path"
        yield "checkpoint.initial_load_in_hf", why
