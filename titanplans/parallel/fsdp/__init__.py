"""FSDP2, and HSDP over a 2-D mesh. Start at `shard`.

`units` finds the modules that are gathered together; `sharding` shards a decoder by these units, and `conditions` any model
by the caller's conditions; `gradient_sync` is for gradient accumulation and evaluation.
"""

from titanplans.parallel.fsdp.conditions import shard_model
from titanplans.parallel.fsdp.dtypes import split_dtypes
from titanplans.parallel.fsdp.sharding import check_shard, shard, shard_size
from titanplans.parallel.fsdp.units import FSDPUnit, find_units

__all__ = [
    "FSDPUnit",
    "check_shard",
    "find_units",
    "shard",
    "shard_model",
    "shard_size",
    "split_dtypes",
]
