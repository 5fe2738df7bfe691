"""FSDP2: the internal state of a sharded module."""

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

__all__ = [
    "DefaultAllGather",
    "fsdp_group",
    "settle_fsdp_root",
]


def fsdp_group(module: FSDPModule) -> Any:
    """Return the FSDPParamGroup of `module`; None if it manages no parameters."""
    return module._get_fsdp_state()._fsdp_param_group


def settle_fsdp_root(module: FSDPModule) -> bool:
    """Make FSDP2 initialize the states of the FSDP modules in `module`; return whether `module` is their root.

    FSDP2 does this in the first forward, whose module becomes the root.
    """
    state = module._get_fsdp_state()
    state._lazy_init()  # does nothing if it was called before
    return bool(state._is_root)
