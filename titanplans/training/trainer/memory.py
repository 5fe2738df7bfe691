"""`check_memory`: whether a job fits into memory, as far as arithmetic alone can say.

What is counted is there at once, whatever the kernels do. Activations, gathered units, copies and the libraries come on top:
a job that passes may still run out of memory.
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
"""Bytes of a token in a batch: its id, its label and its position are int64."""

_EVENT = 512
"""Bytes of an event in the flight recorder, at least: `Entry` in torch's FlightRecorder.hpp, without its stack."""

_PROCESS = 2**25
"""Least bytes of a process's own: the forked pages that it writes to, and its heap."""

_LARGE = 0.5
"""The share of the memory from which on the log states the job's need."""

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """What takes memory in each process."""

    bytes: int
    keys: str
    """The keys that determine it, with values."""
    what: str
    remedy: str


def check_memory(job: JobConfig, model: PreTrainedModel, world_size: int, device_type: str) -> None:
    """Refuse a job that needs more memory than the machine has; log a need that is large. `model` has its adapters.

    Raises:
        ConfigError: with its least need, the machine's memory, the largest part and the remedy.
    """
    # torchrun says how many are on this machine; without it all are, or who started this one says nothing.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1 if "RANK" in os.environ else world_size))
    host, device = [_batches(job, world_size), *_beside_tensors(job)], [_logits(job, model)]
    (host if job.training.enable_cpu_offload else device).append(_weights(job, model, world_size))
    if device_type == "cuda":
        _check(device, 1, "each GPU has", torch.device("cuda", 0))
    else:
        host += device
    _check(host, processes, "this machine has", torch.device("cpu"))


def _check(parts: list[Part], processes: int, whose: str, device: torch.device) -> None:
    there, needed = memory(device), processes * sum(part.bytes for part in parts)
    most = max(parts, key=lambda part: part.bytes)
    where = f"{processes} processes" if processes > 1 else "one process"
    said = (
        f"{most.keys}: the job needs at least {_gb(needed)} of memory in {where}, {_gb(processes * most.bytes)} of it for "
        f"{most.what}, and {whose} {_gb(there)}"
    )
    if needed > there:
        raise ConfigError(f"{said}: {most.remedy}")
    if needed > _LARGE * there:
        logger.info(said)


def _weights(job: JobConfig, model: PreTrainedModel, world_size: int) -> Part:
    p, o = job.parallelism, job.optimizer
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    split = 1 if p.data_parallel_strategy == "ddp" else world_size // p.data_parallel_replicate_degree
    kept = 2 if job.training.dtype == "bfloat16" else 4
    moment = 2 if o.implementation == "fused_opt_states_bf16" else kept
    # Of a weight in NF4 the codes are bytes, and the scales bfloat16, whatever the others are kept in.
    stored = sum(p.numel() * min(kept, p.itemsize) for p in parameters)
    in_muon = sum(
        parameter.numel()
        for group in group_parameters(model, o)
        if group.optimizer == "Muon"
        for parameter in group.parameters.values()
    )
    moments = f"Muon's momentum of {in_muon:,} of them, AdamW's" if in_muon else f"{o.name}'s"
    what = f"{count:,} parameters, and of the {trained:,} that train gradients and {moments} two moments"
    return Part(
        (stored + trained * (kept + 2 * moment) - in_muon * moment) // split,
        f'{" ".join(resolve.model_name(job))}, training.dtype = "{job.training.dtype}"',
        what + (f", split among {split}" if split > 1 else ""),
        "use a smaller model, or more processes to split it over (data_parallel_shard_degree, tensor_parallel_degree)",
    )


def _logits(job: JobConfig, model: PreTrainedModel) -> Part:
    """The logits of a batch, or of a chunk, in the type that the layers compute in; loss parallel leaves them split."""
    p, t = job.parallelism, job.training
    most = job.loss.chunk_tokens
    fused = job.loss.fused is not False
    vocab_size = model.config.get_text_config().vocab_size
    split = 1 if p.disable_loss_parallel and not fused else p.tensor_parallel_degree
    own = p.context_parallel_degree  # tokens are cut
    size = 2 if "bfloat16" in (t.mixed_precision_param, t.dtype) else 4
    section, data = max(_data(job), key=lambda item: item[1].local_batch_size * item[1].seq_len)
    piped = p.pipeline_parallel_degree > 1  # whose last stage has the logits of one micro batch
    rows = p.pipeline_parallel_microbatch_size if piped else data.local_batch_size
    tokens = rows * -(data.seq_len // -own)
    if fused and tokens > most:
        keys, what = f"loss.chunk_tokens = {most}", "the logits of a chunk"
        return Part(most * vocab_size * size // split, keys, f"{what} over {vocab_size:,} tokens", "lower it")
    return Part(
        tokens * vocab_size * size // split,
        f"{section}.local_batch_size = {data.local_batch_size}, seq_len = {data.seq_len}",
        f"the logits of a batch over {vocab_size:,} tokens",
        "lower one of the two (gradient_accumulation_steps keeps the sequences of a step)",
    )


def _batches(job: JobConfig, world_size: int) -> Part:
    """The batches of a step: all are read before the first is computed."""
    t, data_parallel = job.training, resolve.data_parallel_degree(job, world_size)
    sequences = resolve.global_batch_size(job, data_parallel) // data_parallel
    key = "gradient_accumulation_steps" if t.global_batch_size == -1 else "global_batch_size"
    trained = Part(
        sequences * t.seq_len * _TOKEN,
        f"training.{key} = {show(getattr(t, key))}, local_batch_size = {t.local_batch_size}, seq_len = {t.seq_len}",
        "the tokens of a step",
        "lower one of them",
    )
    section, data = _data(job)[-1]
    validated = Part(
        data.local_batch_size * data.seq_len * _TOKEN,
        f"{section}.local_batch_size = {data.local_batch_size}, seq_len = {data.seq_len}",
        "the tokens of a batch",
        "lower one of the two",
    )
    return max(trained, validated, key=lambda part: part.bytes)


def _beside_tensors(job: JobConfig) -> list[Part]:
    events, p = resolve.trace_buf_size(job), job.parallelism
    workers = {"training.dataloader.num_workers": job.training.dataloader.num_workers}
    if job.validation.enable:
        workers["validation.dataloader.num_workers"] = job.validation.dataloader.num_workers
    most = max(workers, key=lambda key: workers[key])
    axes = ("tensor_parallel", "context_parallel", "data_parallel_shard", "data_parallel_replicate")
    degrees = {f"{axis}_degree": getattr(p, f"{axis}_degree") for axis in axes}
    said = ", ".join(f"{key} = {degree}" for key, degree in degrees.items() if degree > 1)
    recorder = "the events of the flight recorder", "lower it; 0 switches the recorder off"
    return [
        Part(events * _EVENT, f"comm.trace_buf_size = {events}", *recorder),
        Part(
            sum(workers.values()) * _PROCESS,
            f"{most} = {workers[most]}",
            "the processes that read data",
            "lower it",
        ),
        Part(
            _PROCESS,
            f"parallelism.{said}" if said else "this job",
            "the processes themselves",
            "lower a degree",
        ),
    ]


def _data(job: JobConfig) -> list[tuple[str, resolve.DataSettings]]:
    validation = [("validation", resolve.validation_data(job))] if job.validation.enable else []
    return [("training", resolve.training_data(job)), *validation]


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
