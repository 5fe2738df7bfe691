"""FSDP2 that gathers weights in float8: a quarter of float32's bytes, half of bfloat16's.

torchao makes each converted weight a tensor that FSDP2 casts before its all-gather, and hands to the product as it
arrives. Its scale must be the whole weight's: computed before (`scales`), or reduced in each gather.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanplans.split.parameters.shards import as_shard_of
from titanplans.torch_private.dtensor import local_tensor
from titanplans.torch_private.fsdp import DefaultAllGather
from titanplans.torch_private.modules import on_state_dict
from titanplans.torch_private.torchao import is_float8_gathered, stored_weight


def gather_in_float8(model: nn.Module) -> None:
    """Let `model`, sharded by `fsdp.shard` and converted with `enable_fsdp_float8_all_gather`, gather its weights in float8.

    Its state dict has the weights as they are stored, in high precision, as tensors that anybody can read.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_Bytes())
    on_state_dict(model, _unwrap)


def _unwrap(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, tensor in state.items():
        if is_float8_gathered(tensor):
            state[name] = as_shard_of(tensor, stored_weight(local_tensor(tensor)))


class _Bytes(DefaultAllGather):
    """An all-gather of bytes, which every backend knows; gloo has no float8."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        out, shard = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (output_tensor, input_tensor))
        return super().__call__(out, shard, group, async_op)
