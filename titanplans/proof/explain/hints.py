"""What a plan may have got wrong at a place that the numbers show, and the style that would sum a gradient."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.plan.options import TPOptions
from titanplans.plan.plan import TPPlan
from titanplans.split.decoder import Decoder, within
from titanplans.styles.base import Style, native_styles


def packed_around(name: str, styles: Mapping[str, ParallelStyle]) -> dict[str, Style]:
    """Return the packed projections in the innermost region around the module `name`, by their names in the region."""
    own = native_styles(styles)
    around = [key for key in own if own[key].opens and (name == key or within(name, key))]
    region = max(around, key=len, default=None)
    return {
        key.removeprefix(f"{region}."): style
        for key, style in own.items()
        if region is not None and style.sections and within(key, region)
    }


def sections_to_check(name: str, styles: Mapping[str, ParallelStyle]) -> str:
    """Return the packed sections in the region around the module `name`, which its code may split otherwise; "" if none."""
    found = {
        key: " + ".join(str(s if isinstance(s, int) else s.size) for s in style.sections)
        for key, style in packed_around(name, styles).items()
    }
    said = " and of ".join(f"{key} ({sections})" for key, sections in found.items())
    return f"check the sections of {said} against the order in which the code splits them" if found else ""


def added_loss_to_name(plan: TPPlan, model: nn.Module, *, adds_loss: bool) -> str:
    """Return what `plan` has to say of a loss that the whole `model` adds; "" if it does, or if there is none."""
    if not adds_loss or plan.model_functions(model):
        return ""
    return (
        f"the model adds a loss to that of its logits, and model_functions of {type(plan).__name__} is empty: name the "
        "function that computes it there with self.count_once, or each rank counts it by itself"
    )


def summing_style(
    name: str,
    styles: Mapping[str, ParallelStyle],
    order: Sequence[str],
    decoder: Decoder,
    options: TPOptions,
) -> str:
    """Return the style that sums the gradient of a replicated parameter over the ranks, as a plan calls it; "" if unclear.

    In a region it is the region's; behind its sum and outside of regions the stream's, where each rank has a share of the
    gradient only with sequence parallelism. `order` has the modules as they finished in the whole model's forward. Foreign
    styles don't say where regions are.
    """
    own, module = native_styles(styles), name.rpartition(".")[0]
    around = [key for key in own if module == key or within(module, key)]
    if len(own) < len(styles) or any(own[key].runs_unsplit for key in around):
        return ""
    region = max((key for key in around if own[key].opens), key=len, default=None)
    if region is None:
        on_stream = module == decoder.norm or any(within(module, block) for block in decoder.names)
    else:
        closing = [key for key, style in own.items() if style.closes and within(key, region)]
        if module == region and closing and options.sequence_parallel:
            return ""  # the module's code may read the parameter on either side of the sum
        finished = {key: at for at, key in enumerate(order)}
        on_stream = any(finished.get(key, len(order)) < finished.get(module, -1) for key in closing)
    if not on_stream:
        return "" if region is None else "replicated_in_region()"
    return "replicated_on_stream()" if options.sequence_parallel else ""
