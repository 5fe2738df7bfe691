"""The parallel styles of which plans are made: what each does to parameters, input and output.

    style                   parameters           gradient   input             output
    Region                  -                    -          enter             leave, if asked
    Colwise                 Shard(0)             Shard(0)   -                 -
    KVColwise               Shard(0), or heads shared by ranks: Replicate, Partial
    Rowwise                 weight Shard(1)      Shard(1)   -                 leave, if asked; then the bias
    ReplicatedInRegion      Replicate            Partial    -                 -
    ReplicatedOnStream      Replicate            of stream  -                 -
    ReplicatedBeforeStream  Replicate            Replicate  -                 -
    VocabEmbedding          Shard(0)             Shard(0)   whole token ids   the sum: whole, or leave
    VocabHead               Shard(0)             Shard(0)   enter             vocabulary-sharded DTensor, or gathered

`enter` and `leave` are the borders of `stream`. Inside a region everything is local, so
one rule gives every gradient: what is sharded has a sharded gradient, and what is replicated has a
Partial one, because each rank has followed only its own share of the paths to the loss.
On the residual stream a replicated parameter's gradient is Partial if the sequence is sharded, and
whole on every rank if not. Before the stream begins every rank does the same work, and has whole gradients.

The last two are in `vocab`. All are torch `ParallelStyle`s; a plan may hold any other ParallelStyle too.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError
from titanplans.tensor_parallel.decoder import within
from titanplans.tensor_parallel.float8 import Crossing, is_float8
from titanplans.tensor_parallel.local_parameters import (
    Layout,
    ParameterMemo,
    local_parameter,
    localize,
    subclass,
)
from titanplans.tensor_parallel.stream import Border, Stream


class Style(ParallelStyle):
    """A parallel style that leaves tensors local and says what it does before it does it.

    `opens` and `closes` mark the borders of a region, `inside` a style that is right only within
    one; strict application checks that they match.
    """

    opens = False
    closes = False
    inside = False

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        """Return the layout of each parameter that `module` itself holds."""
        return {}

    def refusal(self, module: nn.Module) -> str | None:
        """Return why this style would be wrong on `module`, and what would work; None if it is right."""
        return None

    def split(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
        """Return how a Linear's product lies on the ranks, as arguments of `float8_linear.Split`; {} if it is whole."""
        return {}

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Put the hooks in that transform `module`'s input and output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.apply(module, device_mesh, ParameterMemo())
        return module

    def apply(self, module: nn.Module, mesh: DeviceMesh, memo: ParameterMemo) -> None:
        """Distribute the parameters of `module` over the 1-D TP `mesh` and install the hooks."""
        localize(module, mesh, self.layouts(module), memo)
        if is_float8(module) and (split := self.split(module, mesh)):
            from titanplans.tensor_parallel.float8_linear import Split, split_linear  # imports torchao

            group = (mesh.get_group().group_name, mesh.size())
            split_linear(module, Split(group, rank=mesh.get_local_rank(), **split))
        self.install(module, mesh)

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in vars(self).items())
        return f"{type(self).__name__}({options})"


class _Mark(NamedTuple):
    key: str
    crossing: Crossing | None


def mark(module: nn.Module, key: str, crossing: Crossing | None) -> None:
    """Let the style of `module` know its plan key and, where a sequence crosses in float8, how."""
    module.__dict__["_plan_mark"] = _Mark(key, crossing)


def _mark_of(module: nn.Module) -> _Mark:
    return module.__dict__.get("_plan_mark", _Mark("", None))


def border_of(module: nn.Module, mesh: DeviceMesh, stream: Stream) -> Border:
    """Return the border at `module`; in float8 if `apply_plan` has found that something may cross it so."""
    crossing = _mark_of(module).crossing
    if crossing is None or None not in crossing:
        return Border(mesh, stream)
    from titanplans.tensor_parallel.float8_border import Float8Border  # imports torchao

    return Float8Border(mesh, stream, module, enter=crossing.enter is None, leave=crossing.leave is None)


@cache
def _with_bias_apart(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass a Linear, under the same name, so that a compiled graph has its product and its bias apart.

    Only a product by itself is fused with the gather before it: inductor's pass knows no `addmm`.
    """

    def forward(module: Any, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return nn.functional.linear(input, module.weight) + module.bias
        return nn.functional.linear(input, module.weight, module.bias)

    return subclass(cls, {"forward": forward})


def held(module: nn.Module) -> list[str]:
    """Return the names of the parameters that `module` itself holds."""
    return [name for name, param in module._parameters.items() if param is not None]


class Region(Style):
    """The border of a tensor-parallel region: the sequence is gathered once, before all projections.

    Args:
        stream: the residual stream.
        reduce_output: also reduce at the module's exit (its output, or the first of a tuple);
            otherwise a `Rowwise` inside has to.
        input_name: keyword under which the input comes if it is not the first positional argument.
        float8_input: only the projections inside read the input, so that in a model converted to float8 it may
            come in float8.
    """

    opens = True

    def __init__(
        self,
        *,
        stream: Stream,
        reduce_output: bool,
        input_name: str = "hidden_states",
        float8_input: bool = True,
    ):
        self.stream, self.reduce_output, self.input_name = stream, reduce_output, input_name
        self.float8_input = float8_input

    @property
    def closes(self) -> bool:  # type: ignore[override]
        return self.reduce_output

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        border = border_of(module, mesh, self.stream)
        module.register_forward_pre_hook(partial(self._enter, border), with_kwargs=True)
        if self.reduce_output:
            module.register_forward_hook(partial(self._leave, border))

    def _enter(self, border: Border, module, args, kwargs):
        if args:
            return (border.enter(args[0]), *args[1:]), kwargs
        if self.input_name not in kwargs:
            raise PlanError(
                f"it was called without a positional input and without '{self.input_name}' (got "
                f"{', '.join(kwargs) or 'nothing'}): give the plan's region input_name=",
                key=_mark_of(module).key,
                style=self,
                module=module,
            )
        return args, {**kwargs, self.input_name: border.enter(kwargs[self.input_name])}

    def _leave(self, border: Border, module, args, output):
        if isinstance(output, tuple):
            return (border.leave(output[0]), *output[1:])
        return border.leave(output)


class Colwise(Style):
    """Shard every parameter's first dimension: a Linear's outputs, a depthwise convolution's channels."""

    inside = True

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        return {name: Layout(Shard(0), Shard(0)) for name in held(module)}

    def split(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
        return {"outputs": True}

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if type(module).forward is nn.Linear.forward and "bias" in held(module):
            module.__class__ = _with_bias_apart(type(module))


class KVColwise(Colwise):
    """Shard by key/value heads; where there are fewer of them than ranks, neighbouring ranks share one.

    A parameter whose heads are shared is replicated, and reading it gives the rows of this rank's
    head. Each of the ranks that share it has seen some of its queries only, so the gradient is a sum.

    Args:
        heads: how many heads the first dimension of each parameter counts.
        degree: number of ranks.
    """

    def __init__(self, *, heads: int, degree: int):
        self.heads, self.degree = heads, degree

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        if self.degree <= self.heads:
            return super().layouts(module)
        return {n: Layout(Replicate(), Partial(), shared_heads=self.heads) for n in held(module)}

    def split(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
        return {"outputs": True, "sharing": max(1, self.degree // self.heads)}


class Rowwise(Style):
    """Shard a Linear's inputs; its output is a partial sum.

    Args:
        stream: the residual stream.
        reduce_output: leave the region here. False where a parent does, because it calls a fused
            kernel on this weight or works on the output before it returns.

    A bias is replicated and added after the sum, as the unsharded Linear does.
    """

    inside = True

    def __init__(self, *, stream: Stream, reduce_output: bool):
        self.stream, self.reduce_output = stream, reduce_output

    @property
    def closes(self) -> bool:  # type: ignore[override]
        return self.reduce_output

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        layouts = {"weight": Layout(Shard(1), Shard(1))}
        if module._parameters.get("bias") is not None:
            # Hidden from the local product, which is a partial sum; added after it.
            layouts["bias"] = Layout(Replicate(), self.stream.gradient, hidden=True)
        return layouts

    def refusal(self, module: nn.Module) -> str | None:
        if not self.reduce_output and module._parameters.get("bias") is not None:
            return (
                "its bias would be added on every rank before the sum: let it leave the region itself, "
                "rowwise() with attn_input() or mlp_input()"
            )
        return None

    def split(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
        return {"inputs": True}

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if self.reduce_output:
            module.register_forward_hook(partial(self._leave, border_of(module, mesh, self.stream)))

    def _leave(self, border: Border, module, args, output):
        output = border.leave(output)
        bias = local_parameter(module, "bias")
        return output if bias is None else output + bias


class ReplicatedInRegion(Style):
    """Replicate a module's parameters inside a region: their gradient is a sum over the ranks.

    For what stands between the region's entry and its `Rowwise`, such as a norm over each head. What
    works on the sum, after the `Rowwise`, is on the stream again: `ReplicatedOnStream`.
    """

    inside = True

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        return {name: Layout(Replicate(), Partial()) for name in held(module)}

    def split(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
        return {"sharing": mesh.size()}


class ReplicatedOnStream(Style):
    """Replicate a module's parameters on the residual stream, where it works token by token."""

    def __init__(self, *, stream: Stream):
        self.stream = stream

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        return {name: Layout(Replicate(), self.stream.gradient) for name in held(module)}

    def refusal(self, module: nn.Module) -> str | None:
        if is_float8(module) and self.stream.dim is not None:
            return (
                "in float8 a rank would scale its shard of the sequence as if it were all of it: leave the module out of "
                "float8 (filter it), or set sequence_parallel = False"
            )
        return None


class ReplicatedBeforeStream(Style):
    """Replicate a module that every rank calls with the same input, before the stream begins.

    For what prepares the embeddings, such as a vision tower: the work and its gradients are the
    same on every rank.
    """

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        return {name: Layout(Replicate(), Replicate()) for name in held(module)}


def own_styles(plan: Mapping[str, ParallelStyle]) -> dict[str, Style]:
    """Return the styles of `plan` that are this project's, which say what they do before they do it."""
    return {key: style for key, style in plan.items() if isinstance(style, Style)}


def split_key(plan: Mapping[str, ParallelStyle], mixer: str) -> str | None:
    """Return the first key that splits something inside the module `mixer`, or None."""
    return next((k for k, s in plan.items() if isinstance(s, Colwise | Rowwise) and within(k, mixer)), None)
