"""Find how every region of a model is split: `analyse`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers.integrations import hub_kernels

from titanplans.derive.by_head import called_functions, find_functions, split_arguments
from titanplans.derive.counts import Counts, SlicedRegion, find_counts, find_shared_counts
from titanplans.derive.norms import SplitNormKind, find_split_norms
from titanplans.derive.probe import NotDerived, probe
from titanplans.derive.region import ModuleCall, RecordedRegion, find_regions, float_tensors, record_calls
from titanplans.errors import PlanError
from titanplans.plan.plan import TPPlan
from titanplans.proof.batches.sample import randomise, vocabulary_size
from titanplans.proof.compare.forward import widened
from titanplans.split.decoder import Block, Decoder, find_decoder, join
from titanplans.user_code import as_user_error

_TOKENS = 33
"""Tokens in each of the two sequences of the recorded batch; odd, so that no width equals it."""


@dataclass(frozen=True)
class RegionSplit:
    """A kind of region, and how it is split. Regions of one kind have the same class and parameters of the same shapes.

    Attributes:
        region: the first of its kind.
        mixes_tokens: whether it is a token mixer.
        split: None if it is not split; `reason` says why.
        norms: norms over features of several units, by name. A unit is the smallest part that can go to one rank: a head, or
            a channel.
        counts: the attributes of its code that count units.
        head_name: the attribute that counts its units, by dotted name; None: no attribute does.
        shared_head_name: the attribute that counts heads that units share, such as key/value heads; None: there are none.
        closes: whether it returns the output of its only output projection, a Linear, so that this can sum over the ranks.
        reason: why it is not split.
    """

    region: RecordedRegion
    mixes_tokens: bool
    split: SlicedRegion | None = None
    norms: Mapping[str, SplitNormKind] = field(default_factory=dict)
    counts: Counts = field(default_factory=lambda: Counts({}, {}))
    head_name: str | None = None
    shared_head_name: str | None = None
    closes: bool = False
    reason: str = ""

    @property
    def module(self) -> nn.Module:
        return self.region.module

    @property
    def shared_heads(self) -> int | None:
        """The number of shared heads."""
        name = self.shared_head_name
        return None if name is None else integers(self.module)[name]


@dataclass(frozen=True)
class BlockSplit:
    """A block, its regions by name relative to it, and the names of modules, parameters and arguments on the stream."""

    block: Block
    regions: Mapping[str, RegionSplit]
    on_stream: Sequence[str]
    stream_arguments: Sequence[str]


@dataclass(frozen=True)
class ModelSplit:
    """How a model is split.

    Attributes:
        model: the unsplit model.
        decoder: its parts.
        calls: the first calls of its modules.
        blocks: its blocks.
        functions: the functions of its code that compute values for each head, which mixers get as arguments, by the name
            under which the code calls them, with the number of heads.
    """

    model: nn.Module
    decoder: Decoder
    calls: Mapping[str, ModuleCall]
    blocks: Sequence[BlockSplit]
    functions: Mapping[str, int]

    @property
    def kinds(self) -> list[RegionSplit]:
        """The kinds of regions."""
        return list({id(kind): kind for block in self.blocks for kind in block.regions.values()}.values())


def analyse(model: nn.Module) -> ModelSplit:
    """Return how the regions of `model` can be split.

    Args:
        model: unsplit, in float64, on the CPU. Its parameters get random values, since zeros hide what they multiply.

    Raises:
        PlanError: it does not run, or its logits are not finite or differ between two runs.
    """
    randomise(model, seed=0)
    vocabulary = vocabulary_size(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (2, _TOKENS), generator=generator)
    decoder = find_decoder(model)
    with widened(torch.float64):
        _check_runs(model, ids)
        calls = record_calls(model, lambda: model(input_ids=ids))
        kinds: dict[Any, RegionSplit] = {}
        blocks = []
        for block in decoder.blocks:
            parts = find_regions(block, calls, (ids.numel(), _hidden_size(model, decoder, calls)))
            regions = {}
            for name, region in parts.regions.items():
                shapes = tuple((n, tuple(p.shape)) for n, p in region.module.named_parameters())
                key = (name, type(region.module), shapes)
                if key not in kinds:
                    kinds[key] = split_region(region)
                regions[name] = kinds[key]
            blocks.append(BlockSplit(block, regions, parts.on_stream, parts.stream_arguments))
        functions = _functions(model, decoder, blocks, ids)
    return ModelSplit(model, decoder, calls, blocks, functions)


def _functions(
    model: nn.Module, decoder: Decoder, blocks: Sequence[BlockSplit], ids: torch.Tensor
) -> dict[str, int]:
    regions = {
        join(block.block.name, name): kind.split
        for block in blocks
        for name, kind in block.regions.items()
        if kind.split is not None and split_arguments(kind.split)
    }
    # Code may compute the values in another way for a batch with padding.
    mask = torch.ones_like(ids)
    mask[1, : _TOKENS // 4] = 0
    runs = [lambda m: m(input_ids=ids), lambda m: m(input_ids=ids, attention_mask=mask)]
    return find_functions(model, decoder.names, regions, runs) if regions else {}


def _check_runs(model: nn.Module, ids: torch.Tensor) -> None:
    """Refuse a model that does not run, or whose logits are not finite or differ between two runs."""
    what = f"derive {type(model).__name__}"
    with torch.no_grad(), as_user_error(f"{what}: the unsplit model does not run on a CPU", PlanError):
        first, second = (float_tensors(model(input_ids=ids))[0] for _ in range(2))
    if not bool(torch.isfinite(first).all()):
        raise PlanError(
            f"{what}: its logits are not finite in float64; return a model with smaller initial weights"
        )
    if not torch.equal(first, second):
        raise PlanError(f"{what}: two runs differ, so it draws random numbers; set its dropout to 0")


def _hidden_size(model: nn.Module, decoder: Decoder, calls: Mapping[str, ModuleCall]) -> int:
    call = calls.get(decoder.blocks[0].name)
    tensors = [] if call is None else float_tensors((call.args, call.kwargs))
    hidden = next((x for x in tensors if x.ndim >= 3), None)
    if hidden is None:
        raise PlanError(
            f"derive {type(model).__name__}: {decoder.blocks[0].name} gets no hidden states of shape [batch, sequence, "
            "hidden]; write a plan by hand (docs/plans.md)"
        )
    return hidden.shape[-1]


def split_region(region: RecordedRegion) -> RegionSplit:
    """Return how a region is split; a region for which nothing is found is not split."""
    mixes_tokens = region.mixes_tokens()
    unsplit = RegionSplit(region, mixes_tokens)
    try:
        found = probe(region)
        units, head_name = _choose_units(region.module, mixes_tokens, found.layouts, found.output_widths)
        norms = find_split_norms(found, units)
        split = SlicedRegion(found, units, tuple(norms))
        counts = find_counts(split)
        shared_name = _shared_head_name(split) if mixes_tokens else None
        if shared_name is not None:
            heads = integers(region.module)[shared_name]
            counts = replace(counts, shared=find_shared_counts(split, counts, heads))
    except NotDerived as error:
        return replace(unsplit, reason=str(error))
    return replace(
        unsplit,
        split=split,
        norms=norms,
        counts=counts,
        head_name=head_name,
        shared_head_name=shared_name,
        closes=_closes(split),
    )


def _closes(split: SlicedRegion) -> bool:
    """Return whether the region returns the output of its only output projection, with nothing added to it."""
    found = split.findings
    if len(found.outputs) != 1:
        return False
    owner = next(iter(found.outputs)).rpartition(".")[0]
    module, call = found.region.module.get_submodule(owner), found.calls.get(owner)
    # Conv1D is transformers' Linear with a weight [in, out].
    is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    others = [name for name in found.summands if name.rpartition(".")[0] != owner]
    returned = (
        call is not None and call.output is not None and call.output.numel() == found.region.run().numel()
    )
    return bool(owner) and is_linear and returned and not others


def integers(module: nn.Module) -> dict[str, int]:
    """Return the integer attributes above 1 of a module and of its config, by dotted name.

    If none of these attributes counts heads, the attributes of inner modules with children are returned, too, since some
    mixers only wrap another mixer.
    """
    found = _integers(module)
    config = getattr(module, "config", None)
    if config is not None:
        found |= {f"config.{name}": value for name, value in _integers(config).items()}
    if not any(map(_is_count_of_heads, found)):
        for name, inner in module.named_modules():
            if name and any(True for _ in inner.children()):
                found |= {f"{name}.{key}": value for key, value in _integers(inner).items()}
    return found


def _integers(holder: Any) -> dict[str, int]:
    return {name: value for name, value in vars(holder).items() if type(value) is int and value > 1}


def _is_count_of_heads(name: str) -> bool:
    last = name.rpartition(".")[2]
    return ("head" in last or "group" in last) and not any(word in last for word in ("dim", "size", "per"))


def _choose_units(
    module: nn.Module, mixes_tokens: bool, layouts: Mapping[int, Any], widths: Sequence[int]
) -> tuple[int, str | None]:
    """Return the number of units, and the attribute that counts them.

    An MLP has as many units as possible. A mixer has as many units as heads, which an attribute counts. If several
    attributes have such a value, the usual names of query heads come first, then other names of heads, then any count.
    Without such an attribute every channel is a unit.
    """
    options = sorted(layouts, reverse=True)
    if not mixes_tokens:
        return options[0], None
    values = integers(module)
    tests: list[Callable[[str], bool]] = [
        lambda name: name.rpartition(".")[2] in TPPlan.head_names,
        lambda name: _is_count_of_heads(name) and "kv" not in name and "key_value" not in name,
        _is_count_of_heads,
        lambda name: "dim" not in name and "size" not in name,
    ]
    for test in tests:
        for units in options:
            names = [name for name, value in values.items() if value == units and test(name)]
            if names:
                return units, min(names, key=_length)
    names = [name for name, value in values.items() if value in widths]
    return options[0], min(names, key=_length) if names else None


def _length(name: str) -> tuple[bool, int]:
    """Order names: attributes of the module before those of its config, then short ones."""
    return name.startswith("config."), len(name)


def _shared_head_name(split: SlicedRegion) -> str | None:
    found = split.findings
    counts = {
        section.slices
        for name, (_, sections) in split.layout.sharded.items()
        for section in sections
        if 1 < section.slices < split.units and name in found.parameters
    }
    values = {name: value for name, value in integers(found.region.module).items() if value in counts}
    usual = [name for name in values if name.rpartition(".")[2] in TPPlan.shared_head_names]
    others = [name for name in values if _is_count_of_heads(name)]
    return min(usual or others, key=_length, default=None)


def kernels_of(module: nn.Module) -> list[str]:
    """Return the names of functions that the code in `module` calls, and that transformers replaces by kernels on a GPU."""
    classes = {type(inner) for inner in module.modules()}
    return sorted({name for cls in classes for name in _kernels(cls)})


def fused_kernels_of(module: nn.Module) -> list[str]:
    """Return the kernels that the code of `module` itself calls in place of its modules, by name.

    Where a kernel is not installed, the function of this name only returns None, and the code calls its modules.
    """
    kernels = _kernels(type(module))
    codes = {name: inspect.unwrap(function).__code__ for name, function in kernels.items()}
    return sorted(name for name, code in codes.items() if code.co_consts == (None,) and not code.co_names)


def _kernels(cls: type) -> dict[str, Any]:
    return {name: function for name, function in called_functions(cls).items() if _may_be_a_kernel(function)}


def _may_be_a_kernel(function: Any) -> bool:
    return hasattr(function, "__wrapped__") and inspect.getmodule(function.__code__) is hub_kernels


def relative(block: Block, name: str) -> str:
    """Return the name of a block's part relative to the block."""
    return name.removeprefix(f"{block.name}.")
