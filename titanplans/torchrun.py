"""`read_ranks`: read and check the environment variables that torchrun sets for each process. Imports no torch."""

from collections.abc import Mapping
from typing import NamedTuple

from titanplans.errors import ParallelError

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
VARIABLES = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")
"""The environment variables that say which rank of a job a process is."""
_MAX_RANK = 2**31 - 1
"""torch stores ranks in 32 bits."""


class Ranks(NamedTuple):
    """The ranks of this process, and the numbers of processes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def read_ranks(environ: Mapping[str, str]) -> Ranks | None:
    """Return the values of torchrun's variables; None if none of them is set.

    If only LOCAL_WORLD_SIZE is missing, as with some launchers other than torchrun, it counts as LOCAL_RANK + 1.

    Raises:
        ParallelError: only some are set, they are not numbers, or they contradict each other.
    """
    present = [name for name in VARIABLES if name in environ]
    missing = [name for name in VARIABLES if name not in environ]
    if not present:
        return None
    if missing and missing != ["LOCAL_WORLD_SIZE"]:
        raise ParallelError(
            f"{', '.join(present)} set, but not {', '.join(missing)}: start with torchrun, which sets all six, "
            f"or unset {', '.join(present)} for a single process"
        )
    rank, world_size, local_rank = (_parse_number(name, environ[name]) for name in _NUMBERS[:3])
    local_world_size = _parse_number(_NUMBERS[3], environ.get(_NUMBERS[3], str(local_rank + 1)))
    for rank_name, size_name, value, size in (
        ("RANK", "WORLD_SIZE", rank, world_size),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE", local_rank, local_world_size),
    ):
        if value >= size:
            raise ParallelError(f"{rank_name} = {value} of {size_name} = {size}: ranks count from 0")
    if local_world_size > world_size:
        raise ParallelError(
            f"LOCAL_WORLD_SIZE = {local_world_size} of WORLD_SIZE = {world_size}: one machine has more processes than "
            "all machines together; start with torchrun, which sets both"
        )
    if not environ["MASTER_ADDR"].strip():
        raise ParallelError(
            "MASTER_ADDR is empty: start with torchrun, which sets it to the machine of rank 0"
        )
    if _parse_number("MASTER_PORT", environ["MASTER_PORT"]) > 65535:
        raise ParallelError(f"MASTER_PORT = {environ['MASTER_PORT']}: a port is a number up to 65535")
    return Ranks(rank, world_size, local_rank, local_world_size)


def restarted(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun or our launcher has restarted the ranks of this job."""
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _parse_number(name: str, text: str) -> int:
    # isascii, as isdecimal also accepts digits of other scripts.
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= _MAX_RANK):
        raise ParallelError(f"{name} = {text!r}: torchrun sets a whole number")
    return int(text)
