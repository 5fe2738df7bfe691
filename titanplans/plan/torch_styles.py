"""Complete and check a plan that has only torch's own styles, as for torch's `parallelize_module`: `complete`.

Such a dict leaves out the modules that every rank computes in full, and its styles declare nothing that the usual checks
need. So the checks here refuse what torch would compute wrongly.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from titanplans.errors import PlanError
from titanplans.plan.plan import Plan, TPPlan
from titanplans.split.decoder import Decoder, within
from titanplans.styles.base import Style


def has_only_torch_styles(plan: Plan) -> bool:
    """Return whether a plan has styles, and none of them is of titanplans."""
    return bool(plan) and not any(isinstance(style, Style) for style in plan.values())


def complete(plan: Plan, model: nn.Module, decoder: Decoder, source: TPPlan) -> Plan:
    """Return a plan of torch's styles with the modules that it leaves out, which are replicated.

    Raises:
        PlanError: a module inside a split mixer or MLP is left out, so its gradient would be partial; the degree does not
            divide a mixer's heads or a width; a tied parameter has a style; or the styles of the embedding and of the head
            contradict the options.
    """
    options = source.options
    if options.degrees.tp > 1:
        _check_tied(plan, model)
        _check_heads(plan, decoder, source)
        if options.sequence_parallel:
            raise PlanError(
                "sequence_parallel = True: a dict of torch's styles alone does not shard the sequence for the model's "
                "code; set it to False (parallelism.enable_sequence_parallel = false in a job), or use the styles' names "
                "of titanplans, such as 'attn_input' and 'replicated_on_stream'"
            )
        _check_embedding(plan, decoder, model)
        _check_logits(plan, decoder, options.loss_parallel)
    regions = [name for name in (*decoder.mixers, *decoder.mlps) if any(_is_in(key, name) for key in plan)]
    for key, style in plan.items():
        if any(_is_in(key, region) for region in regions):
            _check_width(key, style, model, options.degrees.tp)
    left_out = {
        name: module
        for name, module in model.named_modules()
        if name not in plan and any(parameter is not None for parameter in module._parameters.values())
    }
    for name, module in left_out.items():
        region = next((region for region in regions if _is_in(name, region)), None)
        if region is not None:
            raise PlanError(
                f"'{name}' ({type(module).__name__}) has no style, but {region} is split, so its gradient would cover "
                "only one rank's heads; give it torch's SequenceParallel(sequence_dim=2, use_local_output=True) if it is a "
                "norm over each head, or use the styles' names of titanplans"
            )
    return plan | {name: source.replicated_off_stream() for name in left_out}


def _is_in(name: str, module: str) -> bool:
    return name == module or within(name, module)


def _check_tied(plan: Plan, model: nn.Module) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied_names in names.values():
        if len(tied_names) > 1 and any(name.rpartition(".")[0] in plan for name in tied_names):
            raise PlanError(
                f"{' and '.join(tied_names)} are tied, and torch's styles would replace each by a parameter of its "
                "own; leave their modules out of the dict, which replicates them, or use the styles' names of titanplans, "
                "such as 'vocab_embedding' and 'vocab_head'"
            )


def _check_width(key: str, style: Any, model: nn.Module, degree: int) -> None:
    """Refuse a Linear whose width the degree does not divide, since torch's styles pass plain tensors of equal size."""
    module = model.get_submodule(key)
    if not isinstance(module, nn.Linear) or not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    name = "out_features" if isinstance(style, ColwiseParallel) else "in_features"
    if (size := getattr(module, name)) % degree:
        reason = f"tensor_parallel_degree = {degree} does not divide {name} = {size}, and torch's styles need equal shards"
        remedy = "lower the degree, or use the styles' names of titanplans, which allow any width"
        raise PlanError(f"{reason}; {remedy}", key=key, style=style, module=module)


def _check_heads(plan: Plan, decoder: Decoder, source: TPPlan) -> None:
    degree = source.options.degrees.tp
    for name, mixer in decoder.mixers.items():
        if not any(_is_in(key, name) for key in plan):
            continue
        for attribute, count in source.heads(mixer).items():
            if count % degree:
                raise PlanError(
                    f"tensor_parallel_degree = {degree} does not divide {attribute} = {count} ({name}), and torch's "
                    "styles share no head among ranks; lower the degree, or use 'kv_colwise' and titanplans' other styles"
                )


def _check_embedding(plan: Plan, decoder: Decoder, model: nn.Module) -> None:
    key = decoder.embedding
    style = None if key is None else plan.get(key)
    if style is None or not any(
        layout.is_shard(1) for layout in getattr(style, "output_layouts", None) or ()
    ):
        return
    raise PlanError(
        "its output is sharded over the sequence, but the model computes positions and masks from its shape; make its "
        "output_layouts Replicate(), or use the styles' names of titanplans, such as 'vocab_embedding'",
        key=key,
        style=style,
        module=model.get_submodule(key or ""),
    )


def _check_logits(plan: Plan, decoder: Decoder, loss_parallel: bool) -> None:
    """Refuse a style of the head whose logits are gathered although `loss_parallel` needs them sharded, or the reverse."""
    style: Any = None if decoder.head is None else plan.get(decoder.head)
    if decoder.head is None or (style is not None and not hasattr(style, "output_layouts")):
        return  # a style of the user's own class says nothing about its output
    layouts = () if style is None else style.output_layouts
    is_gathered = style is None or (
        style.use_local_output and all(layout.is_replicate() for layout in layouts)
    )
    is_sharded = style is not None and not style.use_local_output and any(x.is_shard() for x in layouts)
    if not (is_sharded if loss_parallel else is_gathered):
        needed = (
            "ColwiseParallel(use_local_output=False)"
            if loss_parallel
            else "ColwiseParallel(output_layouts=Replicate())"
        )
        other = "disable_loss_parallel = true" if loss_parallel else "disable_loss_parallel = false"
        raise PlanError(
            f"plan key '{decoder.head}': loss_parallel = {loss_parallel} needs logits that are "
            f"{'sharded' if loss_parallel else 'gathered'}; give it {needed}, or set loss_parallel = {not loss_parallel} "
            f"(parallelism.{other} in a job)"
        )
