"""The region of a split mixer or MLP: `attn_input()`, `attn_region()`, `mlp_input()`, `mlp_region()`, `shared_region()`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.split.border import Border
from titanplans.split.costs import Call, ExpectedCollective, cost_of_enter, cost_of_leave
from titanplans.split.local_tokens import GatherPermission
from titanplans.split.state import key_of, make_state
from titanplans.split.tokens.sharded_sequence import ShardedSequence, sharded_sequence
from titanplans.styles.base import Site, Style, map_input, map_output


class Region(Style):
    """Gather the sequence once at the region's entry, before all projections, and reduce the output once at its exit.

        forward   entry: all-gather over L (nothing without sequence parallelism); exit: reduce-scatter over L (all-reduce)
        backward  exit: all-gather over L (nothing without sequence parallelism); entry: reduce-scatter over L (all-reduce)

    Args:
        reduce_output: reduce the module's output [..., sequence, hidden], or the first item of a tuple, at its exit. If
            False, a `rowwise()` inside has to reduce.
        input_name: the keyword of the input [..., sequence, hidden] if it is not the first positional argument.
        float8_input: whether the input may arrive in float8, in a model converted to float8, because only the projections
            inside use it. With a token mask the input stays in high precision, since the module may drop padding first.
        mixes_tokens: True for a mixer, or an MLP that shifts tokens: context parallelism gives its code the full
            sequence. False for an MLP or a mixture of experts, which works token by token on the local tokens.
        shared: whether only other regions use the output, such as keys and values for several blocks. It is not reduced.
        arguments: keyword arguments of each call that override the caller's, to select a code path that can be split.
        may_gather: under context parallelism a mixer's code may gather the hidden states of all tokens: for a token shift, a
            convolution over them, removing padding by a mask. Nothing is gathered until code needs it.
    """

    opens = enters_full = True
    remedy = (
        "its code works on this rank's heads or width: set its counts in local_attributes or mlp_attributes, and "
        "split its direct parameters with colwise(); if it continues after a rowwise(), reduce at the region's exit: "
        "rowwise(reduce_output=False) in attn_region() or mlp_region()"
    )

    def __init__(
        self,
        *,
        reduce_output: bool,
        input_name: str = "hidden_states",
        float8_input: bool = True,
        mixes_tokens: bool = True,
        shared: bool = False,
        arguments: Mapping[str, Any] | None = None,
        may_gather: bool = False,
    ):
        self.reduce_output, self.input_name = reduce_output, input_name
        self.float8_input, self.mixes_tokens = float8_input, mixes_tokens
        self.shared, self.arguments, self.may_gather = shared, arguments or {}, may_gather

    @property
    def closes(self) -> bool:  # type: ignore[override]
        return self.reduce_output

    def by_weights(self, module: nn.Module, site: Site) -> None:
        module.register_forward_pre_hook(partial(self._enter, site.border), with_kwargs=True)
        if self.reduce_output:
            module.register_forward_hook(partial(self._leave, site.border), with_kwargs=True)

    def by_tokens(self, module: nn.Module, site: Site) -> None:
        """Install a region whose code sees a `ShardedSequence`: the full sequence's shape, with only the local tokens."""
        if not site.exchanges_tokens:
            self.by_weights(module, site)
            return
        make_state(module).exchanges = True
        permission = GatherPermission(
            self.may_gather, f"{self._plan_method()}(may_gather=True)", key_of(module)
        )
        enter = partial(self._enter_with_local_tokens, site.border, permission)
        module.register_forward_pre_hook(enter, with_kwargs=True)
        if self.reduce_output:
            module.register_forward_hook(partial(_leave_with_local_tokens, site.border))

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        return (cost_of_enter(call),) if self.shared else (cost_of_enter(call), cost_of_leave(call))

    def _enter(self, border: Border, module: nn.Module, args: Any, kwargs: Any) -> Any:
        enter = border.enter_in_high_precision if _has_token_mask(args, kwargs) else border.enter
        return map_input(enter, self, self.input_name, module, args, {**kwargs, **self.arguments})

    def _leave(self, border: Border, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        shape = (args[0] if args else kwargs[self.input_name]).shape[:-1]
        # While a graph is traced, it is unknown what the module does after its last product.
        leave = border.leave_in_high_precision if torch.compiler.is_compiling() else border.leave
        # A mixture of experts may return its tokens flattened to [B * L, D], but the reduction needs a sequence dimension.
        return map_output(
            lambda x: leave(x.unflatten(0, shape) if len(shape) > 1 and x.ndim == 2 else x), output
        )

    def _plan_method(self) -> str:
        """Return the name of the plan method that makes such a region, for errors."""
        return "shared_region" if self.shared else "attn_region" if self.reduce_output else "attn_input"

    def _enter_with_local_tokens(
        self, border: Border, permission: GatherPermission, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        def enter(x: torch.Tensor) -> torch.Tensor:
            if border.stream.runs_in_full:
                return border.enter(x)
            border.stream.check_runs()
            sequence = sharded_sequence(border.enter(x), border.tokens, permission)
            border.tokens.region_shape, border.tokens.permission = sequence.shape, permission
            return sequence

        return map_input(enter, self, self.input_name, module, args, {**kwargs, **self.arguments})


def _has_token_mask(args: Any, kwargs: Any) -> bool:
    """Whether a mask [batch, sequence] is among a module's arguments.

    The module may then drop masked tokens and give its projections only the other tokens, whose float8 scale differs from
    the scale of all tokens.
    """
    named = (value for name, value in kwargs.items() if "mask" in name)
    return any(isinstance(value, torch.Tensor) and value.ndim == 2 for value in (*args[1:], *named))


def _leave_with_local_tokens(border: Border, module: nn.Module, args: Any, output: Any) -> Any:
    def leave(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, ShardedSequence):
            return border.leave(x.shard)
        if border.stream.runs_in_full:
            return border.leave(border.tokens.total(x))
        lead = border.tokens.region_shape[:-1]
        return border.leave(border.tokens.sum(x.unflatten(0, lead) if len(lead) > 1 and x.ndim == 2 else x))

    return map_output(leave, output)
