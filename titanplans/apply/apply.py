"""`apply_plan` checks a plan and splits a model according to it, in place; `check_plan` only checks, without a mesh."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanplans.adapters.low_rank import place_dropout
from titanplans.apply.check import Checked, check
from titanplans.apply.ways import ByExperts, ByTokens, ByWeights, NoSplit, Way
from titanplans.config.compatibility.strategy import NO_CAPACITY
from titanplans.errors import PlanError
from titanplans.plan.custom import PlanSource, resolve_plan
from titanplans.plan.degrees import Degrees
from titanplans.plan.options import TPOptions
from titanplans.plan.plan import Plan, TPPlan
from titanplans.plan.resolve import Entry, ResolvedPlan
from titanplans.split.border import Border
from titanplans.split.converted import Crossing, is_float8
from titanplans.split.decoder import AbsentModule, Decoder, join
from titanplans.split.generation import let_generate
from titanplans.split.guards.first_forward import check_first_forward
from titanplans.split.guards.inputs import ForwardFacts, guard_forwards
from titanplans.split.guards.unsupported_methods import refuse_unsupported_methods
from titanplans.split.layout import Layout
from titanplans.split.local_code import set_attributes, set_functions
from titanplans.split.meshes import SplitMeshes, meshes_of
from titanplans.split.module_weight import localize_blocks_at_once
from titanplans.split.parameters.loaded_state import load_as_shards
from titanplans.split.parameters.replaced import parameters_of, retire_replaced
from titanplans.split.stages.stage import StandInModule
from titanplans.split.state import make_state
from titanplans.split.stream import begin_at_output, end_at_output, follow_forwards


@dataclass(frozen=True)
class AppliedPlan:
    """The result of `apply_plan`. Later code asks this object, not the model's modules, how the model is split."""

    resolved: ResolvedPlan
    """The resolved plan: its styles with their modules and layouts, and the parts of the model before the split."""
    crossings: dict[str, Crossing]
    """Which tensors cross the border of a region or of the head in float8, by plan key."""
    border: Border
    """The border of the residual stream."""

    @property
    def plan(self) -> TPPlan:
        """The `TPPlan`, with its options."""
        return self.resolved.source

    @property
    def styles(self) -> Plan:
        """The style of each plan key; keys are fully qualified names."""
        return self.resolved.styles

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each parameter by fully qualified name, except for parameters with a foreign style."""
        return {
            join(e.path, name): layout
            for e in self.resolved.entries
            for name, layout in e.layouts.items()
            if name in e.module._parameters
        }

    @property
    def decoder(self) -> Decoder:
        """The parts of the model before it was split."""
        return self.resolved.decoder

    @property
    def mesh(self) -> DeviceMesh:
        """The 1-D mesh of all tp x cp ranks, which work on the same batch."""
        return self.border.meshes.tp_cp


def check_plan(
    model: nn.Module,
    degrees: Degrees,
    *,
    loss_parallel: bool = True,
    sequence_parallel: bool = True,
    sequence_dim: int = 1,
    plan: PlanSource = None,
    derive: bool = False,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Resolve the plan of `model` and check it, without a process group; the model is not changed.

    Args:
        model: a causal language model, on any device, meta included.
        degrees: `tp`, `cp` and `ep` are used.
        loss_parallel: keep the logits sharded over the vocabulary.
        sequence_parallel: shard the sequence between regions.
        sequence_dim: the sequence dimension of the hidden states.
        plan: a user's plan: a TPPlan class, a dict of module names and styles, a function that returns such a dict, or the
            "module:name" of one of these. None: the plan registered for `model.config.model_type`, or, for a model without
            a config, for its own `model_type` or class name.
        derive: if `plan` is None and no plan is registered, use the plan that `titanplans derive --keep` has proved for a
            model of this structure. Nothing is derived here.
        dtype: dtype of the weights in products, if FSDP2's mixed precision casts them. None: the parameters' dtype.

    Returns:
        The styles by fully qualified module name.

    Raises:
        PlanError: there is no plan, or none is kept; a key matches no module; a parameter is covered by no key; a split
            module is outside of a region; the head count of a split mixer is unknown; the degree does not divide a size.
    """
    if not isinstance(degrees, Degrees):
        raise PlanError(f"degrees = {degrees!r}: pass titanplans.Degrees(tp=..., cp=..., ep=...)")
    options = TPOptions(degrees, loss_parallel, sequence_parallel, sequence_dim)
    return check(resolve_plan(plan, model, options, derive=derive), model, dtype=dtype).plan.styles


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    loss_parallel: bool = True,
    sequence_parallel: bool = True,
    sequence_dim: int = 1,
    plan: PlanSource = None,
    derive: bool = False,
    dtype: torch.dtype | None = None,
    experts: DeviceMesh | None = None,
    expert_capacity_factor: float | None = None,
    sum_over_cp: bool = True,
) -> AppliedPlan:
    """Split `model` over `mesh`, in place. Call it before activation checkpointing, compile, FSDP and the optimizer.

    The model keeps its interface: full token ids in, logits out, on every rank (with `loss_parallel` the logits are a
    DTensor, `Shard(-1)`). With context parallelism the logits are a DTensor sharded over the tokens. A rank's loss then
    covers only its local tokens, so its loss and its gradients are partial sums. Parameters may be on meta; if they are
    not, the values on the mesh's first rank are used. All checks are made before a weight moves, with one exception: a
    style that is not titanplans' own (a foreign `ParallelStyle`) is checked after it was applied.

    Args:
        model: see `check_plan`, also for the other arguments and the errors.
        mesh: with the dimensions "tp" (tensor parallelism), "cp" (context parallelism) or both. A 1-D mesh without names is
            the mesh of "tp".
        experts: mesh whose last dimension, "ep", has the ranks that the experts are distributed over: neighbouring ranks
            that include those of "tp". A dimension before "ep" replicates the experts. None: each expert's width is split
            over "tp".
        expert_capacity_factor: an expert takes from each rank at most this factor times the rank's mean number of tokens
            per expert; further tokens, the last ones of the batch, are dropped. None: no token is dropped.
        sum_over_cp: True: parameters become DTensors replicated over "cp", and `align_gradients`, the gradient norm and
            FSDP2 over the other mesh dimensions sum their gradients. False: FSDP2 or DDP over a mesh that includes the
            ranks of "cp" sums the gradients, and must not average them.
    """
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"apply_plan needs a DeviceMesh, got {mesh!r}: pass mesh['tp'] of init_device_mesh, or "
            "manager.mesh.get_mesh('tp')"
        )
    names = mesh.mesh_dim_names or ()
    if ("cp" not in names and mesh.ndim != 1) or (set(names) - {"tp", "cp"} and mesh.ndim > 1):
        raise PlanError(
            f"apply_plan needs a mesh of 'tp', 'cp' or both, got {mesh.ndim} dimensions {mesh.mesh_dim_names}: "
            "slice it, as mesh['cp', 'tp']"
        )
    if names == ("tp", "cp"):
        raise PlanError(
            "apply_plan needs a mesh ('cp', 'tp'), got ('tp', 'cp'): call init_device_mesh with "
            "mesh_dim_names=('cp', 'tp'), so that the ranks of a layer are neighbours"
        )
    if not sum_over_cp and "cp" not in names:
        raise PlanError(
            f"sum_over_cp = False: a mesh of {', '.join(names) or 'one dimension'} has no 'cp' to sum over; omit it"
        )
    if experts is not None and (experts.ndim > 2 or (experts.mesh_dim_names or ("",))[-1] != "ep"):
        raise PlanError(
            f"experts needs a mesh of 'ep', or of replicas and 'ep', got {experts.ndim} dimensions "
            f"{experts.mesh_dim_names}: slice it, as mesh['efsdp', 'ep']"
        )
    meshes = meshes_of(mesh)
    degrees = Degrees(
        tp=1 if meshes.tp is None else meshes.tp.size(),
        cp=1 if meshes.cp is None else meshes.cp.size(),
        ep=1 if experts is None else experts.size(experts.ndim - 1),
    )
    options = TPOptions(degrees, loss_parallel, sequence_parallel, sequence_dim)
    resolved = resolve_plan(plan, model, options, derive=derive)
    checked = check(resolved, model, dist.get_backend(mesh.get_group(0)), dtype)
    way = choose_way(checked, meshes, experts, expert_capacity_factor, sum_over_cp=sum_over_cp)
    return split(checked, way)


def choose_way(
    checked: Checked,
    meshes: SplitMeshes,
    experts: DeviceMesh | None = None,
    capacity: float | None = None,
    *,
    sum_over_cp: bool,
) -> Way:
    """Return how to split a model by a checked plan: by weights, also by tokens if there is a CP mesh, and also by experts
    if `experts` is a mesh of several ranks."""
    way: Way
    if meshes.cp is not None:
        way = ByTokens(checked.plan, meshes, sum_over_cp=sum_over_cp)
    elif meshes.tp_cp.size() == 1 and experts is not None:
        way = NoSplit(meshes.tp_cp)
    else:
        way = ByWeights(meshes, checked.plan.source.options.stream)
    if capacity is not None and not capacity > 0:
        raise PlanError(
            f"expert_capacity_factor = {capacity}: it has to be above 0, or None to drop no token"
        )
    if experts is None or experts.size(experts.ndim - 1) == 1:
        if capacity is not None:
            raise PlanError(f"expert_capacity_factor = {capacity}: {NO_CAPACITY}")
        return way
    return ByExperts(way, experts, capacity)


def split(checked: Checked, way: Way) -> AppliedPlan:
    """Split a model, in place, according to a plan that has been checked against it."""
    plan, model = checked.plan, checked.plan.model
    before = parameters_of(model)
    split_ids: set[tuple[int, str | None]] = set()
    for key, style in plan.styles.items():
        if (entry := plan.by_key.get(key)) is not None:
            # Blocks may share a module, which then has a key for each block.
            if (module_id := (id(entry.module), entry.parameter)) not in split_ids:
                split_ids.add(module_id)
                _split_entry(entry, way, checked.crossings.get(key))
        # A foreign style is applied by torch's private method, as parallelize_module does.
        elif style._apply(module := model.get_submodule(key), way.mesh) is not module:
            reason = "it replaced the module; a style works in place"
            raise PlanError(reason, key=key, style=style, module=module)
    # A foreign style declares nothing: the parameters that it did not distribute are known only now.
    if way.distributes:
        _check_distributed(plan)
    load_as_shards(model)
    _check_still_tied(model, checked.tied)
    retire_replaced(model, before)

    for name in _once(model, checked.functions):
        set_functions(model.get_submodule(name), checked.functions[name], way.ranks)
    for name in _once(model, checked.attributes):
        set_attributes(model.get_submodule(name), checked.attributes[name])
    decoder = plan.decoder
    localize_blocks_at_once(model.get_submodule(name) for names in decoder.block_lists for name in names)
    make_state(model).border = way.border
    # On a pipeline stage without these modules, their stand-ins begin and end the stream.
    for name in plan.begin_stream:
        if isinstance(module := model.get_submodule(name), StandInModule):
            begin_at_output(module, way.border.stream)
    for name in plan.end_stream:
        if isinstance(module := model.get_submodule(name), AbsentModule):
            end_at_output(module, way.border.stream)
    _follow_forwards(plan, way.border)
    let_generate(model)
    refuse_unsupported_methods(model)
    check_first_forward(
        model, model.get_submodule(decoder.base), way.mesh, way.distributes, sum_over_cp=way.sum_over_cp
    )
    return AppliedPlan(plan, checked.crossings, way.border)


def _once(model: nn.Module, names: Iterable[str]) -> Iterator[str]:
    """Yield one name for each module: blocks may share a module."""
    seen: set[int] = set()
    for name in names:
        if (module := id(model.get_submodule(name))) not in seen:
            seen.add(module)
            yield name


def _split_entry(entry: Entry, way: Way, crossing: Crossing | None) -> None:
    """Split the parameters of `entry` and, if its key names a module, the module's input and output."""
    module, border = entry.module, way.border
    if entry.parameter is None:
        state = make_state(module)
        state.key, state.style = entry.key, entry.style
        # Without tensor parallelism each rank scales its local tokens to float8 independently, as under data parallelism.
        by_weights = border.mesh is not None
        if by_weights and is_float8(module):
            from titanplans.precision.float8.linear import split_linear  # imports torchao

            # Before the parameters are distributed: for a packed weight, `localize` makes a subclass that wraps the forward,
            # and it has to wrap the float8 forward.
            split_linear(module, entry.style, way.ranks)
        in_float8 = [] if crossing is None else [side for side, why in crossing.items() if why is None]
        if by_weights and in_float8:
            from titanplans.precision.float8.border import Float8Border  # imports torchao

            border = Float8Border(
                border, module, enter="activations" in in_float8, leave="gradients" in in_float8
            )
    way.lay_out(entry)
    place_dropout(module, entry.layouts, way.border)
    if entry.parameter is None:
        way.install(entry, border)


def _follow_forwards(plan: ResolvedPlan, border: Border) -> None:
    model, decoder = plan.model, plan.decoder
    base = model.get_submodule(decoder.base)
    config, loss_parallel = getattr(model, "config", None), plan.source.options.loss_parallel
    # Some models of flash-linear-attention have only `fuse_cross_entropy`, which in training fuses the head, too.
    fused_loss = getattr(config, "fuse_linear_cross_entropy", getattr(config, "fuse_cross_entropy", False))
    heads = [entry.key for entry in plan.entries if entry.style.makes_logits]
    facts = ForwardFacts(
        border,
        can_compute_loss=not loss_parallel and not fused_loss and border.tokens.ranks == 1,
        has_head=decoder.head is not None,
        can_end_before_head=decoder.base != "" and decoder.head in heads,
    )
    guard_forwards(model, base, facts)
    begins_at = None if plan.begins_at is None else model.get_submodule(plan.begins_at)
    follow_forwards(border.stream, model, base, begins_at, has_head=facts.has_head)


def _check_distributed(plan: ResolvedPlan) -> None:
    for name, param in plan.model.named_parameters():
        if not isinstance(param, DTensor):
            key = name.rpartition(".")[0]
            reason = f"it left parameter '{name}' a plain tensor"
            raise PlanError(reason, key=key, style=plan.styles[key], module=plan.module_at(key))


def _check_still_tied(model: nn.Module, groups: Iterable[list[str]]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for names in groups:
        if len({id(parameters[name]) for name in names}) > 1:
            raise PlanError(
                f"parameters {' and '.join(names)} were tied and no longer are: give both a style of this plan"
            )
