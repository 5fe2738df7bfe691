"""`module.weight`: a DTensor for the optimizer, this rank's plain local tensor for the kernel.

    module._parameters["weight"]    the DTensor: named_parameters, state dicts, FSDP2, optimizers
    module.weight                   the local tensor; its gradient is passed on to the DTensor

`localize` gives a split module a subclass of its class in which each of these parameters is a property. So the module's
own forward and a fused kernel of its parent get the local tensor. Start at `local_parameter`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from titanplans.errors import ParallelError, PlanError
from titanplans.split.collectives import Group
from titanplans.split.layout import Layout, rows_used
from titanplans.split.parameters.selection import select_rows, take_ranges
from titanplans.split.state import SplitState, make_state, specialise, state_of, subclass
from titanplans.text import class_name
from titanplans.torch_private.autograd import grad_refcount, is_accumulating
from titanplans.torch_private.dispatch import disabled_torch_function
from titanplans.torch_private.dtensor import gradient_with_spec, local_tensor, spec_as, spec_of, with_spec
from titanplans.torch_private.threads import DTensorSpec

# 1. How a rank gets its local tensor from a parameter.


class ParameterMesh(NamedTuple):
    """The mesh of a module's parameters, and which of its dimensions a `Layout` describes."""

    mesh: DeviceMesh | None
    """The mesh of the DTensors; layouts describe its last dimension. None: parameters stay plain tensors, and data
    parallelism sums their gradients."""
    replica_dims: int = 0
    """Number of leading dimensions over which parameters are replicated, with partial gradients."""
    has_layout_dim: bool = True
    """Whether the mesh has a dimension that layouts describe; False: parameters are replicated over all dimensions."""

    def placements(self, layout: Layout) -> tuple[Placement, ...]:
        """Return the placements of a parameter with this layout."""
        return (Replicate(),) * self.replica_dims + ((layout.placement,) if self.has_layout_dim else ())

    def gradient(self, layout: Layout) -> tuple[Placement, ...]:
        """Return the placements of the gradient of a parameter with this layout."""
        return (Partial(),) * self.replica_dims + ((layout.gradient,) if self.has_layout_dim else ())


class MixerSlice(NamedTuple):
    """The rows of a local tensor that a CP rank uses in a mixer; it stores all rows of its TP rank."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """First row and size of each run of rows; () for all rows."""
    divided_by: int = 1
    """Number of CP ranks, if all of them add the parameter before a reduction, so that each has to add a fraction of it."""


class GradientSpec:
    """Caches the DTensorSpec of one parameter's gradient until the parameter's own spec changes, by FSDP2 or a cast.

    The backward of `to_local` makes a new spec for each gradient, which is hashed when the gradient is detached to be
    accumulated. This takes three quarters of the host time that a parameter costs in a step.
    """

    __slots__ = ("_param_spec", "_placements", "_spec")

    def __init__(self) -> None:
        self._param_spec: DTensorSpec | None = None
        self._placements: tuple[Placement, ...] | None = None
        self._spec: DTensorSpec | None = None

    def spec(self, param: DTensor, placements: tuple[Placement, ...]) -> DTensorSpec:
        """Return the spec of the gradient of `param` with these `placements`."""
        param_spec = spec_of(param)
        # Compared by identity: FSDP2 and casts give the parameter another spec object.
        if param_spec is not self._param_spec or placements is not self._placements or self._spec is None:
            self._param_spec, self._placements = param_spec, placements
            self._spec = spec_as(param_spec, *placements)
        return self._spec

    def __deepcopy__(self, memo: Any) -> "GradientSpec":
        return GradientSpec()  # a spec holds a mesh with process groups, which can't be copied


class LocalSpec(NamedTuple):
    """How to get this rank's local tensor from one parameter, and the gradient's DTensor from the local gradient."""

    layout: Layout
    gradient: tuple[Placement, ...]
    """Placements of the gradient on the parameter's mesh; () if the parameter is a plain tensor."""
    is_uneven: bool
    """Shards differ in size, so `to_local` can't infer the full shape from this rank's shard."""
    rank: int
    group: Group
    """The ranks of the layout; `rank` is this rank's index in it."""
    gradient_spec: GradientSpec
    mixer_slice: MixerSlice | None = None


def local_specs(module: nn.Module) -> dict[str, LocalSpec]:
    """Return the specs of the parameters of `module`, by name; {} if it is not split."""
    return {} if (state := state_of(module)) is None else state.local_specs


# 2. Parameters become DTensors and properties.

ParameterMemo = dict[nn.Parameter, nn.Parameter]
"""Maps each parameter of a model to the DTensor that it was distributed as, so that tied weights stay tied."""


def localize(
    module: nn.Module,
    over: ParameterMesh,
    layouts: Mapping[str, Layout],
    memo: ParameterMemo,
    group: Group,
    rank: int,
    mixer_slices: Mapping[str, MixerSlice] | None = None,
) -> None:
    """Distribute the parameters of `module` named in `layouts`; from then on `module.weight` is this rank's local tensor.

    The values are those of the mesh's first rank, so that replicas agree even if seeds differ. Parameters on meta are not
    communicated.

    Args:
        module: its direct parameters are distributed, not its children's.
        over: the mesh.
        layouts: layouts of parameters by name. A buffer's layout has the rows that the module's code sees.
        memo: the memo of the model.
        group: the ranks of the layouts.
        rank: this rank's index in `group`.
        mixer_slices: by parameter name, the slice of the local tensor that this rank uses in a mixer.
    """
    mesh, mixer_slices, buffers = over.mesh, mixer_slices or {}, layouts.keys() & module._buffers.keys()
    if mesh is None:  # a plain parameter that is used unchanged stays an attribute
        layouts = {
            name: layout for name, layout in layouts.items() if name in mixer_slices or layout.deferred
        }
    layouts = dict(layouts)
    for name, layout in layouts.items():
        if name in buffers:
            rows = rows_used(layout, getattr(module, name).shape, group[1])
            layouts[name] = layout._replace(placement=Replicate(), rows=rows)
        elif mesh is not None:
            param = module._parameters[name]
            assert param is not None, name
            if (distributed := memo.get(param)) is None:
                tensor = distribute_tensor(param.detach(), mesh, over.placements(layout))
                distributed = nn.Parameter(tensor, requires_grad=param.requires_grad)
                distributed.__dict__.update(param.__dict__)  # flags such as _no_weight_decay
                memo[param] = distributed
            module._parameters[name] = distributed
    if not layouts:
        return
    specs = make_state(module).local_specs
    for name, layout in layouts.items():
        placement, shape = layout.placement, getattr(module, name).shape
        is_uneven = (
            over.has_layout_dim and isinstance(placement, Shard) and shape[placement.dim] % group[1] != 0
        )
        gradient = () if mesh is None or name in buffers else over.gradient(layout)
        specs[name] = LocalSpec(
            layout, gradient, is_uneven, rank, group, GradientSpec(), mixer_slices.get(name)
        )
    collective = {name for name, layout in layouts.items() if layout.is_collective}
    deferred = {name for name, layout in layouts.items() if layout.deferred}
    # The order is fixed and the names are sorted, so that repeated blocks get one class and share one compiled artefact.
    for names, subclass_of in (
        (layouts.keys() - collective - deferred - buffers, _with_local_parameters),
        (deferred, _with_deferred_parameters),
        (collective, with_locals_in_forward),
        (buffers, _with_local_buffers),
    ):
        if names:
            specialise(module, subclass_of(type(module), tuple(sorted(names))))


def _properties(get: Callable[[Any, str], torch.Tensor | None], names: Iterable[str]) -> dict[str, object]:
    def make_property(name: str) -> property:
        return property(lambda self: get(self, name))

    return {name: make_property(name) for name in names}


@cache
def _with_local_parameters(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    return subclass(cls, _properties(local_parameter, names), "local_parameters")


@cache
def _with_deferred_parameters(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Subclass `cls` so that its code sees None for these parameters: the style adds them later (`add_deferred_bias`)."""

    def none_if_unsharded(module: Any, name: str) -> torch.Tensor | None:
        param = module._parameters[name]
        return None if is_unsharded(param, module._split.local_specs[name]) else param

    return subclass(cls, _properties(none_if_unsharded, names), "deferred_parameters")


@cache
def _with_local_buffers(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Subclass `cls` so that its code sees this rank's rows of buffers, which every rank stores in full."""

    def local_rows(module: Any, name: str) -> torch.Tensor:
        buffer, spec = module._buffers[name], module._split.local_specs[name]
        if spec.layout.rows is not None:
            buffer = select_rows(buffer, spec.layout, spec.rank, spec.group)
        return _slice_for_mixer(buffer, None, spec, module._split)

    return subclass(cls, _properties(local_rows, names), "local_buffers")


@cache
def with_locals_in_forward(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Subclass `cls` so that only its own forward gets local tensors of these parameters; other code gets the DTensors.

    Used for the rows of a vocabulary: a user's loss on a local shard would be silently wrong, whereas torch refuses a
    product of a plain tensor and a DTensor. Also used for parameters whose local tensor needs a collective: if only one rank
    asked for the local tensor, it would wait for the other ranks. A forward that asks several times, for example once for
    each expert, gets the same tensor each time.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._split.forward_locals = {}
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            self._split.forward_locals = None

    def local_in_forward(module: Any, name: str) -> torch.Tensor | None:
        in_forward = module._split.forward_locals
        if in_forward is None:
            return module._parameters[name]
        if name not in in_forward:
            in_forward[name] = local_parameter(module, name)
        return in_forward[name]

    return subclass(
        cls, {"forward": forward, **_properties(local_in_forward, names)}, "local_parameters_in_forward"
    )


# 3. What `module.weight` returns.


def local_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the local tensor of the parameter `name`, also if it is deferred; the parameter itself if it is not split.

    A Triton kernel needs the local tensor: a DTensor that enters an `autograd.Function` stays a DTensor, whose
    `data_ptr()` is null.

    Raises:
        ParallelError: the parameter was replaced by a plain tensor.
    """
    state = state_of(module)
    param = module._parameters[name]
    if state is None or (spec := state.local_specs.get(name)) is None:
        return param
    if not torch.compiler.is_compiling() and name in state.block_locals:
        return _slice_for_mixer(state.block_locals[name], param, spec, state)
    if not is_unsharded(param, spec):
        if param is not None and not isinstance(param, DTensor):
            raise ParallelError(
                f"the {name} of a {class_name(module)} was split, and is now a plain tensor, whose gradient would not be "
                "summed over the ranks: copy values into the parameter, or set a DTensor on the tensor-parallel mesh"
            )
        return param
    assert param is not None
    if not spec.gradient:
        return _slice_for_mixer(param, param, spec, state)
    dtensor = cast("DTensor", param)
    return _slice_for_mixer(_finish(_to_local(dtensor, spec), dtensor, spec), param, spec, state)


def is_unsharded(param: torch.Tensor | None, spec: LocalSpec) -> bool:
    """Whether `param` has the layout of the split: it is neither sharded by FSDP2, as between forwards, nor replaced."""
    if not spec.gradient:
        return param is not None and not isinstance(param, DTensor)
    # A parameter that FSDP2 has sharded has more mesh dimensions than the split's own mesh.
    return isinstance(param, DTensor) and param.device_mesh.ndim == len(spec.gradient)


def _to_local(param: DTensor, spec: LocalSpec) -> torch.Tensor:
    """Return the local tensor of `param`, whose gradient goes back with the placements `spec.gradient`."""
    local = local_tensor(param)
    plain = _is_plain(local)
    if plain and not (param.requires_grad and torch.is_grad_enabled()):
        return local.view_as(local)
    if plain or spec.is_uneven:
        (local,) = _ToLocal.apply([spec.gradient_spec.spec(param, spec.gradient)], param)  # type: ignore[misc]
        return local
    return param.to_local(grad_placements=spec.gradient)


def _is_plain(local: torch.Tensor) -> bool:
    """Whether `local` is eager, and not of a subclass of Tensor, such as a fake or float8 tensor."""
    return type(local) is torch.Tensor and not torch.compiler.is_compiling()


def _finish(local: torch.Tensor, param: DTensor, spec: LocalSpec) -> torch.Tensor:
    """Return the values of `local`, the local tensor of `param`, that this rank's code uses, scaled as the layout
    says."""
    layout = spec.layout
    if layout.divided_by > 1:
        local = local / layout.divided_by
    if layout.rows is not None:
        local = select_rows(local, layout, spec.rank, spec.group)
    return _as_weight(local, param)


def _slice_for_mixer(
    local: torch.Tensor, param: torch.Tensor | None, spec: LocalSpec, state: SplitState
) -> torch.Tensor:
    """Return the slice of `local` that a CP rank uses in a mixer; all of `local` in products with its local tokens."""
    if (mixer_slice := spec.mixer_slice) is None or state.uses_all_rows:
        return local
    if mixer_slice.divided_by > 1:
        local = local / mixer_slice.divided_by
    if mixer_slice.ranges:
        local = take_ranges(local, mixer_slice.dim, mixer_slice.ranges)
    return local if param is None else _as_weight(local, param)


def add_deferred_bias(module: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Add to the output of `module` its deferred bias, which its own forward does not see, if there is one."""
    spec = local_specs(module).get("bias")
    bias = local_parameter(module, "bias") if spec is not None and spec.layout.deferred else None
    return output if bias is None else output + bias


# 4. All local tensors of a block, made in one autograd node.

Holders = list[tuple[nn.Module, tuple[str, ...]]]
"""Modules inside a block, and the names of their parameters whose local tensors are made together."""


def localize_blocks_at_once(blocks: Iterable[nn.Module]) -> None:
    """Make all local tensors of each of the split `blocks` when its forward begins, in one autograd node.

    One node for all local tensors halves their host time. Each local tensor is made once in a forward, however often the
    module's code reads it, and the gradients of a block are passed on together, at the end of its backward.

    A local tensor is still made alone, when it is read, if the parameter is outside of blocks, if the block is compiled, if
    gradients are off, if the local tensor needs a collective, or if an FSDP module inside the block has not gathered the
    parameter yet.
    """
    for block in blocks:
        holders: Holders = []
        for module in block.modules():
            names = [
                name
                for name, spec in local_specs(module).items()
                if spec.gradient and not spec.layout.is_collective
            ]
            if names:
                holders.append((module, tuple(names)))
        if holders:
            block.register_forward_pre_hook(partial(_make_block_locals, holders))
            block.register_forward_hook(partial(_drop_block_locals, holders), always_call=True)


def _make_block_locals(holders: Holders, block: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    destinations: list[tuple[dict[str, torch.Tensor], str, LocalSpec]] = []
    params, gradient_specs = [], []
    for module, names in holders:
        state = make_state(module)
        specs, block_locals = state.local_specs, state.block_locals
        block_locals.clear()  # an interrupted forward may have left some
        parameters: Any = module._parameters
        for name in names:
            param, spec = parameters[name], specs[name]
            if (
                is_unsharded(param, spec)
                and param.requires_grad
                and type(local_tensor(param)) is torch.Tensor
            ):
                destinations.append((block_locals, name, spec))
                params.append(param)
                gradient_specs.append(spec.gradient_spec.spec(param, spec.gradient))
    if params:
        locals_ = cast("Sequence[torch.Tensor]", _ToLocal.apply(gradient_specs, *params))
        for (block_locals, name, spec), local, param in zip(destinations, locals_, params, strict=True):
            block_locals[name] = _finish(local, param, spec)


def _drop_block_locals(holders: Holders, block: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        for module, _ in holders:
            make_state(module).block_locals.clear()


# 5. Autograd: local tensors in the forward, DTensor gradients in the backward.


class _ToLocal(torch.autograd.Function):
    """`to_local` of several parameters, given the specs of their gradients.

    DTensor's own backward makes a new spec, assumes that all shards have this rank's size, and lets two parameters
    share one gradient if autograd passes the same tensor to both (as for the terms of a sum).
    """

    @staticmethod
    def forward(ctx: Any, specs, *params):
        ctx.set_materialize_grads(False)
        ctx.specs = specs
        # The stored local tensors themselves would get an autograd history.
        return tuple(local.detach() for local in map(local_tensor, params))

    @staticmethod
    def backward(ctx: Any, *grads):  # pyrefly: ignore[bad-override]
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # traced, or create_graph
            return None, *map(_as_dtensor, grads, ctx.specs)
        convert = gradient_with_spec if is_accumulating(ctx) else with_spec
        return None, *[_to_dtensor(grad, spec, convert) for grad, spec in zip(grads, ctx.specs, strict=True)]


def _to_dtensor(
    grad: torch.Tensor | None, spec: DTensorSpec, convert: Callable[[torch.Tensor, DTensorSpec], DTensor]
) -> DTensor | None:
    if grad is None or type(grad) is not torch.Tensor:
        return _as_dtensor(grad, spec)
    if not grad.is_contiguous():
        grad = grad.contiguous()
    elif grad_refcount(grad) > 1:  # another parameter gets the same tensor, and each accumulates in place
        grad = grad.clone()
    return convert(grad, spec)


def _as_dtensor(grad: torch.Tensor | None, spec: DTensorSpec) -> DTensor | None:
    if grad is None:
        return None
    return DTensor.from_local(
        grad.contiguous() if _is_plain(grad) else grad,
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride,
    )


# 6. The local tensor as users see it: flags and hooks are the parameter's.


def _refuse_draw(name: str) -> Any:
    def draw(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_unsplit(self):
            return getattr(torch.Tensor, name)(self, *args, **kwargs)
        raise PlanError(
            f"weight.{name}() on a split model would fill only this rank's local tensor, so that shards get equal "
            "numbers, or replicas different ones: call titanplans.modeling.initialize(model, seed=0), or fill it "
            "before the split, or load full tensors with model.load_state_dict"
        )

    return draw


class LocalData(torch.Tensor):
    """This rank's local tensor of a parameter. Operations see a plain tensor, without the cost of `__torch_function__`.

    It refuses random fills, such as those of `torch.nn.init`: with one seed all ranks would get equal heads, with
    different seeds unequal replicas.
    """

    __torch_function__ = disabled_torch_function  # pyrefly: ignore[bad-override]
    parameter: torch.Tensor
    """The DTensor."""

    normal_, log_normal_, uniform_, random_ = map(
        _refuse_draw, ("normal_", "log_normal_", "uniform_", "random_")
    )
    bernoulli_, exponential_, geometric_, cauchy_ = map(
        _refuse_draw, ("bernoulli_", "exponential_", "geometric_", "cauchy_")
    )

    def new_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a plain tensor whose `normal_` is refused: `torch.nn.init.orthogonal_` draws into it, and copies it."""
        empty = super().new_empty(*args, **kwargs)
        if not _is_unsplit(self):
            empty.normal_ = self.normal_  # type: ignore[method-assign]
        return empty


class LocalWeight(LocalData):
    """The tensor that `module.weight` returns. Any result computed from it is a plain tensor.

    An attribute that a user sets (`requires_grad`, `grad`, hooks) is set on the DTensor, which optimizers and state dicts
    hold. On the local tensor it would be lost, since each access makes a new one.
    """

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.parameter.requires_grad = value

    def requires_grad_(self, mode: bool = True) -> "LocalWeight":
        self.parameter.requires_grad_(mode)
        return self

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.parameter.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.parameter.grad = value

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        data: Any = self.detach()
        data.__class__ = LocalData
        data.parameter = self.parameter
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise PlanError(
            "weight.data = ... on a split module would replace only a view of this rank's local tensor: write into "
            "it, weight.data.copy_(local), or load full tensors with model.load_state_dict"
        )

    def register_hook(self, hook: Any) -> Any:
        return self.parameter.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        return self.parameter.register_post_accumulate_grad_hook(hook)

    def retain_grad(self) -> None:
        """Do nothing, as on any parameter: a leaf keeps its gradient anyway."""


def _is_unsplit(local: Any) -> bool:
    """Whether the parameter is on one rank only."""
    # If FSDP2 or DDP sums the gradients over the CP ranks, the parameter may be a plain tensor.
    mesh = getattr(local.parameter, "device_mesh", None)
    return mesh is not None and mesh.size() == 1


def _as_weight(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Turn `local`, which is not the DTensor's own local tensor, into a `LocalWeight` of `parameter`, in place.

    A traced tensor or another subclass of Tensor (fake, float8) is returned unchanged.
    """
    if not _is_plain(local):
        return local
    weight: Any = local
    weight.__class__ = LocalWeight  # not an operation, so autograd records nothing
    weight.parameter = parameter
    return weight
