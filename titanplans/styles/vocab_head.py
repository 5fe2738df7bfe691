"""`vocab_head()`: each rank has a shard of the vocabulary and of the logits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titanplans.split.border import Border
from titanplans.split.collectives import gather_replicated
from titanplans.split.costs import Call, ExpectedCollective, cost_of_enter
from titanplans.split.layout import Layout, shard_size
from titanplans.split.module_weight import with_locals_in_forward
from titanplans.split.state import specialise
from titanplans.styles.base import Operands, Site, SplitOver, Style, direct_parameters, map_input


class VocabHead(Style):
    """Shard the head's vocabulary, the rows of its weight [vocabulary, hidden].

        forward   all-gather over L (nothing without sequence parallelism), z_BLv = x_BLD @ W_vD.T
        backward  dx_BLD is partial: reduce-scatter over L (all-reduce without sequence parallelism); dW_vD is sharded as W

    With `loss_parallel` the logits [..., vocabulary] are a DTensor, `Shard(-1)`, for a loss on vocabulary shards.
    Otherwise they are gathered to a plain tensor that is full on every rank.
    """

    makes_logits = True

    def __init__(self, *, loss_parallel: bool):
        self.loss_parallel = loss_parallel

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        return Layout(Shard(0), Shard(0))

    def operands(self, degree: int) -> Operands | None:
        return Operands(outputs=True)

    def by_weights(self, module: nn.Module, site: Site) -> None:
        vocabulary = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
        specialise(module, with_locals_in_forward(type(module), tuple(direct_parameters(module))))
        hooks = _HeadHooks(self, site.border, vocabulary)
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True)
        module.register_forward_hook(hooks.leave)

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        return (cost_of_enter(call),)


class _HeadHooks:
    """The hooks of a head. Its input is the stream's shard, or the full hidden states if the stream has already ended."""

    def __init__(self, style: VocabHead, border: Border, vocabulary: int):
        self.style, self.border, self.vocabulary = style, border, vocabulary
        self.length = 0
        """Tokens of the full sequence in the current call."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_input(self._enter, self.style, "input", module, args, kwargs)

    def _enter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        border = self.border
        tokens, is_sharded = border.tokens, border.stream.is_sharded_at("head")
        if tokens.ranks > 1:
            length = hidden_states.shape[tokens.dim]
            self.length = length * border.stream.shards if is_sharded else length
        if is_sharded:
            return border.enter(hidden_states)
        # Without gathered logits, each CP rank computes the logits of its local tokens.
        if not border.stream.gathers_logits:
            hidden_states = tokens.take_local(hidden_states)
        return border.enter_full(hidden_states)

    def leave(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if getattr(type(output), "deferred", False):  # the loss is computed inside the head
            return output
        border, dim, tokens = self.border, output.ndim - 1, self.border.tokens
        gathers_all, meshes, sizes = border.stream.gathers_logits, border.meshes, {}
        if keeps_shards := meshes.tp is not None and self.style.loss_parallel and not gathers_all:
            sizes = {dim: self.vocabulary}
        elif meshes.tp is not None:
            output = _gather_shards(output, border, dim, self.vocabulary)
        if gathers_all:
            has_all = tokens.ranks == 1 or output.shape[tokens.dim] == self.length
            return output if has_all else tokens.gather(output)
        if meshes.cp is not None:
            sizes = {tokens.dim: self.length} | sizes
        mesh = meshes.both if keeps_shards else meshes.cp
        return output if mesh is None else _as_dtensor(output, mesh, sizes)


def _as_dtensor(shard: torch.Tensor, mesh: DeviceMesh, sizes: Mapping[int, int]) -> DTensor:
    """Return local shards as a DTensor; `sizes` maps each dimension that an axis of `mesh` shards to its full length."""
    shape = [sizes.get(dim, size) for dim, size in enumerate(shard.shape)]
    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(dim) for dim in sizes]
    return DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _gather_shards(x: torch.Tensor, border: Border, dim: int, size: int) -> torch.Tensor:
    """All-gather the shards `x` of a tensor of length `size` in its last dimension `dim`, for code that is replicated."""
    missing = shard_size(size, border.group[1]) - x.shape[dim]
    padded = nn.functional.pad(x, (0, missing)) if missing else x
    return gather_replicated(padded, dim, size, border.rank, border.group)
