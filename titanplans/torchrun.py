"""What torchrun tells each process in environment variables, read and checked in one place. Imports no torch."""

from collections.abc import Mapping
from typing import NamedTuple

from titanplans.errors import ParallelError

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_VARIABLES = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")
_MOST = 2**31 - 1
"""What torch keeps a rank in."""


class Ranks(NamedTuple):
    """This process among the others."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def read_ranks(environ: Mapping[str, str]) -> Ranks | None:
    """Return what torchrun's variables say, or None where none of them is set.

    LOCAL_WORLD_SIZE, which launchers other than torchrun leave out, counts as LOCAL_RANK + 1 where it is missing.

    Raises:
        ParallelError: they are set in part, are no numbers, or contradict each other.
    """
    there = [name for name in _VARIABLES if name in environ]
    missing = [name for name in _VARIABLES if name not in environ]
    if not there:
        return None
    if missing and missing != ["LOCAL_WORLD_SIZE"]:
        raise ParallelError(
            f"{', '.join(there)} set, but not {', '.join(missing)}: start with torchrun, which sets all six, "
            f"or unset {', '.join(there)} for a single process"
        )
    rank, world_size, local_rank = (_number(name, environ[name]) for name in _NUMBERS[:3])
    local_world_size = _number(_NUMBERS[3], environ.get(_NUMBERS[3], str(local_rank + 1)))
    for own, size, of, total in (
        ("RANK", "WORLD_SIZE", rank, world_size),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE", local_rank, local_world_size),
    ):
        if of >= total:
            raise ParallelError(f"{own} = {of} of {size} = {total}: ranks count from 0")
    if local_world_size > world_size:
        raise ParallelError(
            f"LOCAL_WORLD_SIZE = {local_world_size} of WORLD_SIZE = {world_size}: one machine has more processes than "
            "all together; start with torchrun, which sets both"
        )
    if not environ["MASTER_ADDR"].strip():
        raise ParallelError("MASTER_ADDR is empty: the name of the machine with rank 0, which torchrun sets")
    if _number("MASTER_PORT", environ["MASTER_PORT"]) > 65535:
        raise ParallelError(f"MASTER_PORT = {environ['MASTER_PORT']}: a port is a number up to 65535")
    return Ranks(rank, world_size, local_rank, local_world_size)


def restarted(environ: Mapping[str, str]) -> bool:
    """Whether a launcher, torchrun or ours, has started the ranks of this job before."""
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _number(name: str, text: str) -> int:
    # Not isdecimal alone: it takes digits of other scripts, too.
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= _MOST):
        raise ParallelError(f"{name} = {text!r}: torchrun sets a whole number")
    return int(text)
