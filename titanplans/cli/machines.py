"""The options --gpu, --nodes and --hardware of commands that forecast a job."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from titanplans.config import JobConfig
from titanplans.config.values import PositiveInt, from_text

if TYPE_CHECKING:
    from titanplans.foresight.hardware import Gpu


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command's parser."""
    parser.add_argument("--gpu", default="H100", help="name of the GPU; default: H100")
    parser.add_argument(
        "--nodes",
        metavar="N",
        help="number of machines, all of whose GPUs are used; default: as many GPUs as the product of the degrees. If the "
        "shard degree is -1: the fewest machines whose number of GPUs is a multiple of the product of the other degrees",
    )
    add_hardware_option(parser)


def add_hardware_option(parser: argparse.ArgumentParser) -> None:
    """Add --hardware alone."""
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="TOML file with GPUs of your own")


def gpu_of(options: argparse.Namespace) -> "Gpu":
    """Return the GPU that the options name.

    Raises:
        ConfigError: there is no such GPU, or the file of --hardware can't be used.
    """
    from titanplans.foresight.hardware import find_gpu

    return find_gpu(options.gpu, options.hardware)


def world_size_of(job: JobConfig, options: argparse.Namespace, gpu: "Gpu") -> int:
    """Return the number of GPUs that `job` runs on.

    Raises:
        ConfigError: --nodes is not a positive number, or the degrees don't multiply to the number of GPUs.
    """
    from titanplans.training.job.resolve import data_parallel_degree, fewest_processes

    if options.nodes is not None:
        world_size = from_text(options.nodes, PositiveInt, "--nodes") * gpu.gpus_per_node
    elif job.parallelism.shard_degree == -1:
        world_size = math.lcm(fewest_processes(job), gpu.gpus_per_node)
    else:
        world_size = fewest_processes(job)
    data_parallel_degree(job, world_size)  # refuses degrees that don't multiply to it
    return world_size
