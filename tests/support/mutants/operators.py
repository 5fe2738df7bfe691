"""Operators: mistakes that the author of a plan can make. Each changes the style at one key of a correct plan.

An operator returns the new style, DROP to remove the key, or SKIP if it does not apply to the key.
"""

from collections.abc import Callable

from torch.distributed.tensor import Partial, Replicate

from tests.support.mutants import faults
from tests.support.mutants.site import Site
from titanplans.styles.base import Style
from titanplans.styles.colwise import Colwise
from titanplans.styles.region import Region
from titanplans.styles.replicated_in_region import ReplicatedInRegion
from titanplans.styles.replicated_off_stream import ReplicatedOffStream
from titanplans.styles.replicated_on_stream import ReplicatedOnStream
from titanplans.styles.rowwise import Rowwise
from titanplans.styles.vocab_embedding import VocabEmbedding
from titanplans.styles.vocab_head import VocabHead

SKIP, DROP = "skip", "drop"
Change = Style | str


def drop(site: Site) -> Change:
    return DROP


def swap(site: Site) -> Change:
    """Replace Colwise by Rowwise, and the reverse."""
    if isinstance(site.style, Colwise):
        return Rowwise(reduce_output=False)
    return Colwise() if isinstance(site.style, Rowwise) else SKIP


def replicate(site: Site) -> Change:
    """Replicate what should be split."""
    if isinstance(site.style, Colwise | Rowwise):
        return ReplicatedInRegion()
    if isinstance(site.style, VocabEmbedding | VocabHead):
        return ReplicatedOnStream()
    return SKIP


def split(site: Site) -> Change:
    """Split what should be replicated."""
    return (
        Colwise()
        if isinstance(site.style, ReplicatedInRegion | ReplicatedOnStream | ReplicatedOffStream)
        else SKIP
    )


def on_other_stream(site: Site) -> Change:
    """Lay out activations for a replicated stream if the rest of the plan shards the stream, and the reverse."""
    style = site.style
    lays_out = isinstance(style, Region | VocabHead)
    lays_out |= isinstance(style, Rowwise) and style.reduce_output
    lays_out |= isinstance(style, VocabEmbedding) and style.begins_stream
    return faults.on_stream(style, site.other_stream) if lays_out else SKIP


def gradient_of_other_stream(site: Site) -> Change:
    """Do the same as `on_other_stream` for styles for which the stream decides only the layout of the gradient."""
    depends_on_stream = isinstance(site.style, ReplicatedOnStream)
    return faults.on_stream(site.style, site.other_stream) if depends_on_stream else SKIP


def begin_elsewhere(site: Site) -> Change:
    """Begin the sharded stream at the embedding instead of the first block, and the reverse."""
    if isinstance(site.style, VocabEmbedding) and site.plan.options.sequence_parallel:
        return faults.with_option(site.style, begins_stream=not site.style.begins_stream)
    return SKIP


def reduce_elsewhere(site: Site) -> Change:
    """Invert reduce_output."""
    if isinstance(site.style, Region | Rowwise):
        return faults.with_option(site.style, reduce_output=not site.style.reduce_output)
    return SKIP


def other_input_name(site: Site) -> Change:
    """Give the style the name of a keyword argument with which the module is not called."""
    return faults.with_option(site.style, input_name="inputs") if isinstance(site.style, Region) else SKIP


def unreduced(site: Site) -> Change:
    return faults.unreduced(site.style) if Partial() in site.gradients else SKIP


def summed_again(site: Site) -> Change:
    return faults.summed_again(site.style) if Replicate() in site.gradients else SKIP


def entry_unsummed(site: Site) -> Change:
    return faults.entry_unsummed(site.style) if isinstance(site.style, Region | VocabHead) else SKIP


def entry_summed_again(site: Site) -> Change:
    return faults.entry_summed_again(site.style) if isinstance(site.style, Region | VocabHead) else SKIP


def bias_on_every_rank(site: Site) -> Change:
    biased = isinstance(site.style, Rowwise) and site.style.reduce_output and site.has_bias
    return faults.bias_on_every_rank(site.style) if biased else SKIP


def bias_forgotten(site: Site) -> Change:
    biased = isinstance(site.style, Rowwise) and site.style.reduce_output and site.has_bias
    return faults.bias_forgotten(site.style) if biased else SKIP


def untied(site: Site) -> Change:
    return faults.untied(site.style) if site.is_tied else SKIP


def shift_one(site: Site) -> Change:
    """Shift the shards by one head, or outside of mixers by one channel or token."""
    # Tied weights are distributed by the embedding's style.
    sharded = site.is_sharded and not (isinstance(site.style, VocabHead) and site.is_tied)
    return faults.shifted(site.style, site.head_rows or 1) if sharded else SKIP


def shift_half(site: Site) -> Change:
    """Shift the shards by half a head."""
    return faults.shifted(site.style, site.head_rows // 2) if site.is_sharded and site.head_rows else SKIP


def other_head(site: Site) -> Change:
    return faults.other_head(site.style) if site.shares_heads else SKIP


def not_shared(site: Site) -> Change:
    """Split key/value heads over more ranks than there are heads."""
    return Colwise() if site.shares_heads else SKIP


def as_on_stream(site: Site) -> Change:
    """Use replicated_on_stream() in a region, or before the stream."""
    applies = isinstance(site.style, ReplicatedInRegion | ReplicatedOffStream)
    return ReplicatedOnStream() if applies else SKIP


def as_in_region(site: Site) -> Change:
    """Use replicated_in_region() on the stream, or before it."""
    return ReplicatedInRegion() if isinstance(site.style, ReplicatedOnStream | ReplicatedOffStream) else SKIP


def as_before_stream(site: Site) -> Change:
    """Use replicated_off_stream() on the stream, or in a region."""
    return ReplicatedOffStream() if isinstance(site.style, ReplicatedOnStream | ReplicatedInRegion) else SKIP


def other_loss(site: Site) -> Change:
    """Gather the logits if the loss expects sharded logits, and the reverse."""
    if isinstance(site.style, VocabHead):
        return faults.with_option(site.style, loss_parallel=not site.style.loss_parallel)
    return SKIP


def offset_by_local_rows(site: Site) -> Change:
    return faults.offset_by_local_rows(site.style) if isinstance(site.style, VocabEmbedding) else SKIP


def offset_by_one(site: Site) -> Change:
    return faults.offset_by_one(site.style) if isinstance(site.style, VocabEmbedding) else SKIP


FORWARD: tuple[Callable[[Site], Change], ...] = (
    drop,
    swap,
    replicate,
    split,
    on_other_stream,
    begin_elsewhere,
    reduce_elsewhere,
    other_input_name,
    bias_on_every_rank,
    bias_forgotten,
    untied,
    shift_one,
    shift_half,
    other_head,
    not_shared,
    other_loss,
    offset_by_local_rows,
    offset_by_one,
)
"""Applied in the first block. The fault makes all later modules wrong, too, and the proof has to name the first one."""

BACKWARD: tuple[Callable[[Site], Change], ...] = (
    gradient_of_other_stream,
    unreduced,
    summed_again,
    entry_unsummed,
    entry_summed_again,
    as_on_stream,
    as_in_region,
    as_before_stream,
)
"""Applied in the last block, because a backward's fault spreads to all earlier modules."""

AT_SHARED_HEADS: tuple[Callable[[Site], Change], ...] = (replicate, other_head, not_shared, unreduced)
"""Applied again at tp 4, where ranks share key/value heads."""

STREAM_INDEPENDENT: tuple[Callable[[Site], Change], ...] = (
    swap,
    replicate,
    split,
    shift_one,
    shift_half,
    other_head,
    not_shared,
    unreduced,
)
"""Inside a region these faults do not depend on the layout of the stream."""
