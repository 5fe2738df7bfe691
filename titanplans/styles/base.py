"""The base of styles: what a style is asked while a plan is resolved, and what it installs once the ranks are known.

A style is a value. It carries no degree, group or mesh; its methods get them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError
from titanplans.split.adapted import FACTORS, is_adapted, with_factors
from titanplans.split.border import Border
from titanplans.split.costs import Call, ExpectedCollective
from titanplans.split.experts.dispatch import ExpertRanks
from titanplans.split.layout import Layout, Section, StreamLayout
from titanplans.split.local_code import HeadRanks
from titanplans.split.state import key_of


class SplitOver(NamedTuple):
    """What a module is split over."""

    degree: int
    """How many ranks."""
    stream: StreamLayout
    """How the residual stream around it is laid out."""


class Site(NamedTuple):
    """Where a style is installed."""

    border: Border
    """Between the residual stream and this module."""
    ranks: HeadRanks
    """The ranks that the module is split over: tp x cp inside a region that mixes tokens, else tp."""
    exchanges_tokens: bool = False
    """Under context parallelism, inside a mixer: tokens are exchanged for heads here. False under tensor parallelism
    alone."""


class Operands(NamedTuple):
    """Which operand of a Linear's product is sharded; float8 reduces the scale of a sharded operand over the ranks."""

    outputs: bool = False
    inputs: bool = False
    sharing: int = 1
    """So many neighbouring ranks have the same outputs, each with a partial gradient of them."""


class Style(ParallelStyle):
    """How a module, or one parameter, is split."""

    opens = closes = False
    """It is the entry, or the exit, of a region."""
    inside = False
    """It is right only inside a region."""
    splits = False
    """It gives each rank a shard of the weights; a mixer that holds such a style is split by heads."""
    enters_full = False
    """After its entry every rank has the full sequence."""
    may_gather = False
    """Under context parallelism code may gather all tokens of the hidden states that it gets here."""
    mixes_tokens = False
    """A region whose code mixes tokens: context parallelism gives it the full sequence."""
    shared = False
    """A region whose output other regions read: nothing leaves it."""
    float8_input = True
    """In a model that is converted to float8 its input may come in float8: only projections read it."""
    arguments: Mapping[str, Any] = {}
    """Given to the module whatever its caller gives."""
    makes_partial_sum = False
    """Its output is a partial sum over the ranks, which it or its region reduces."""
    multiplies_own_tokens = False
    """In a mixer under context parallelism its product is of this rank's tokens and all weights of the TP rank."""
    shares_heads = False
    """It lets ranks share key/value heads where there are fewer of them than ranks."""
    over_experts = False
    """It is split over the ranks of expert parallelism."""
    sections: Sequence[Section] = ()
    """The sections of a packed projection."""
    may_cut_sections = False
    """It shards one dimension wherever the edges fall; a packed projection, of several sections, needs `packed()`
    instead."""
    needs_equal_shards = False
    """It computes with the degree times its shard's width, so every rank needs as much of the width."""
    slices_buffers = False
    """A key of this style may name a buffer, of which a rank reads its slice."""
    is_on_stream = False
    """It replicates a module on the residual stream."""
    begins_stream = ends_stream = False
    """The stream begins at the module's output, or ends at its input."""
    runs_unsplit = False
    """Every rank runs the module on the full sequence."""
    takes_token_ids = False
    """The module's input is token ids [batch, sequence], not hidden states."""
    makes_logits = False
    """The module is the model's head."""
    listed_as = ""
    """How `titanplans list` introduces the modules of a mixer that have this style."""
    remedy = ""
    """What to write where a module with this style does not run."""

    # Asked while a plan is resolved, with shapes alone: on meta, without a process group.

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        """Return the layout of the parameter `name` of a module; None if this style has none for it."""
        return None

    def layouts(self, module: nn.Module, over: SplitOver) -> Mapping[str, Layout]:
        """Return the layout of each parameter that `module` itself holds, and of its adapter's."""
        by_name = {name: self.layout(name, param, over) for name, param in held(module).items()}
        return with_factors(module, {name: layout for name, layout in by_name.items() if layout is not None})

    def sizes(self) -> Mapping[str, tuple[int, bool]]:
        """Return sizes that the degree has to suit, other than those of shards, by name; and whether ranks may share."""
        return {}

    def operands(self, degree: int) -> Operands | None:
        """Return which operand of a Linear's product is sharded over `degree` ranks; None: every rank has it all."""
        return None

    def refusal(self, module: nn.Module, over: SplitOver) -> str | None:
        """Return why this style would be wrong on `module`, and what would work; None if it is right."""
        return None

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        """Return why this style would be wrong for the parameter `name` alone; None if it is right."""
        return "it works on a module's input and output: give it to the module that holds the parameter"

    # Called once the ranks are known. The parameters have been laid out already.

    def by_weights(self, module: nn.Module, site: Site) -> None:
        """Install tensor parallelism: each rank has a shard of the weights, and all tokens inside a region."""

    def by_tokens(self, module: nn.Module, site: Site) -> None:
        """Install context parallelism on top: each rank has its tokens, also between regions."""
        self.by_weights(module, site)

    def by_experts(self, module: nn.Module, ranks: ExpertRanks) -> None:
        """Install expert parallelism. Called only if `over_experts`."""
        raise NotImplementedError

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        """Return the collectives of a call under tensor parallelism; `titanplans.observe` compares them with those issued.

        A region returns those of its entry and exit, wherever its sum is reduced. A module that is never called, since other
        code reads its parameters, is asked nothing.
        """
        return ()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise PlanError(
            f"{type(self).__name__} only declares how a module is split: give it to titanplans.apply_plan, not to torch's "
            "parallelize_module"
        )

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in vars(self).items())
        return f"{type(self).__name__}({options})"


class ParameterStyle(Style):
    """A style that lays parameters out and needs nothing of a call, so that a key may name one parameter."""

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return None


def held(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that `module` itself holds, by name, without an adapter's, which follow from the weight."""
    own = {name: param for name, param in module._parameters.items() if param is not None}
    return {n: p for n, p in own.items() if n not in FACTORS} if is_adapted(module) else own


def own_styles(plan: Mapping[str, ParallelStyle]) -> dict[str, Style]:
    """Return the styles of `plan` that are this project's; a foreign one declares nothing."""
    return {key: style for key, style in plan.items() if isinstance(style, Style)}


def on_input(
    change: Callable[[torch.Tensor], torch.Tensor],
    style: Style,
    name: str,
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    """Return the arguments of a call of `module` with its input changed: the first positional one, or keyword `name`.

    Raises:
        PlanError: it was called without either.
    """
    if args:
        return (change(args[0]), *args[1:]), kwargs
    if name in kwargs:
        return args, {**kwargs, name: change(kwargs[name])}
    raise PlanError(
        f"it was called without a positional input and without '{name}' (got {', '.join(kwargs) or 'nothing'}): "
        + ("give its style input_name=" if hasattr(style, "input_name") else "give it by position"),
        key=key_of(module),
        style=style,
        module=module,
    )


def on_output(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Return the output of a module with its tensor changed, or the first of a tuple."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
