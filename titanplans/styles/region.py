"""`attn_input()`, `attn_region()`, `mlp_input()`, `mlp_region()`, `shared_region()`: the part of a block that is split."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from titanplans.split.border import Border
from titanplans.split.costs import Call, ExpectedCollective, entered, left
from titanplans.split.own_tokens import GatherPermission
from titanplans.split.state import key_of, make_state
from titanplans.split.tokens.sharded_sequence import ShardedSequence, sharded_sequence
from titanplans.styles.base import Site, Style, on_input, on_output


class Region(Style):
    """A region: the sequence is gathered once at its entry, before all projections, and its output reduced once.

        forward   entry: all-gather over L (nothing without sequence parallelism); exit: reduce-scatter over L (all-reduce)
        backward  exit: all-gather over L (nothing without); entry: reduce-scatter over L (all-reduce)

    Args:
        reduce_output: reduce at the module's exit: its output [..., sequence, hidden], or the first of a tuple. Otherwise a
            `rowwise()` inside has to.
        input_name: keyword under which the input [..., sequence, hidden] comes if it is not the first positional argument.
        float8_input: only the projections inside read the input, so that in a model converted to float8 it may come in
            float8. Where a mask says which tokens count it does not: the module may leave the others out first.
        mixes_tokens: a mixer, or an MLP that shifts tokens: context parallelism gives its code the full sequence. False: an
            MLP or a mixture of experts, which works token by token on this rank's tokens.
        shared: other regions read the output, such as keys and values for several blocks; nothing leaves.
        arguments: given to the module whatever its caller gives, for a path of its code that can be split.
        gathers: under context parallelism a mixer's code that needs hidden states of all tokens may gather them: a token
            shift, a convolution on them, padding that is taken out under a mask. Nothing is gathered until code asks.
    """

    opens = enters_full = True
    remedy = (
        "its own code works on this rank's heads or width: local_attributes and mlp_attributes set its counts, colwise() "
        "splits its own parameters; where it goes on after a rowwise(), leave the sum to its exit: "
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
        gathers: bool = False,
    ):
        self.reduce_output, self.input_name = reduce_output, input_name
        self.float8_input, self.mixes_tokens = float8_input, mixes_tokens
        self.shared, self.arguments, self.may_gather = shared, arguments or {}, gathers

    @property
    def closes(self) -> bool:  # type: ignore[override]
        return self.reduce_output

    def by_weights(self, module: nn.Module, site: Site) -> None:
        module.register_forward_pre_hook(partial(self._enter, site.border), with_kwargs=True)
        if self.reduce_output:
            module.register_forward_hook(partial(self._leave, site.border), with_kwargs=True)

    def by_tokens(self, module: nn.Module, site: Site) -> None:
        """A region that mixes tokens: its code gets a sequence that looks complete, of which this rank has its tokens."""
        if not site.exchanges_tokens:
            self.by_weights(module, site)
            return
        make_state(module).exchanges = True
        permission = GatherPermission(self.may_gather, f"{self._method()}(gathers=True)", key_of(module))
        enter = partial(self._enter_with_own_tokens, site.border, permission)
        module.register_forward_pre_hook(enter, with_kwargs=True)
        if self.reduce_output:
            module.register_forward_hook(partial(_leave_with_own_tokens, site.border))

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        return (entered(call),) if self.shared else (entered(call), left(call))

    def _enter(self, border: Border, module: nn.Module, args: Any, kwargs: Any) -> Any:
        enter = border.enter_plainly if _has_token_mask(args, kwargs) else border.enter
        return on_input(enter, self, self.input_name, module, args, {**kwargs, **self.arguments})

    def _leave(self, border: Border, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        shape = (args[0] if args else kwargs[self.input_name]).shape[:-1]
        # What the module does after its last product is not known of a graph that is being traced.
        leave = border.leave_plainly if torch.compiler.is_compiling() else border.leave
        # A mixture of experts may return its tokens [B * L, D], in which a sequence can't be found.
        return on_output(
            lambda x: leave(x.unflatten(0, shape) if len(shape) > 1 and x.ndim == 2 else x), output
        )

    def _method(self) -> str:
        """Return the method of a plan that makes such a region."""
        return "shared_region" if self.shared else "attn_region" if self.reduce_output else "attn_input"

    def _enter_with_own_tokens(
        self, border: Border, permission: GatherPermission, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        def enter(x: torch.Tensor) -> torch.Tensor:
            if border.stream.runs_in_full:
                return border.enter(x)
            border.stream.check_runs()
            sequence = sharded_sequence(border.enter(x), border.tokens, permission)
            border.tokens.region_shape, border.tokens.permission = sequence.shape, permission
            return sequence

        return on_input(enter, self, self.input_name, module, args, {**kwargs, **self.arguments})


def _has_token_mask(args: Any, kwargs: Any) -> bool:
    """Whether a mask [batch, sequence] is among a module's arguments.

    The module may take the tokens that count out of the sequence, and give its projections these alone, whose float8 scale
    is another one than that of all tokens.
    """
    named = (value for name, value in kwargs.items() if "mask" in name)
    return any(isinstance(value, torch.Tensor) and value.ndim == 2 for value in (*args[1:], *named))


def _leave_with_own_tokens(border: Border, module: nn.Module, args: Any, output: Any) -> Any:
    def leave(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, ShardedSequence):
            return border.leave(x.shard)
        if border.stream.runs_in_full:
            return border.leave(border.tokens.total(x))
        lead = border.tokens.region_shape[:-1]
        return border.leave(border.tokens.sum(x.unflatten(0, lead) if len(lead) > 1 and x.ndim == 2 else x))

    return on_output(leave, output)
