"""The fewest collectives that a split model needs, for each block, embedding, head and loss. Start at `bound`.

    part        with sequence parallelism: forward; backward     without
    region      all-gather, reduce-scatter; the same             all-reduce; the same
    embedding   reduce-scatter or all-reduce; all-gather         all-reduce; none
    head        all-gather; reduce-scatter                       none; all-reduce
    loss        all-gather, or three all-reduces; none           the same

A block has one region for its mixer and one for its MLP; its plan may add more. A region, the embedding and the head send
batch x sequence x hidden elements. The loss sends batch x sequence elements three times (maximum, sum of exponentials, logit
of the target), or gathers two numbers per token from each rank (log-sum-exp, logit of the target). Without loss parallelism,
the head may gather the logits once. Sources: with sequence parallelism Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4.2.2; without it, and for the loss, Shoeybi et al. 2019, "Megatron-LM",
section 3.

Styles inside a region add their own collectives (`Style.sends`), such as one number per token for a norm over a sharded
width. A packed weight whose rows come from other ranks (`Layout.rows`) needs an all-to-all. Under context parallelism each
part needs the same collectives, for the tokens of its CP rank. In addition, each product at the entry or exit of a mixer
needs one all-to-all in the forward and one in the backward, of tokens x rows elements, where key/value heads count once per
rank that uses them.

Not part of the bound: gathers of all tokens under context parallelism (`by_tokens`), the reduction of partial gradients of
replicated parameters, which happens once per step, and the scales of float8.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.apply.apply import AppliedPlan
from titanplans.observe.by_tokens import (
    Calls,
    exchanged_rows,
    exchanges,
    holder,
    local_shape,
    with_all_tokens,
    within_mixers,
)
from titanplans.observe.operators import Collective
from titanplans.plan.options import TPOptions
from titanplans.split.costs import Call, ExpectedCollective
from titanplans.split.decoder import Decoder, within
from titanplans.split.layout import next_multiple
from titanplans.styles.base import Style, native_styles


class Allowance(NamedTuple):
    """One needed collective: any of `operations`, with at most `elements` in the full tensor."""

    operations: tuple[str, ...]
    elements: int
    module: str = ""
    """Fully qualified name of the module that needs it; "" for the embedding, the head and the loss."""


class Allowances(NamedTuple):
    """The collectives that one part of the model needs."""

    forward: tuple[Allowance, ...] = ()
    backward: tuple[Allowance, ...] = ()


def part_of(module: str | None, decoder: Decoder) -> str:
    """Return the part of the model to which a collective of `module` belongs.

    The part is the name of a block, "embedding", "head" (including the final norm), "loss" (for None:
    outside of the model), or else the name of the module.
    """
    if module is None:
        return "loss"
    if module == decoder.names[0] or holder(module, [decoder.embedding]):
        return "embedding"
    if holder(module, [decoder.head, decoder.norm]):
        return "head"
    return holder(module, decoder.names) or module or "the model"


@contextmanager
def record_calls(model: nn.Module, applied: AppliedPlan) -> Iterator[Calls]:
    """Record the calls of the modules that the plan names, while the body runs. `model` is split, and not compiled."""
    calls: dict[str, list[Call]] = {}
    styles = _expected_styles(applied)
    # In reverse order the keys of a module's parameters come before the key of the module, so that the module's style is
    # kept.
    by_module = {_path(key, applied): style for key, style in sorted(styles.items(), reverse=True)}
    border, inside = applied.border, within_mixers(applied)
    stream = border.stream

    def record(name: str, style: Style, module: nn.Module, args: Any, kwargs: Any) -> None:
        input_by_name = kwargs.get(getattr(style, "input_name", "hidden_states"))
        tensors = [x for x in (*args, input_by_name) if isinstance(x, torch.Tensor)]
        if not tensors:
            tensors = [x for x in kwargs.values() if isinstance(x, torch.Tensor)][:1]
        is_sharded = stream.is_sharded
        dim = stream.dim if is_sharded and not style.is_inside_region else None
        shapes = tuple(local_shape(x, border, is_sharded and style.takes_token_ids) for x in tensors)
        # A region is entered over the TP ranks. Inside a mixer, heads are split over the TP x CP ranks.
        degree = applied.mesh.size() if name in inside and not style.enters_full else border.group[1]
        calls.setdefault(name, []).append(Call(shapes, dim, degree, exchanged_rows(module, border)))

    with ExitStack() as stack:
        for name, style in by_module.items():
            module, hook = model.get_submodule(name), partial(record, name, style)
            stack.enter_context(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        yield calls


def bound(model: nn.Module, applied: AppliedPlan, options: TPOptions, calls: Calls) -> dict[str, Allowances]:
    """Return the collectives that each part of a split `model` needs (see `part_of`).

    Args:
        model: split by `applied`.
        applied: the applied plan.
        options: the options of the bound, usually `applied.plan.options`.
        calls: the calls of one forward (`record_calls`).
    """
    decoder, degree = applied.decoder, applied.border.group[1]
    needed: dict[str, tuple[list[Allowance], list[Allowance]]] = {name: ([], []) for name in decoder.names}
    needed |= {part: ([], []) for part in ("embedding", "head", "loss")}

    def add(part: str, expected: ExpectedCollective, module: str = "") -> None:
        for allowances, operations in zip(
            needed.setdefault(part, ([], [])), (expected.forward, expected.backward), strict=True
        ):
            if operations:
                allowances.append(Allowance(operations, expected.elements, module))

    regions: dict[str, Sequence[Call]] = {}
    styles, inside = _expected_styles(applied), within_mixers(applied)
    for key, style in styles.items():
        path, region = _path(key, applied), holder(key, (*decoder.mixers, *decoder.mlps)) or key
        module_calls = calls.get(path, ())
        if style.enters_full:
            # A region is entered once, however many styles inside of it would gather.
            if region in regions:
                continue
            regions[region] = module_calls
        part, module = part_of(path, decoder), region if style.enters_full else path
        # A module that is never called, because other code uses its parameters, counts with the calls of its region.
        region_calls = (
            () if module_calls else next((c for name, c in regions.items() if within(key, name)), ())
        )
        if region_calls and path in inside:
            region_calls = [with_all_tokens(call, applied) for call in region_calls]
        for call in module_calls or region_calls:
            if call.degree == 1:
                continue  # no weights are sharded
            for expected in style.sends(model.get_submodule(path), call):
                add(part, expected, "" if part in ("embedding", "head") else module)

    for name, layout in applied.layouts.items():
        if layout.is_collective and degree > 1:
            assert layout.rows is not None
            path, _, parameter = name.rpartition(".")
            param = model.get_submodule(path)._parameters[parameter]
            dim, runs = layout.rows
            elements = sum(run.size for run in runs) * param.numel() // param.shape[dim]  # type: ignore[union-attr]
            for _ in calls.get(path, ()):
                add(
                    part_of(path, decoder),
                    ExpectedCollective(("all_to_all",), ("all_to_all",), elements),
                    path,
                )

    for mixer, elements in exchanges(applied, calls):
        add(part_of(mixer, decoder), ExpectedCollective(("all_to_all",), ("all_to_all",), elements), mixer)

    stream = applied.border.stream
    first = next((c[0] for name, c in regions.items() if within(name, decoder.names[0]) and c), None)
    # An embedding that does not begin the stream leaves its output full on every rank. The first block shards the stream,
    # and its gradient is gathered there.
    if stream.dim is not None and first is not None and not applied.resolved.begin_stream:
        add("embedding", ExpectedCollective((), ("all_gather",), first.elements))
    for call in calls.get(decoder.head or "", ()):
        vocabulary = model.get_submodule(decoder.head or "")._parameters["weight"].shape[0]  # type: ignore[union-attr]
        if degree == 1:
            continue
        if options.loss_parallel:
            # Either one all-gather of two numbers per token and rank, as in titanplans.loss, or three all-reduces of one
            # number per token, as in torch and torchtitan.
            add("loss", ExpectedCollective(("all_gather", "all_reduce"), (), 2 * degree * call.tokens))
            for _ in range(2):
                add("loss", ExpectedCollective(("all_reduce",), (), call.tokens))
        else:
            add(
                "head",
                ExpectedCollective(("all_gather",), (), call.tokens * next_multiple(vocabulary, degree)),
            )
    return {part: Allowances(*map(tuple, directions)) for part, directions in needed.items()}


def _expected_styles(applied: AppliedPlan) -> dict[str, Style]:
    """Return the styles of the plan by key, regions first; the usual styles replace missing styles and other libraries'
    styles.

    Styles of other libraries declare no collectives, so a mixer or an MLP with such styles counts as one region.
    """
    decoder, plan = applied.decoder, applied.plan
    expected = {name: plan.mlp_region()[""] for name in (*decoder.mixers, *decoder.mlps)}
    if decoder.embedding is not None:
        expected[decoder.embedding] = plan.vocab_embedding()
    if decoder.head is not None:
        expected[decoder.head] = plan.vocab_head()
    of_plan = native_styles(applied.styles)
    regions = {key: style for key, style in of_plan.items() if style.enters_full}
    return (
        regions
        | {key: style for key, style in native_styles(expected).items() if key not in of_plan}
        | of_plan
    )


def _path(key: str, applied: AppliedPlan) -> str:
    """Return the name of the module of a plan key, which may name one of the module's parameters."""
    entry = applied.resolved.by_key.get(key)
    return key if entry is None else entry.path


def exceeding(collectives: Iterable[Collective], needed: Sequence[Allowance]) -> list[Collective]:
    """Return the collectives of one part and direction that `needed` does not cover: additional or too large
    collectives."""
    unmatched = sorted(needed, key=lambda allowance: allowance.elements)
    counted = [
        collective for collective in collectives if collective.reduction != "min"
    ]  # "min": float8's scales
    over = sorted(counted, key=lambda collective: -_elements(collective))
    # First match collectives to allowances of the same module. Otherwise, if one region gathers twice, the gather of another
    # region might be reported as the extra one.
    for anywhere in (False, True):
        for collective in list(over):
            fit = next((a for a in unmatched if _fits(collective, a, anywhere)), None)
            if fit is not None:
                unmatched.remove(fit)
                over.remove(collective)
    return over


def _fits(collective: Collective, allowance: Allowance, anywhere: bool) -> bool:
    return (
        collective.operation in allowance.operations
        and _elements(collective) <= allowance.elements
        and (anywhere or holder(collective.module, [allowance.module]) is not None)
    )


def _elements(collective: Collective) -> int:
    assert collective.elements is not None  # only graphs have symbolic sizes
    return collective.elements
