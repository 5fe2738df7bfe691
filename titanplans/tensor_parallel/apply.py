"""`apply_plan`: a plan onto a model, strictly, in place; `check_plan`: the same refusals without a mesh.

Everything that can be refused is refused before a weight moves. Afterwards every parameter is a
DTensor on the TP mesh, and tied weights are one. A `ParallelStyle` that is not ours says what it
does only by doing it: what such a one leaves undone is found afterwards, and is an error then.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanplans.errors import PlanError
from titanplans.tensor_parallel.checks import (
    check_coverage,
    check_degree,
    check_keys,
    check_mixers,
    check_regions,
    check_styles,
    check_tied,
    sizes,
    tied_parameters,
)
from titanplans.tensor_parallel.custom import PlanSource, resolve_plan
from titanplans.tensor_parallel.decoder import Decoder, find_decoder, join
from titanplans.tensor_parallel.float8 import recipe_of
from titanplans.tensor_parallel.float8_checks import (
    Crossing,
    check_float8,
    check_torchao_styles,
    float8_crossings,
)
from titanplans.tensor_parallel.inputs import begin_stream, guard_inputs
from titanplans.tensor_parallel.local_parameters import Layout, ParameterMemo
from titanplans.tensor_parallel.plan import Plan, TPOptions, TPPlan
from titanplans.tensor_parallel.stream import Border
from titanplans.tensor_parallel.styles import Colwise, Style
from titanplans.tensor_parallel.user_code import as_user_error
from titanplans.tensor_parallel.vocab import VocabEmbedding


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
) -> Plan:
    """Resolve the plan of `model` and check it, moving nothing and needing no process group.

    Args:
        model: a causal language model, on any device, meta included.
        tp_degree: number of ranks over which each layer is to be split.
        loss_parallel: keep the logits sharded over the vocabulary.
        sequence_parallel: shard the sequence between the regions.
        sequence_dim: the dimension of the hidden states that is the sequence.
        plan: a plan of the user's own (a TPPlan class, its "module:Class", or a dict of module
            names and styles); None looks up the one registered for `model.config.model_type`.

    Returns:
        The styles by fully qualified module name.

    Raises:
        PlanError: there is no such plan; a key matches no module; a parameter is covered by no key;
            a split module stands outside a region; the degree does not divide a size.
    """
    recipe = recipe_of(model)
    options = TPOptions(tp_degree, loss_parallel, sequence_parallel, sequence_dim, recipe)
    return _checked(resolve_plan(plan, model, options), model, find_decoder(model, required=False))


def _checked(source: TPPlan, model: nn.Module, decoder: Decoder) -> Plan:
    options = source.options
    name = type(source).__name__
    with as_user_error(f"plan {name}"):
        styles = source.full_plan(model)
    check_keys(styles, model, name)
    check_coverage(styles, model, name)
    check_regions(styles)
    check_mixers(styles, decoder, options)
    check_styles(styles, model)
    check_tied(styles, model)
    check_degree(list(sizes(styles, source, model, decoder)), options)
    check_float8(styles, model, options.degree)
    check_torchao_styles(styles, model)
    return styles


def apply_plan(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    *,
    loss_parallel: bool = True,
    sequence_parallel: bool = True,
    sequence_dim: int = 1,
    plan: PlanSource = None,
) -> AppliedPlan:
    """Split `model` over the 1-D mesh `tp_mesh`, in place. Before activation checkpointing, compile and FSDP.

    The model keeps its interface: token ids in, logits out, both whole on every rank (the logits a
    DTensor, `Shard(-1)`, if `loss_parallel`). Its parameters may lie on meta; real ones are taken
    from the mesh's first rank.

    Args and errors: see `check_plan`.
    """
    if tp_mesh.ndim != 1:
        raise PlanError(
            f"apply_plan needs a 1-D mesh, got {tp_mesh.ndim} dimensions {tp_mesh.mesh_dim_names}: slice it"
        )
    recipe = recipe_of(model)
    options = TPOptions(tp_mesh.size(), loss_parallel, sequence_parallel, sequence_dim, recipe)
    source = resolve_plan(plan, model, options)
    decoder = find_decoder(model, required=False)
    styles = _checked(source, model, decoder)
    check_torchao_styles(styles, model, dist.get_backend(tp_mesh.get_group()))
    tied = tied_parameters(model)
    memo = ParameterMemo()
    layouts = {
        join(key, name): layout
        for key, style in styles.items()
        if isinstance(style, Style)
        for name, layout in style.layouts(model.get_submodule(key)).items()
    }
    crossings = float8_crossings(styles, model)
    for key, crossing in crossings.items():
        model.get_submodule(key).__dict__["_float8_crossing"] = crossing
    for key, style in styles.items():
        module = model.get_submodule(key)
        module.__dict__["_plan_key"] = key  # for errors at run time
        if isinstance(style, Style):
            style.apply(module, tp_mesh, memo)
        elif style._apply(module, tp_mesh) is not module:
            raise PlanError(
                f"plan key '{key}': {type(style).__name__} replaced the module; a style works in place"
            )
    _check_distributed(model, styles)
    _check_still_tied(model, tied)
    _set_local_attributes(decoder, source, styles)
    begins_stream = _embedding_begins_stream(decoder, styles)
    if sequence_parallel and not begins_stream:
        begin_stream(find_decoder(model).blocks[0].module, Border(tp_mesh, source.stream))
    guard_inputs(model, loss_parallel=loss_parallel, stream=source.stream, begins_stream=begins_stream)
    return AppliedPlan(source, styles, layouts, crossings, decoder, tp_mesh)


def _set_local_attributes(decoder: Decoder, source: TPPlan, styles: Plan) -> None:
    """Let the mixers whose heads are split count this rank's."""
    for name, mixer in decoder.mixers.items():
        inside = [style for key, style in styles.items() if key.startswith(f"{name}.")]
        if any(isinstance(style, Colwise) for style in inside):
            for attribute, value in source.plan_of(mixer).local_attributes(mixer).items():
                setattr(mixer, attribute, value)


def _embedding_begins_stream(decoder: Decoder, styles: Plan) -> bool:
    """Whether the embedding's output is laid out as the stream; a style that is not ours is taken to do it."""
    ours = [style.begins_stream for style in styles.values() if isinstance(style, VocabEmbedding)]
    if ours:
        return any(ours)
    embedding = decoder.embedding
    return embedding is not None and not isinstance(styles[embedding], Style)


def _check_distributed(model: nn.Module, styles: Plan) -> None:
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            key = name.rpartition(".")[0]
            raise PlanError(
                f"plan key '{key}': {type(styles[key]).__name__} left parameter '{name}' a plain tensor"
            )


def _check_still_tied(model: nn.Module, groups: list[list[str]]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for names in groups:
        if len({id(parameters[name]) for name in names}) > 1:
            raise PlanError(
                f"parameters {' and '.join(names)} were tied and no longer are: give both a style of this plan"
            )
