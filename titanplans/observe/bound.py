"""The least communication of a tensor-parallel model: which collectives each of its parts needs, and no more.

    part        sequence parallel: forward; backward             without
    region      all-gather, reduce-scatter; the same             all-reduce; the same
    embedding   reduce-scatter or all-reduce; all-gather         all-reduce; none
    head        all-gather; reduce-scatter                       none; all-reduce
    loss        three all-reduces; none                          the same

A block has one region for its mixer and one for its MLP, where it has them. Regions and ends send
batch x sequence x hidden, the loss batch x sequence (maximum, sum of exponentials, target's logit).
With sequence parallelism: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4.2.2; without: Shoeybi et al. 2019, "Megatron-LM", section 3, which also
has the loss. An embedding's sum may stay whole on every rank, an all-reduce of twice the bytes, for a
model that draws conclusions from it: then the stream begins at the first block's entry, where the
gradient is gathered, so that entry counts with the embedding. Without loss parallelism the head may
gather the logits, once.

Gradients of replicated parameters that are sums over the ranks are no part of this: FSDP or the
optimizer reduces them, once a step. Nor are the scales of float8, a number a tensor or a row.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from titanplans.errors import PlanError
from titanplans.observe.operators import Collective
from titanplans.tensor_parallel.collectives import shard_size
from titanplans.tensor_parallel.decoder import Decoder
from titanplans.tensor_parallel.plan import TPOptions


class Allowance(NamedTuple):
    """One collective that is needed: any of `operations`, of at most `elements` in the whole tensor."""

    operations: tuple[str, ...]
    elements: int
    module: str = ""
    """Fully qualified name of the region that needs it; "" for an end's."""


class Bound(NamedTuple):
    """What a part needs, one of each."""

    forward: tuple[Allowance, ...] = ()
    backward: tuple[Allowance, ...] = ()


def part_of(module: str | None, decoder: Decoder) -> str:
    """Return the part to which what `module` issues belongs.

    The fully qualified name of a block, "embedding", "head" (with the final norm), "loss" (outside of
    the model), or else the module's own name.
    """
    if module is None:
        return "loss"
    if module == decoder.names[0] or _within(module, decoder.embedding):
        return "embedding"
    if _within(module, decoder.head) or _within(module, decoder.norm):
        return "head"
    return next((block for block in decoder.names if _within(module, block)), module or "the model")


def bound(
    model: nn.Module, decoder: Decoder, options: TPOptions, *, batch: int, sequence: int
) -> dict[str, Bound]:
    """Return what each block of `model` and each of its ends needs, by part.

    Args:
        model: a causal language model, split or whole, on any device.
        decoder: its parts.
        options: those of its plan.
        batch: sequences in the forward.
        sequence: tokens in each.

    Raises:
        PlanError: the model has neither embedding nor head.
    """
    vocabulary, hidden = _vocabulary_and_hidden(model, decoder)
    parallel, ranks = options.sequence_parallel, options.degree
    # Ranks hold shards of one size: what the degree does not divide is filled up.
    length = shard_size(sequence, ranks) * ranks if parallel else sequence
    stream, logits = batch * length * hidden, batch * sequence * shard_size(vocabulary, ranks) * ranks
    enter = (Allowance(("all_gather",), stream),) if parallel else ()
    scatter = Allowance(("reduce_scatter",), stream)
    total = Allowance(("all_reduce",), stream)
    bounds = {}
    for block in decoder.blocks:
        regions = [part for part in (block.mixer, block.mlp) if part is not None]
        one = (*enter, scatter if parallel else total)
        needed = tuple(allowance._replace(module=region) for region in regions for allowance in one)
        bounds[block.name] = Bound(needed, needed)
    embedded = Allowance(("reduce_scatter", "all_reduce"), stream) if parallel else total
    bounds["embedding"] = Bound((embedded,), enter)
    gathered = () if options.loss_parallel else (Allowance(("all_gather",), logits),)
    bounds["head"] = Bound((*enter, *gathered), (scatter if parallel else total,))
    reductions = (Allowance(("all_reduce",), batch * sequence),) * 3
    bounds["loss"] = Bound(reductions if options.loss_parallel else ())
    return bounds


def exceeding(collectives: Iterable[Collective], needed: Sequence[Allowance]) -> list[Collective]:
    """Return those of a part's `collectives` in one direction that are too many or too large."""
    left = sorted(needed, key=lambda allowance: allowance.elements)
    sent = [collective for collective in collectives if collective.reduction != "min"]
    over = sorted(sent, key=lambda collective: -_elements(collective))
    # First each region's own, so that of two gathers in one region not another's is said to be too many.
    for anywhere in (False, True):
        for collective in list(over):
            fit = next((a for a in left if _fits(collective, a, anywhere)), None)
            if fit is not None:
                left.remove(fit)
                over.remove(collective)
    return over


def _fits(collective: Collective, allowance: Allowance, anywhere: bool) -> bool:
    return (
        collective.operation in allowance.operations
        and _elements(collective) <= allowance.elements
        and (anywhere or _within(collective.module or "", allowance.module))
    )


def _elements(collective: Collective) -> int:
    assert collective.elements is not None  # what runs has sizes
    return collective.elements


def _within(name: str, part: str | None) -> bool:
    return part is not None and (name == part or name.startswith(part + "."))


def _vocabulary_and_hidden(model: nn.Module, decoder: Decoder) -> tuple[int, int]:
    matrix = decoder.head or decoder.embedding
    if matrix is None:
        raise PlanError(
            f"{type(model).__name__} has neither an embedding nor a head, which would say how wide its hidden "
            "states are: without it there is no bound on its communication"
        )
    # The whole shape, of a split model's DTensor too.
    weight = model.get_submodule(matrix)._parameters["weight"]
    assert weight is not None, matrix
    vocabulary, hidden = weight.shape
    return vocabulary, hidden
