"""The process group of a job's ranks, the meshes of its degrees, and their timeouts."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titanplans.config import JobConfig
from titanplans.parallel.mesh.mesh import Mesh
from titanplans.parallel.mesh.process_group import backend_for, start_process_group
from titanplans.plan.degrees import Degrees
from titanplans.training.job import resolve


def start_processes(job: JobConfig, device: torch.device) -> Mesh:
    """Initialise the process group, unless that has been done, and return the meshes of the job's degrees."""
    if not dist.is_initialized():
        _start_process_group(job, device)
    return Mesh(degrees_of(job), device.type)


def degrees_of(job: JobConfig) -> Degrees:
    """Return the degrees in [parallelism]."""
    p = job.parallelism
    return Degrees(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=p.shard_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree,
    )


def _start_process_group(job: JobConfig, device: torch.device) -> None:
    # As in torchtitan's trainer: a backward runs on the thread that called it, also on a GPU.
    torch.autograd.set_multithreading_enabled(False)
    comm, buffer_size = job.comm, resolve.trace_buf_size(job)
    # At the value 3, NCCL's watchdog does not abort collectives. A collective that timed out must not be aborted before the
    # flight recorder is written (pytorch #121055).
    os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_FR_BUFFER_SIZE": str(buffer_size)}
    if buffer_size:
        folder = Path(job.job.dump_folder, comm.save_traces_folder)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ |= {
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/{comm.save_traces_file_prefix}",
        }
    backend = backend_for(device.type, cpu_offload=job.training.enable_cpu_offload)
    start_process_group(backend, timedelta(seconds=comm.init_timeout_seconds))


def lower_timeouts(job: JobConfig, mesh: Mesh, device: torch.device) -> None:
    """Set the timeout of training steps on every process group. Called after the first step. Collective."""
    # Without the barrier, a fast rank would wait with the short timeout for a rank that still compiles.
    dist.barrier(device_ids=[device.index or 0] if device.type != "cpu" else None)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    mesh.set_timeout(timedelta(seconds=job.comm.train_timeout_seconds))
