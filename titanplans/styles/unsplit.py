"""`unsplit()`: a mixer that can't be split by heads runs unsplit on every rank, on the full sequence."""

from functools import partial
from typing import Any

from torch import nn

from titanplans.split.border import Border
from titanplans.split.costs import Call, ExpectedCollective
from titanplans.styles.base import Site, Style, map_input, map_output
from titanplans.styles.replicated_off_stream import ReplicatedOffStream


class Unsplit(ReplicatedOffStream):
    """Run a module unsplit on every rank: gather the full sequence, and keep this rank's shard of the output.

        forward   all-gather over L, y = module(x_BLD), this rank's shard of y
        backward  all-gather of dy over L, the module's backward, this rank's shard of dx; dw is not summed

    Without sequence parallelism nothing is sent.

    Args:
        input_name: the keyword of the input if it is not the first positional argument.
    """

    enters_full = runs_unsplit = True

    def __init__(self, *, input_name: str = "hidden_states"):
        self.input_name = input_name

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return Style.parameter_refusal(self, name, param)

    def by_weights(self, module: nn.Module, site: Site) -> None:
        module.register_forward_pre_hook(partial(self._gather, site.border), with_kwargs=True)
        module.register_forward_hook(partial(_shard, site.border))

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        if call.dim is None:
            return ()
        forward = ExpectedCollective(("all_gather",), (), call.elements)
        return forward, ExpectedCollective((), ("all_gather",), call.elements)

    def _gather(self, border: Border, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_input(border.stream.full, self, self.input_name, module, args, kwargs)


def _shard(border: Border, module: nn.Module, args: Any, output: Any) -> Any:
    return map_output(border.stream.shard, output)
