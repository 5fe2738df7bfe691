"""`Style`, the base class of styles. Class attributes declare facts for the checks of a plan; methods install the split.

A style is a value: it holds no degree, group or mesh. Its methods take them.
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
    """Number of ranks."""
    stream: StreamLayout
    """Layout of the residual stream around the module."""


class Site(NamedTuple):
    """Where a style is installed."""

    border: Border
    """The border between the residual stream and this module."""
    ranks: HeadRanks
    """The ranks that the module is split over: tp x cp inside a region that mixes tokens, else tp."""
    exchanges_tokens: bool = False
    """True in a mixer under context parallelism, where tokens are exchanged for heads. False under tensor parallelism
    alone."""


class Operands(NamedTuple):
    """Which operands of a Linear's product are sharded; float8 reduces the scale of a sharded operand over the ranks."""

    outputs: bool = False
    inputs: bool = False
    replicas: int = 1
    """Number of neighbouring ranks that compute the same outputs, each with a partial gradient of them."""


class Style(ParallelStyle):
    """How a module, or a single parameter, is split."""

    opens = closes = False
    """The module is the entry, or the exit, of a region."""
    is_inside_region = False
    """The style is correct only inside a region."""
    splits_weights = False
    """Each rank gets a shard of the weights. A mixer that holds such a style is split by heads."""
    enters_full = False
    """After the module's entry every rank has the full sequence."""
    may_gather = False
    """Under context parallelism code may gather all tokens of the hidden states at this module."""
    mixes_tokens = False
    """The module is a region whose code mixes tokens: context parallelism gives it the full sequence."""
    shared = False
    """The module is a region whose output only other regions use, so its output is not reduced to the stream."""
    float8_input = True
    """In a model that is converted to float8 the input may arrive in float8, because only projections use it."""
    arguments: Mapping[str, Any] = {}
    """Keyword arguments of each call of the module; they override the caller's."""
    makes_partial_sum = False
    """The output is a partial sum over the ranks; this module or its region reduces it."""
    multiplies_local_tokens = False
    """In a mixer under context parallelism each rank multiplies its local tokens by all weights of its TP rank."""
    shares_heads = False
    """Ranks may share key/value heads if there are fewer heads than ranks."""
    splits_by_experts = False
    """The module is split over the expert-parallel ranks."""
    sections: Sequence[Section] = ()
    """The sections of a packed projection."""
    ignores_sections = False
    """The style shards one dimension evenly, across section boundaries; a packed projection needs `packed()` instead."""
    needs_equal_shards = False
    """The code multiplies its shard's width by the degree, so all shards must have the same width."""
    slices_buffers = False
    """A key of this style may name a buffer; each rank's code then sees its slice of it."""
    is_on_stream = False
    """The style replicates a module on the residual stream."""
    begins_stream = ends_stream = False
    """The stream begins at the module's output, or ends at its input."""
    runs_unsplit = False
    """Every rank runs the module on the full sequence."""
    takes_token_ids = False
    """The module's input is token ids [batch, sequence], not hidden states."""
    makes_logits = False
    """The module is the model's head."""
    listed_as = ""
    """The label under which `titanplans list` shows the modules of a mixer that have this style."""
    remedy = ""
    """The advice in an error raised when a module with this style fails to run."""

    # Called while a plan is resolved: parameters may be on meta, and there may be no process group.

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        """Return the layout of the parameter `name` of a module; None if this style does not lay it out."""
        return None

    def layouts(self, module: nn.Module, over: SplitOver) -> Mapping[str, Layout]:
        """Return the layout of each parameter registered on `module` itself, and of its adapter."""
        by_name = {name: self.layout(name, param, over) for name, param in direct_parameters(module).items()}
        return with_factors(module, {name: layout for name, layout in by_name.items() if layout is not None})

    def sizes(self) -> Mapping[str, tuple[int, bool]]:
        """Return further sizes that limit the degree, in addition to the sharded dimensions of the parameters.

        The result is {name: (size, whether ranks may share it)}.
        """
        return {}

    def operands(self, degree: int) -> Operands | None:
        """Return which operands of a Linear's product are sharded over `degree` ranks; None if none is."""
        return None

    def refusal(self, module: nn.Module, over: SplitOver) -> str | None:
        """Return why this style would be wrong on `module`, and what would work; None if it is correct."""
        return None

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        """Return why this style would be wrong for the single parameter `name`; None if it is correct."""
        return "it works on a module's input and output: give it to the module that holds the parameter"

    # Called once the ranks are known and the parameters are distributed.

    def by_weights(self, module: nn.Module, site: Site) -> None:
        """Install tensor parallelism: each rank has a shard of the weights and, inside a region, all tokens."""

    def by_tokens(self, module: nn.Module, site: Site) -> None:
        """Install context parallelism and, if there is any, tensor parallelism: each rank has its local tokens, also between
        regions."""
        self.by_weights(module, site)

    def by_experts(self, module: nn.Module, ranks: ExpertRanks) -> None:
        """Install expert parallelism. Called only if `splits_by_experts` is True."""
        raise NotImplementedError

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        """Return the collectives of one call under tensor parallelism; `titanplans.observe` compares them with the real
        ones.

        A region returns the collectives of its entry and its exit, even if a module inside reduces its sum. `sends` is not
        called for a module that never runs itself because other code uses its parameters.
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
    """A style that only lays out parameters and installs nothing on the call, so a key may name a single parameter."""

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return None


def direct_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `module` itself by name, except an adapter's, whose layouts follow the weight's."""
    parameters = {name: param for name, param in module._parameters.items() if param is not None}
    return {n: p for n, p in parameters.items() if n not in FACTORS} if is_adapted(module) else parameters


def native_styles(plan: Mapping[str, ParallelStyle]) -> dict[str, Style]:
    """Return the entries of `plan` that are a `Style`; any other `ParallelStyle` declares nothing."""
    return {key: style for key, style in plan.items() if isinstance(style, Style)}


def map_input(
    change: Callable[[torch.Tensor], torch.Tensor],
    style: Style,
    name: str,
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    """Apply `change` to the input of a call of `module`: the first positional argument, or the keyword `name`.

    Raises:
        PlanError: the call has neither.
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


def map_output(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Apply `change` to the output of a module: the tensor, or the first item of a tuple."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
