"""`titanplans estimate --measure`: measure the GPUs of this machine, and write them as a table for --hardware."""

import argparse
import os
import shlex
import sys
from functools import partial
from pathlib import Path

from titanplans.disk import write_atomically
from titanplans.errors import ConfigError, RunError, UserError
from titanplans.text import counted
from titanplans.torchrun import Ranks, read_ranks
from titanplans.training.launch.exit_status import refuse


def parser() -> argparse.ArgumentParser:
    """Return the parser of `titanplans estimate --measure`."""
    parser = argparse.ArgumentParser(
        prog="titanplans estimate --measure",
        usage="titanplans estimate --measure [--output cluster.toml]",
        description="Measure the GPUs of this machine, with one process per GPU, or under torchrun the GPUs of several "
        "machines, and print a table for --hardware. No other program should use the GPUs meanwhile.",
        epilog="exit status: 0 measured, 1 a rank failed, 2 it can't be measured",
        allow_abbrev=False,
    )
    add_measure_options(parser)
    return parser


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command's parser."""
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine's GPUs instead of estimating a job, and print a table for --hardware",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="with --measure: the TOML file to write")


def main(argv: list[str]) -> int:
    """Run the command with these arguments and return the exit status.

    Raises:
        UserError: there is no GPU, or the file can't be written.
    """
    options = parser().parse_args(argv)
    if not options.measure:
        raise ConfigError(
            f"--output {options.output}: this is the file of --measure; add --measure, or use >"
        )
    check_output(options.output)
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"--measure: torch {torch.__version__} finds no GPU of CUDA or ROCm to measure; run the command on a machine "
            "that has one, or write its table by hand (docs/estimate.md)"
        )
    # MASTER_ADDR and MASTER_PORT do not count, since cluster scripts export them even without torchrun.
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & os.environ.keys():
        return measure_rank(options.output)
    from titanplans.training.launch.launcher import launch_function

    return launch_function(partial(measure_rank, options.output), torch.cuda.device_count())


def check_output(file: Path | None) -> None:
    """Raise a ConfigError if `file` exists, or if --hardware can't read a file of this name."""
    if file is not None and file.suffix != ".toml":
        raise ConfigError(
            f"--output {file}: --hardware reads files whose names end in .toml; name it {file.stem}.toml"
        )
    if file is not None and file.exists():
        raise ConfigError(
            f"--output {file}: it exists, and may have other GPUs; name another file, or remove it"
        )


def measure_rank(file: Path | None) -> int:
    """Measure as one rank; on rank 0 write the table into `file`, or print it. Return the exit status."""
    import torch

    from titanplans.foresight.measure import as_toml, device_keys, measure
    from titanplans.parallel.mesh.process_group import process_group

    rank = (read_ranks(os.environ) or Ranks()).rank
    try:
        with process_group() as process:
            name = torch.cuda.get_device_name(process.device)
            keys = measure(process, name) | device_keys(process.device)
        if rank == 0:
            machines = counted(process.world_size // process.local_world_size, "machine")
            title = (
                f"Measured by `titanplans estimate --measure` with torch {torch.__version__} on {machines}"
            )
            text = as_toml(name, keys, title)
            if file is None:
                print(text, end="")
            else:
                write_atomically(file, text)
                print(f"{file}: use it with --hardware {file} --gpu {shlex.quote(name)}", file=sys.stderr)
    except (UserError, RunError) as error:
        return refuse(error, rank)
    return 0
