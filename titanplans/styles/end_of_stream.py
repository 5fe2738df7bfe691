"""`end_of_stream()`: the final norm of a model whose later code needs the full sequence."""

from functools import partial
from typing import Any

from torch import nn

from titanplans.split.border import Border
from titanplans.split.costs import Call, ExpectedCollective
from titanplans.split.local_tokens import GatherPermission
from titanplans.split.state import key_of
from titanplans.split.tokens.sharded_sequence import sharded_sequence
from titanplans.styles.base import Site, Style, map_output
from titanplans.styles.replicated_off_stream import ReplicatedOffStream


class EndOfStream(ReplicatedOffStream):
    """Replicate the module whose input ends the stream; this module and all later code see the full sequence.

        forward   all-gather over L (nothing without sequence parallelism), y_BLD = norm(x_BLD)
        backward  this rank's shard of dx_BLD; dw is the same on every rank

    For a final norm whose output the model's code reshapes to the shape of the token ids.

    Args:
        may_gather: under context parallelism later code that needs all tokens may gather them. Nothing is gathered until
            code needs it.
    """

    ends_stream = True

    def __init__(self, *, may_gather: bool = False):
        self.may_gather = may_gather

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return Style.parameter_refusal(self, name, param)

    def by_weights(self, module: nn.Module, site: Site) -> None:
        module.register_forward_pre_hook(partial(_end, site.border))

    def by_tokens(self, module: nn.Module, site: Site) -> None:
        """Install hooks that keep the local tokens; later code sees a `ShardedSequence` of the full shape."""
        module.register_forward_pre_hook(partial(_end_with_local_tokens, site.border))
        permission = GatherPermission(self.may_gather, "end_of_stream(may_gather=True)", key_of(module))
        module.register_forward_hook(partial(_wrap_output, site.border, permission))

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        return () if call.dim is None else (ExpectedCollective(("all_gather",), (), call.elements),)


def _end(border: Border, module: nn.Module, args: Any) -> Any:
    stream = border.stream
    if not stream.shards_sequence:
        return None
    stream.check_runs()
    full = args[0] if stream.dim is None else stream.full(args[0])
    stream.end()
    return (full, *args[1:])


def _end_with_local_tokens(border: Border, module: nn.Module, args: Any) -> Any:
    border.stream.check_runs()
    return (border.stream.full_of_cp_rank(args[0]), *args[1:])


def _wrap_output(
    border: Border, permission: GatherPermission, module: nn.Module, args: Any, output: Any
) -> Any:
    runs_in_full = border.stream.runs_in_full
    border.stream.end()
    if runs_in_full:
        return output
    return map_output(lambda x: sharded_sequence(x, border.tokens, permission), output)
