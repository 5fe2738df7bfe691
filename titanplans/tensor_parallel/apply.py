"""`apply_plan`: a plan onto a model, strictly, in place; `check_plan`: the same refusals without a mesh.

What can be refused is refused before a weight moves. Afterwards every parameter is a DTensor on the TP mesh, and tied
weights are one. A foreign `ParallelStyle` says what it does only by doing it: what it leaves undone is an error then.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanplans.errors import PlanError
from titanplans.tensor_parallel.block_parameters import read_together
from titanplans.tensor_parallel.checks import Checked, check
from titanplans.tensor_parallel.custom import PlanSource, resolve_plan
from titanplans.tensor_parallel.decoder import Decoder, join
from titanplans.tensor_parallel.first_forward import check_first_forward
from titanplans.tensor_parallel.float8 import Crossing
from titanplans.tensor_parallel.generation import let_generate
from titanplans.tensor_parallel.inputs import Forwards, guard_forwards
from titanplans.tensor_parallel.layout import Layout
from titanplans.tensor_parallel.local_code import set_attributes, set_functions
from titanplans.tensor_parallel.local_parameters import ParameterMemo, localize
from titanplans.tensor_parallel.low_rank import place_dropout
from titanplans.tensor_parallel.plan import Plan, TPOptions, TPPlan
from titanplans.tensor_parallel.replaced import parameters_of, retire_replaced
from titanplans.tensor_parallel.stream import Border, keep_border
from titanplans.tensor_parallel.styles import Style, layouts_at, mark, target
from titanplans.tensor_parallel.vocab import VocabHead
from titanplans.tensor_parallel.whole_methods import refuse_whole_methods


@dataclass(frozen=True)
class AppliedPlan:
    """What `apply_plan` did to a model: read this instead of the model's modules."""

    plan: TPPlan
    styles: Plan
    """The style of each module, by fully qualified name."""
    layouts: dict[str, Layout]
    """How each parameter and its gradient lie on the mesh, by fully qualified name; not those of a foreign style."""
    crossings: dict[str, Crossing]
    """How a sequence crosses the border of a region or of the head in float8, by plan key."""
    decoder: Decoder
    """The parts of the model, as they were found before it was split."""
    mesh: DeviceMesh
    """The 1-D TP mesh."""


def check_plan(
    model: nn.Module,
    tp_degree: int,
    *,
    loss_parallel: bool = True,
    sequence_parallel: bool = True,
    sequence_dim: int = 1,
    plan: PlanSource = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Resolve the plan of `model` and check it, moving nothing and needing no process group.

    Args:
        model: a causal language model, on any device, meta included.
        tp_degree: number of ranks over which each layer is to be split.
        loss_parallel: keep the logits sharded over the vocabulary.
        sequence_parallel: shard the sequence between the regions.
        sequence_dim: the dimension of the hidden states that is the sequence.
        plan: a plan of the user's own (a TPPlan class, its "module:Class", or a dict of module
            names and styles); None looks up the one registered for `model.config.model_type`,
            or for a model without one by its own `model_type`, or its class's name.
        dtype: to which the weights are cast for products, by FSDP2's mixed precision; None: they stay as they are.

    Returns:
        The styles by fully qualified module name.

    Raises:
        PlanError: there is no such plan; a key matches no module; a parameter is covered by no key;
            a split module stands outside a region; the heads of a split mixer are not found; the degree
            does not divide a size.
    """
    options = TPOptions(tp_degree, loss_parallel, sequence_parallel, sequence_dim)
    return check(resolve_plan(plan, model, options), model, dtype=dtype).styles


def apply_plan(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    *,
    loss_parallel: bool = True,
    sequence_parallel: bool = True,
    sequence_dim: int = 1,
    plan: PlanSource = None,
    dtype: torch.dtype | None = None,
) -> AppliedPlan:
    """Split `model` over the 1-D mesh `tp_mesh`, in place. Before activation checkpointing, compile, FSDP and the optimizer.

    The model keeps its interface: token ids in, logits out, both whole on every rank (the logits a
    DTensor, `Shard(-1)`, if `loss_parallel`). Its parameters may lie on meta; real ones are taken
    from the mesh's first rank.

    Args and errors: see `check_plan`.
    """
    if not isinstance(tp_mesh, DeviceMesh):
        raise PlanError(
            f"apply_plan needs a 1-D DeviceMesh, got {tp_mesh!r}: give mesh['tp'] of init_device_mesh, or "
            "manager.mesh.get_mesh('tp')"
        )
    if tp_mesh.ndim != 1:
        raise PlanError(
            f"apply_plan needs a 1-D mesh, got {tp_mesh.ndim} dimensions {tp_mesh.mesh_dim_names}: slice it"
        )
    options = TPOptions(tp_mesh.size(), loss_parallel, sequence_parallel, sequence_dim)
    source = resolve_plan(plan, model, options)
    checked = check(source, model, dist.get_backend(tp_mesh.get_group()), dtype)

    whole = parameters_of(model)
    for name, functions in checked.functions.items():
        set_functions(model.get_submodule(name), functions, tp_mesh)
    memo, layouts = ParameterMemo(), {}
    for key, style in checked.styles.items():
        found = target(key, model)
        if isinstance(style, Style):
            own = layouts_at(found, style, checked.styles)
            layouts |= {join(found.path, name): layout for name, layout in own.items()}
            if found.parameter is None:
                mark(found.module, key, checked.crossings.get(key))
                style.apply(found.module, tp_mesh, own, memo)
            else:
                localize(found.module, tp_mesh, own, memo)
                place_dropout(found.module, own, tp_mesh.get_local_rank(), tp_mesh.size())
        elif style._apply(found.module, tp_mesh) is not found.module:
            reason = "it replaced the module; a style works in place"
            raise PlanError(reason, key=key, style=style, module=found.module)
    _check_distributed(model, checked.styles)
    _check_still_tied(model, checked.tied)
    retire_replaced(model, whole)

    for name, attributes in checked.attributes.items():
        set_attributes(model.get_submodule(name), attributes)
    read_together(model.get_submodule(name) for names in checked.decoder.block_lists for name in names)
    border = Border(tp_mesh, source.stream)
    _guard(model, border, checked, loss_parallel)
    keep_border(model, border)
    let_generate(model)
    refuse_whole_methods(model)
    check_first_forward(model, model.get_submodule(checked.decoder.base), tp_mesh)
    return AppliedPlan(source, checked.styles, layouts, checked.crossings, checked.decoder, tp_mesh)


def _guard(model: nn.Module, border: Border, checked: Checked, loss_parallel: bool) -> None:
    decoder, sharded = checked.decoder, border.stream.dim is not None
    config = getattr(model, "config", None)
    # Some of flash-linear-attention's models have one field for both, which fuses the head when they train.
    fused_loss = getattr(config, "fuse_linear_cross_entropy", getattr(config, "fuse_cross_entropy", False))
    heads = [key for key, style in checked.styles.items() if isinstance(style, VocabHead)]
    known = Forwards(
        border,
        own_loss=not loss_parallel and not fused_loss,
        has_head=decoder.head is not None,
        ends_early=decoder.base != "" and decoder.head in heads,
        begins_at_embedding=sharded and checked.begins_at is None,
    )
    guard_forwards(model, model.get_submodule(decoder.base), checked.begins_at, known)


def _check_distributed(model: nn.Module, styles: Plan) -> None:
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            key = name.rpartition(".")[0]
            reason = f"it left parameter '{name}' a plain tensor"
            raise PlanError(reason, key=key, style=styles[key], module=model.get_submodule(key))


def _check_still_tied(model: nn.Module, groups: list[list[str]]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for names in groups:
        if len({id(parameters[name]) for name in names}) > 1:
            raise PlanError(
                f"parameters {' and '.join(names)} were tied and no longer are: give both a style of this plan"
            )
