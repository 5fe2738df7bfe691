"""Resolve a plan against a model: the keys with their styles, modules and layouts, for checks and application."""

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import nn

from titanplans.plan.checks.keys import check_coverage, check_keys, refuse_foreign_adapters
from titanplans.plan.options import TPOptions
from titanplans.plan.plan import Plan, TPPlan
from titanplans.split.adapted import with_factors
from titanplans.split.decoder import Decoder, find_decoder, is_present, join, set_head, within
from titanplans.split.layout import Layout
from titanplans.styles.base import SplitOver, Style, native_styles
from titanplans.user_code import as_user_error


class Entry(NamedTuple):
    """A key of a plan with a style of titanplans, and the module or parameter that it names."""

    key: str
    style: Style
    path: str
    """The name of the module: the key, without its last component if the key names a parameter or buffer."""
    module: nn.Module
    parameter: str | None
    """The parameter or buffer that the key names; None if it names the module."""
    layouts: dict[str, Layout]
    """Layouts on the TP ranks by name; a parameter's own key overrides its module's."""
    head_layouts: dict[str, Layout]
    """Layouts on the tp x cp ranks that the heads of a mixer are split over."""


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan whose keys all match the model, and whose styles cover all of its parameters."""

    source: TPPlan
    model: nn.Module
    styles: Plan
    """All styles by key, including foreign styles, which are styles of torch or of another library."""
    entries: tuple[Entry, ...]
    """The keys with a style of titanplans."""
    decoder: Decoder
    """The parts of the model. A mixer without a usual name is identified by its region."""
    begin_stream: tuple[str, ...]
    """The embeddings whose output begins the stream; a foreign style is assumed to begin it."""
    end_stream: tuple[str, ...]
    """The modules whose input is gathered, because the stream ends before the head."""
    begins_at: str | None
    """The block whose input is sharded to begin the stream; None: the embedding begins it, or nothing is sharded."""

    @cached_property
    def by_key(self) -> dict[str, Entry]:
        """The entries by key."""
        return {entry.key: entry for entry in self.entries}

    @property
    def degree(self) -> int:
        """Number of ranks that a layer's weights are split over."""
        return self.source.options.degrees.tp

    @property
    def over(self) -> SplitOver:
        """What a layer's weights are split over, as an argument of styles."""
        return SplitOver(self.degree, self.source.options.stream)

    @cached_property
    def token_regions(self) -> frozenset[str]:
        """The keys of the regions that mix tokens, which get the full sequence under context parallelism.

        `attn_input`, `attn_region` and `shared_region` mix tokens, `mlp_input` and `mlp_region` do not. A tower, such
        as a vision encoder, has other tokens, and every rank runs the tower's blocks on all of these tokens.
        """
        towers = [name for tower in self.decoder.towers for name in tower]
        return frozenset(
            entry.key
            for entry in self.entries
            if entry.style.mixes_tokens
            and not any(entry.key == name or within(entry.key, name) for name in towers)
        )

    def token_region_of(self, entry: Entry) -> str | None:
        """Return the key in `token_regions` that is the key of `entry`, or contains it; None if there is none.

        Return "" for a parameter that is outside of all regions, but that the code of blocks uses.
        """
        for region in self.token_regions:
            if entry.key == region or within(entry.key, region):
                return region
        for_blocks = entry.parameter is not None and entry.style.is_inside_region
        opened = (other.key for other in self.entries if other.style.opens)
        return "" if for_blocks and not any(within(entry.key, key) for key in opened) else None

    def within(self, module: str) -> Iterator[Entry]:
        """Yield the entries inside the module with this name."""
        return (entry for entry in self.entries if within(entry.key, module))

    def split_key(self, module: str) -> str | None:
        """Return the first key inside the module with this name whose style splits weights; None if there is none."""
        return next((entry.key for entry in self.within(module) if entry.style.splits_weights), None)

    def module_at(self, key: str) -> nn.Module:
        """Return the module that `key` names; if `key` names a parameter, the module that holds the parameter."""
        entry = self.by_key.get(key)
        return self.model.get_submodule(key) if entry is None else entry.module

    def of_stage(self, absent: Collection[str]) -> "ResolvedPlan":
        """Return the plan of a pipeline stage, without the modules `absent`, which are on other stages."""
        decoder = self.decoder
        blocks = tuple(block for block in decoder.blocks if block.name not in absent)
        embedding, norm, head = (
            None if name in absent else name for name in (decoder.embedding, decoder.norm, decoder.head)
        )
        return replace(
            self,
            styles={key: style for key, style in self.styles.items() if is_present(key, absent)},
            entries=tuple(entry for entry in self.entries if is_present(entry.key, absent)),
            decoder=replace(decoder, blocks=blocks, embedding=embedding, norm=norm, head=head),
        )


def resolve(source: TPPlan, model: nn.Module) -> ResolvedPlan:
    """Resolve the plan `source` against `model`, which is not changed, except for the head that `find_head` returns.

    Raises:
        PlanError: a key matches nothing; a value is not a style; a parameter is covered by no key, or can't be split.
    """
    name = type(source).__name__
    set_head(model, None)  # another plan may have set it
    with as_user_error(f"plan {name}"):
        styles = source.full_plan(model)
    refuse_foreign_adapters(model)
    check_keys(styles, model, source)
    modules = dict(model.named_modules(remove_duplicate=False))
    ours = native_styles(styles)
    entries = tuple(_entry(key, style, styles, modules, source.options) for key, style in ours.items())
    covered = {join(entry.path, name) for entry in entries for name in entry.layouts}
    # A key that names a parameter covers the parameter even if the style has no layout for it: a later check refuses such a
    # style, with a better reason than a missing key.
    covered |= {entry.key for entry in entries if entry.parameter is not None}
    foreign = [key for key in styles if key not in ours]
    check_coverage(styles, covered, foreign, model, name)
    set_head(model, head_of(styles, modules))
    decoder = _with_unnamed_mixers(find_decoder(model, required=False), entries, source)
    begin = _begin_stream(styles, entries, decoder.embedding)
    begins_at = None
    if source.options.shards_tokens and not begin:
        begins_at = (decoder if decoder.blocks else find_decoder(model)).blocks[0].name
    end = tuple(entry.path for entry in entries if entry.style.ends_stream)
    return ResolvedPlan(source, model, styles, entries, decoder, begin, end, begins_at)


def head_of(styles: Plan, modules: Container[str]) -> str | None:
    """Return the first of `modules` to which a plan gives `vocab_head()`; None if there is none."""
    return next(
        (key for key, style in native_styles(styles).items() if style.makes_logits and key in modules), None
    )


def _entry(key: str, style: Style, plan: Plan, modules: Mapping[str, nn.Module], options: TPOptions) -> Entry:
    is_module = key in modules
    path, _, parameter = (key, "", None) if is_module else key.rpartition(".")
    module = modules[path]

    def layouts(degree: int) -> dict[str, Layout]:
        over = SplitOver(degree, options.stream)
        if parameter is None:
            by_name = style.layouts(module, over)
            return {name: layout for name, layout in by_name.items() if join(key, name) not in plan}
        layout = style.layout(parameter, getattr(module, parameter), over)
        return {} if layout is None else with_factors(module, {parameter: layout})

    tp, heads = options.degrees.tp, options.degrees.tp_cp
    of_tp = layouts(tp)
    return Entry(key, style, path, module, parameter, of_tp, of_tp if heads == tp else layouts(heads))


def _begin_stream(styles: Plan, entries: tuple[Entry, ...], embedding: str | None) -> tuple[str, ...]:
    ours = tuple(entry.path for entry in entries if entry.style.begins_stream)
    return ours if ours or embedding is None or isinstance(styles[embedding], Style) else (embedding,)


def _with_unnamed_mixers(decoder: Decoder, entries: tuple[Entry, ...], source: TPPlan) -> Decoder:
    """Return a copy of `decoder` that also has the mixers without a usual name.

    In a block without a mixer of a usual name, the first region other than the MLPs is taken for the mixer; a region whose
    head count is known is preferred.
    """
    regions = [entry.key for entry in entries if entry.style.opens]
    blocks = []
    for block in decoder.blocks:
        candidates = [
            r for r in regions if r not in block.mlps and (r == block.name or within(r, block.name))
        ]
        if not block.mixers and candidates:
            candidates.sort(key=lambda region: not source.heads(block.child(region)))  # stable
            block = replace(block, mixers=(candidates[0],))
        blocks.append(block)
    return replace(decoder, blocks=tuple(blocks))
