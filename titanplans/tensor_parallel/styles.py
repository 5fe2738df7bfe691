"""What a parallel style is, and the border of a region; the table of all styles of which plans are made.

    style                   parameters            gradient   input              output
    Region                  -                     -          enter              leave, if asked
    Colwise                 Shard(0)              Shard(0)   -                  -
    KVColwise               Shard(0), or heads shared by ranks: Replicate, Partial
    Packed                  sections, each split  (layout)   -                  -
    Rowwise                 Shard(1)              Shard(1)   -                  leave, if asked; then the bias
    RowwiseInRegion         Shard(1)              Shard(1)   -                  summed, whole in the region; then the bias
    SplitNorm               Shard(0)              Shard(0)   -                  its statistic is that of all ranks
    GatheredInRegion        Replicate             Partial    gathered width     own shard of the width
    ReplicatedInRegion      Replicate             Partial    -                  -
    AddedToSum              Replicate, read as a part for each rank; Partial
    ReplicatedOnStream      Replicate             of stream  -                  -
    ReplicatedOffStream     Replicate             Replicate  -                  -
    Whole                   Replicate             Replicate  whole sequence     laid out as the stream again
    EndOfStream             Replicate             Replicate  whole sequence     whole
    VocabEmbedding          Shard(0)              Shard(0)   whole token ids    the sum: whole, or leave
    VocabHead               Shard(0)              Shard(0)   enter              vocabulary-sharded DTensor, or gathered

`enter` and `leave` are the borders of `stream`. Inside a region everything is local, so
one rule gives every gradient: what is sharded has a sharded gradient, and what is replicated has a
Partial one, because each rank has followed only its own share of the paths to the loss.
On the residual stream a replicated parameter's gradient is Partial if the sequence is sharded, and
whole on every rank if not. Off the stream every rank does the same work, and has whole gradients.

A key of a plan names a module, and its style all parameters that the module itself holds; or it names one parameter, and
the style is that parameter's alone. They stand in `projections`, `norms`, `replicated` and `vocab`. All are torch
`ParallelStyle`s; a plan may hold any other ParallelStyle too.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError
from titanplans.tensor_parallel.collectives import group_of
from titanplans.tensor_parallel.decoder import join, within
from titanplans.tensor_parallel.float8 import Crossing, is_float8
from titanplans.tensor_parallel.layout import Layout
from titanplans.tensor_parallel.local_parameters import ParameterMemo, localize
from titanplans.tensor_parallel.low_rank import FACTORS, is_adapted, place_dropout, with_factors
from titanplans.tensor_parallel.sent import Call, Sent, entered, left
from titanplans.tensor_parallel.stream import Border, Stream


class Style(ParallelStyle):
    """A parallel style that leaves tensors local and says what it does before it does it.

    `opens` and `closes` mark the borders of a region, `inside` a style that is right only within one, `splits` one that
    gives each rank its part of the work; strict application checks that they match.
    """

    opens = closes = inside = splits = False
    gathers = False
    """Behind it every rank has the whole sequence."""
    shares_heads = False
    """It lets ranks share key/value heads where there are too few."""
    remedy = ""
    """What to write where a module with this style does not run."""

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        """Return the layout of the parameter `name` of a module; None if this style has none for it."""
        return None

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        """Return the layout of each parameter that `module` itself holds."""
        found = {name: self.layout(name, param) for name, param in held(module).items()}
        return with_factors(module, {name: layout for name, layout in found.items() if layout is not None})

    def sizes(self) -> Mapping[str, tuple[int, bool]]:
        """Return what the degree has to suit beside the shards: by name a number, and whether ranks may share it."""
        return {}

    def refusal(self, module: nn.Module) -> str | None:
        """Return why this style would be wrong on `module`, and what would work; None if it is right."""
        return None

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        """Return why this style would be wrong for the parameter `name` alone; None if it is right."""
        return "it works on a module's input and output: give it to the module that holds the parameter"

    def split(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
        """Return how a Linear's product lies on the ranks, as arguments of `float8_linear.Split`; {} if it is whole."""
        return {}

    def sends(self, module: nn.Module, call: Call) -> tuple[Sent, ...]:
        """Return the collectives that a call of `module` takes.

        They are those of its parent in a region, if the module is never called, since other code reads its parameters. What
        reading a parameter takes is said by its layout. A region's are those of entering and leaving it, whoever sums.
        """
        return ()

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Put the hooks in that transform `module`'s input and output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.apply(module, device_mesh, self.layouts(module), ParameterMemo())
        return module

    def apply(
        self, module: nn.Module, mesh: DeviceMesh, layouts: Mapping[str, Layout], memo: ParameterMemo
    ) -> None:
        """Distribute parameters of `module` by `layouts` over the 1-D TP `mesh` and install the hooks."""
        if is_float8(module) and (split := self.split(module, mesh)):
            from titanplans.tensor_parallel.float8_linear import Split, split_linear  # imports torchao

            group = group_of(mesh)
            split_linear(module, Split(group, rank=mesh.get_local_rank(), **split))
        localize(
            module, mesh, layouts, memo
        )  # around the product: a packed weight is read within a forward alone
        place_dropout(module, layouts, mesh.get_local_rank(), mesh.size())
        self.install(module, mesh)

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in vars(self).items())
        return f"{type(self).__name__}({options})"


class ParameterStyle(Style):
    """A style that does nothing but lay parameters out, so that a key may name one parameter."""

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return None


class _Mark(NamedTuple):
    key: str
    crossing: Crossing | None


def mark(module: nn.Module, key: str, crossing: Crossing | None) -> None:
    """Let the style of `module` know its plan key and, where a sequence crosses in float8, how."""
    module.__dict__["_plan_mark"] = _Mark(key, crossing)


def _mark_of(module: nn.Module) -> _Mark:
    return module.__dict__.get("_plan_mark", _Mark("", None))


def key_of(module: nn.Module) -> str:
    """Return the plan key of `module`."""
    return _mark_of(module).key


def border_of(module: nn.Module, mesh: DeviceMesh, stream: Stream) -> Border:
    """Return the border at `module`; in float8 if `apply_plan` has found that something may cross it so."""
    crossing = _mark_of(module).crossing
    if crossing is None or None not in crossing:
        return Border(mesh, stream)
    from titanplans.tensor_parallel.float8_border import Float8Border  # imports torchao

    return Float8Border(mesh, stream, module, enter=crossing.enter is None, leave=crossing.leave is None)


def held(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that `module` itself holds, by name; not an adapter's, which follow from the weight."""
    own = {name: param for name, param in module._parameters.items() if param is not None}
    return {n: p for n, p in own.items() if n not in FACTORS} if is_adapted(module) else own


class Region(Style):
    """The border of a tensor-parallel region: the sequence is gathered once, before all projections.

    Args:
        stream: the residual stream.
        reduce_output: also reduce at the module's exit (its output, or the first of a tuple);
            otherwise a `Rowwise` inside has to.
        input_name: keyword under which the input comes if it is not the first positional argument.
        float8_input: only the projections inside read the input, so that in a model converted to float8 it may
            come in float8. Where a mask says which tokens count it does not: the module may leave the others out first.
        shared: other regions read what it returns, such as keys and values for several blocks; nothing leaves.
        arguments: what the module is called with, whatever its caller gives: for a path of its code that can be split.
    """

    opens = gathers = True
    remedy = (
        "its own code works on this rank's heads or width: local_attributes and mlp_attributes set its counts, colwise() "
        "splits its own parameters; where it goes on after a rowwise(), leave the sum to its exit: "
        "rowwise(reduce_output=False) in attn_region() or mlp_region()"
    )

    def __init__(
        self,
        *,
        stream: Stream,
        reduce_output: bool,
        input_name: str = "hidden_states",
        float8_input: bool = True,
        shared: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ):
        self.stream, self.reduce_output, self.input_name = stream, reduce_output, input_name
        self.float8_input, self.shared, self.arguments = float8_input, shared, arguments or {}

    @property
    def closes(self) -> bool:  # type: ignore[override]
        return self.reduce_output

    def sends(self, module: nn.Module, call: Call) -> tuple[Sent, ...]:
        return (entered(call),) if self.shared else (entered(call), left(call))

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        border = border_of(module, mesh, self.stream)
        module.register_forward_pre_hook(partial(self._enter, border), with_kwargs=True)
        if self.reduce_output:
            module.register_forward_hook(partial(self._leave, border), with_kwargs=True)

    def _enter(self, border: Border, module, args, kwargs):
        enter = border.enter_plainly if _masks_tokens(args, kwargs) else border.enter
        return on_input(enter, self, self.input_name, module, args, {**kwargs, **self.arguments})

    def _leave(self, border: Border, module, args, kwargs, output):
        shape = (args[0] if args else kwargs[self.input_name]).shape[:-1]
        # What the module does behind its last product is not known of a graph that is being traced.
        cross = border.leave_plainly if torch.compiler.is_compiling() else border.leave

        def leave(x: torch.Tensor) -> torch.Tensor:
            # A mixture of experts may return its tokens in a row, where a sequence can't be found.
            return cross(x.unflatten(0, shape) if len(shape) > 1 and x.ndim == 2 else x)

        return on_output(leave, output)


def _masks_tokens(args: Any, kwargs: Any) -> bool:
    """Whether a mask [batch, sequence] is among a module's arguments, beside its input.

    The module may take the tokens that count out of the sequence, and give its projections these alone, whose scale is
    another one than that of all.
    """
    named = (value for name, value in kwargs.items() if "mask" in name)
    return any(isinstance(value, torch.Tensor) and value.ndim == 2 for value in (*args[1:], *named))


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
        f"it was called without a positional input and without '{name}' (got {', '.join(kwargs) or 'nothing'}): give its "
        "style input_name=",
        key=key_of(module),
        style=style,
        module=module,
    )


def on_output(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Return what a module returned, with its output changed: a tensor, or the first of a tuple."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


class Target(NamedTuple):
    """What a key of a plan names: a module, or one parameter of it."""

    path: str
    """The module's name."""
    module: nn.Module
    parameter: str | None
    """The parameter's name in the module."""


def find_target(key: str, model: nn.Module) -> Target | None:
    """Return what `key` names in `model`, or None."""
    path, _, last = key.rpartition(".")
    for module_path, parameter in ((key, None), (path, last)):
        try:
            module = model.get_submodule(module_path)
        except AttributeError:
            continue
        if parameter is None or module._parameters.get(parameter) is not None:
            return Target(module_path, module, parameter)
    return None


def target(key: str, model: nn.Module) -> Target:
    """Return what `key` names in `model`, which is there."""
    found = find_target(key, model)
    assert found is not None, key
    return found


def targets(plan: Mapping[str, ParallelStyle], model: nn.Module) -> Iterator[tuple[str, Style, Target]]:
    """Yield each key of `plan` with a style of this project, and what it names, which is there."""
    for key, style in own_styles(plan).items():
        yield key, style, target(key, model)


def layouts_at(found: Target, style: Style, plan: Mapping[str, ParallelStyle]) -> dict[str, Layout]:
    """Return the layouts that a key of `plan` gives, by parameter: a key of a parameter goes before its module's."""
    if found.parameter is not None:
        layout = style.layout(found.parameter, found.module._parameters[found.parameter])  # type: ignore[arg-type]
        return {} if layout is None else with_factors(found.module, {found.parameter: layout})
    layouts = style.layouts(found.module)
    return {name: layout for name, layout in layouts.items() if join(found.path, name) not in plan}


def own_styles(plan: Mapping[str, ParallelStyle]) -> dict[str, Style]:
    """Return the styles of `plan` that are this project's, which say what they do before they do it."""
    return {key: style for key, style in plan.items() if isinstance(style, Style)}


def split_key(plan: Mapping[str, ParallelStyle], mixer: str) -> str | None:
    """Return the first key that splits something inside the module `mixer`, or None."""
    return next((k for k, s in plan.items() if isinstance(s, Style) and s.splits and within(k, mixer)), None)
