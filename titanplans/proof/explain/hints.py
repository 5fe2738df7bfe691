"""Hints about a wrong plan: packed sections to check, an added loss to name, the style that would sum a gradient."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.plan.options import TPOptions
from titanplans.plan.plan import TPPlan
from titanplans.split.decoder import Decoder, within
from titanplans.styles.base import Style, native_styles


def packed_around(name: str, styles: Mapping[str, ParallelStyle]) -> dict[str, Style]:
    """Return the packed projections in the innermost region around the module `name`, by their names in the region."""
    native = native_styles(styles)
    regions = [key for key in native if native[key].opens and (name == key or within(name, key))]
    region = max(regions, key=len, default=None)
    return {
        key.removeprefix(f"{region}."): style
        for key, style in native.items()
        if region is not None and style.sections and within(key, region)
    }


def sections_to_check(name: str, styles: Mapping[str, ParallelStyle]) -> str:
    """Return a hint to check the packed sections in the region that contains the module `name`; "" if there are none."""
    sizes = {
        key: " + ".join(str(s if isinstance(s, int) else s.size) for s in style.sections)
        for key, style in packed_around(name, styles).items()
    }
    listed = " and of ".join(f"{key} ({sections})" for key, sections in sizes.items())
    return f"check the sections of {listed} against the order in which the code splits them" if sizes else ""


def added_loss_to_name(plan: TPPlan, model: nn.Module, *, adds_loss: bool) -> str:
    """Return a hint to name the function that computes an added loss; "" if `plan` names functions or there is no such loss.

    Args:
        plan: the plan of the model.
        model: unsplit.
        adds_loss: the model added a loss, such as a router's, to the cross entropy.
    """
    if not adds_loss or plan.model_functions(model):
        return ""
    return (
        f"the model adds a loss to the cross entropy, and model_functions of {type(plan).__name__} is empty, so each "
        "rank may add the full loss: return {name of the function that computes it: self.count_once} from model_functions"
    )


def summing_style(
    name: str,
    styles: Mapping[str, ParallelStyle],
    order: Sequence[str],
    decoder: Decoder,
    options: TPOptions,
) -> str:
    """Return the name of the style that would sum the gradient of a replicated parameter over the ranks.

    This is `replicated_in_region()` in a region. After the region's sum and outside of regions it is
    `replicated_on_stream()`, and only with sequence parallelism, since otherwise the gradient there is replicated. Return
    "" if it is not certain which of the two is right.

    Args:
        name: the parameter's name.
        styles: the styles of the plan.
        order: modules in the order in which they finished in the unsplit model's forward.
        decoder: the parts of the unsplit model.
        options: the options of the case.
    """
    native, module = native_styles(styles), name.rpartition(".")[0]
    enclosing = [key for key in native if module == key or within(module, key)]
    # Foreign styles do not say where regions are.
    if len(native) < len(styles) or any(native[key].runs_unsplit for key in enclosing):
        return ""
    region = max((key for key in enclosing if native[key].opens), key=len, default=None)
    if region is None:
        is_on_stream = module == decoder.norm or any(within(module, block) for block in decoder.names)
    else:
        closing = [key for key, style in native.items() if style.closes and within(key, region)]
        if module == region and closing and options.sequence_parallel:
            return ""  # the module's code may use the parameter before or after the sum
        finished = {key: position for position, key in enumerate(order)}
        is_on_stream = any(finished.get(key, len(order)) < finished.get(module, -1) for key in closing)
    if not is_on_stream:
        return "" if region is None else "replicated_in_region()"
    return "replicated_on_stream()" if options.sequence_parallel else ""
