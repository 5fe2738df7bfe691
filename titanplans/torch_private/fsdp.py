"""FSDP2: the state of a sharded module."""

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

__all__ = [
    "DefaultAllGather",
    "fsdp_group",
    "settle_fsdp_root",
]


def fsdp_group(module: FSDPModule) -> Any:
    """Return the FSDPParamGroup of `module`, or None if it manages no parameter."""
    return module._get_fsdp_state()._fsdp_param_group


def settle_fsdp_root(module: FSDPModule) -> bool:
    """Let FSDP2 settle which modules are in the model whose root is `module`; return whether `module` is a root."""
    state = module._get_fsdp_state()
    state._lazy_init()  # nothing if it was done
    return bool(state._is_root)
