"""`check_memory`: compute a lower bound on a job's memory, without running it.

The bound counts memory that is certainly allocated at the same time: weights, gradients, moments, logits, batches.
Activations, gathered parameters, copies and the libraries need more, so a job that passes the check may still run out of
memory.
"""

import logging
import os
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from titanplans.config import ConfigError, JobConfig
from titanplans.parallel.memory import memory
from titanplans.parallel.optimizers.build import group_parameters
from titanplans.text import show
from titanplans.training.job import resolve

_TOKEN = 24
"""Bytes of a token in a batch: id, label and position are int64."""

_EVENT = 512
"""Minimum bytes of an event in the flight recorder: `Entry` in torch's FlightRecorder.hpp, without its stack."""

_PROCESS = 2**25
"""Minimum bytes that a process does not share with its parent: the forked pages that it writes to, and its heap."""

_LOG_FRACTION = 0.5
"""If a job needs more than this fraction of the memory, the log says so."""

logger = logging.getLogger(__name__)


class MemoryUse(NamedTuple):
    """An item that takes memory in each process."""

    bytes: int
    options: str
    """The options that determine the size, with their values."""
    item: str
    remedy: str


def check_memory(job: JobConfig, model: PreTrainedModel, world_size: int, device_type: str) -> None:
    """Refuse a job that needs more memory than the machine or GPU has; log if the need is large.

    Args:
        job: a job that has passed the other checks.
        model: the job's model on meta, with its adapters.
        world_size: number of ranks.
        device_type: "cuda" for GPU memory; otherwise everything is counted as host memory.

    Raises:
        ConfigError: names the memory needed and available, the largest item and the remedy.
    """
    # torchrun sets LOCAL_WORLD_SIZE, the number of processes on this machine. A launcher that sets only RANK does not say
    # how many there are: count one. If neither is set, our launcher will start all processes here.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1 if "RANK" in os.environ else world_size))
    host, device = [_batches(job, world_size), *_host_overhead(job)], [_logits(job, model)]
    (host if job.training.enable_cpu_offload else device).append(_weights(job, model, world_size))
    if device_type == "cuda":
        _check(device, 1, "each GPU has", torch.device("cuda", 0))
    else:
        host += device
    _check(host, processes, "this machine has", torch.device("cpu"))


def _check(uses: list[MemoryUse], processes: int, owner: str, device: torch.device) -> None:
    available, needed = memory(device), processes * sum(use.bytes for use in uses)
    largest = max(uses, key=lambda use: use.bytes)
    where = f"{processes} processes" if processes > 1 else "one process"
    message = (
        f"{largest.options}: the job needs at least {_gb(needed)} of memory in {where}, "
        f"{_gb(processes * largest.bytes)} of it for {largest.item}, and {owner} {_gb(available)}"
    )
    if needed > available:
        raise ConfigError(f"{message}: {largest.remedy}")
    if needed > _LOG_FRACTION * available:
        logger.info(message)


def _weights(job: JobConfig, model: PreTrainedModel, world_size: int) -> MemoryUse:
    p, o = job.parallelism, job.optimizer
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    ranks = 1 if p.data_parallel_strategy == "ddp" else world_size // p.data_parallel_replicate_degree
    weight_bytes = 2 if job.training.dtype == "bfloat16" else 4
    moment_bytes = 2 if o.implementation == "fused_opt_states_bf16" else weight_bytes
    # An NF4 weight has codes of one byte and bfloat16 scales, whatever training.dtype is.
    stored = sum(p.numel() * min(weight_bytes, p.itemsize) for p in parameters)
    in_muon = sum(
        parameter.numel()
        for group in group_parameters(model, o)
        if group.optimizer == "Muon"
        for parameter in group.parameters.values()
    )
    # Muon has one moment per parameter, AdamW has two.
    moments = f"Muon's momentum (for {in_muon:,} of them) or AdamW's" if in_muon else f"{o.name}'s"
    item = f"{count:,} parameters, and, for the {trained:,} that train, gradients and {moments} two moments"
    return MemoryUse(
        (stored + trained * (weight_bytes + 2 * moment_bytes) - in_muon * moment_bytes) // ranks,
        f'{" ".join(resolve.model_name(job))}, training.dtype = "{job.training.dtype}"',
        item + (f", split among {ranks}" if ranks > 1 else ""),
        "use a smaller model, or more processes to split it over (data_parallel_shard_degree, tensor_parallel_degree)",
    )


def _logits(job: JobConfig, model: PreTrainedModel) -> MemoryUse:
    """Return the memory of the logits of a batch, or of a chunk of tokens if the loss may be fused."""
    p, t = job.parallelism, job.training
    chunk_tokens = job.loss.chunk_tokens
    may_fuse = job.loss.fused is not False
    vocab_size = model.config.get_text_config().vocab_size
    # With loss parallelism or a fused loss, each TP rank has the logits of its shard of the vocabulary.
    vocab_ranks = 1 if p.disable_loss_parallel and not may_fuse else p.tensor_parallel_degree
    itemsize = 2 if "bfloat16" in (t.mixed_precision_param, t.dtype) else 4
    section, data = max(_data(job), key=lambda item: item[1].local_batch_size * item[1].seq_len)
    # A pipeline's last stage has the logits of one micro batch. A CP rank has the logits of its slice of each sequence.
    has_pipeline = p.pipeline_parallel_degree > 1
    sequences = p.pipeline_parallel_microbatch_size if has_pipeline else data.local_batch_size
    tokens = sequences * -(data.seq_len // -p.context_parallel_degree)
    if may_fuse and tokens > chunk_tokens:
        return MemoryUse(
            chunk_tokens * vocab_size * itemsize // vocab_ranks,
            f"loss.chunk_tokens = {chunk_tokens}",
            f"the logits of a chunk over {vocab_size:,} tokens",
            "lower it",
        )
    return MemoryUse(
        tokens * vocab_size * itemsize // vocab_ranks,
        f"{section}.local_batch_size = {data.local_batch_size}, seq_len = {data.seq_len}",
        f"the logits of a batch over {vocab_size:,} tokens",
        "lower one of the two (gradient_accumulation_steps keeps the sequences of a step)",
    )


def _batches(job: JobConfig, world_size: int) -> MemoryUse:
    """Return the memory of a step's batches, all of which are read before the first forward, or of a validation batch."""
    t, data_parallel = job.training, resolve.data_parallel_degree(job, world_size)
    sequences = resolve.global_batch_size(job, data_parallel) // data_parallel
    key = "gradient_accumulation_steps" if t.global_batch_size == -1 else "global_batch_size"
    training = MemoryUse(
        sequences * t.seq_len * _TOKEN,
        f"training.{key} = {show(getattr(t, key))}, local_batch_size = {t.local_batch_size}, seq_len = {t.seq_len}",
        "the tokens of a step",
        "lower one of them",
    )
    section, data = _data(job)[-1]
    evaluation = MemoryUse(
        data.local_batch_size * data.seq_len * _TOKEN,
        f"{section}.local_batch_size = {data.local_batch_size}, seq_len = {data.seq_len}",
        "the tokens of a batch",
        "lower one of the two",
    )
    return max(training, evaluation, key=lambda use: use.bytes)


def _host_overhead(job: JobConfig) -> list[MemoryUse]:
    events, p = resolve.trace_buf_size(job), job.parallelism
    workers = {"training.dataloader.num_workers": job.training.dataloader.num_workers}
    if job.validation.enable:
        workers["validation.dataloader.num_workers"] = job.validation.dataloader.num_workers
    largest = max(workers, key=lambda option: workers[option])
    axes = ("tensor_parallel", "context_parallel", "data_parallel_shard", "data_parallel_replicate")
    degrees = {f"{axis}_degree": getattr(p, f"{axis}_degree") for axis in axes}
    degrees_text = ", ".join(f"{option} = {degree}" for option, degree in degrees.items() if degree > 1)
    recorder = "the events of the flight recorder", "lower it; 0 switches the recorder off"
    return [
        MemoryUse(events * _EVENT, f"comm.trace_buf_size = {events}", *recorder),
        MemoryUse(
            sum(workers.values()) * _PROCESS,
            f"{largest} = {workers[largest]}",
            "the processes that read data",
            "lower it",
        ),
        MemoryUse(
            _PROCESS,
            f"parallelism.{degrees_text}" if degrees_text else "this job",
            "the processes themselves",
            "lower a degree",
        ),
    ]


def _data(job: JobConfig) -> list[tuple[str, resolve.DataSettings]]:
    validation = [("validation", resolve.validation_data(job))] if job.validation.enable else []
    return [("training", resolve.training_data(job)), *validation]


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
