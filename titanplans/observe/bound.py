"""The communication that a tensor-parallel model needs: what the styles of its plan send, part by part.

    part        sequence parallel: forward; backward             without
    region      all-gather, reduce-scatter; the same             all-reduce; the same
    embedding   reduce-scatter or all-reduce; all-gather         all-reduce; none
    head        all-gather; reduce-scatter                       none; all-reduce
    loss        all-gather, or three all-reduces; none           the same

A block has one region for its mixer and one for its MLP, where it has them, and a plan may give it more. Regions and ends
send batch x sequence x hidden, the loss batch x sequence (maximum, sum of exponentials, target's logit), or in one gather
twice that from each rank (logarithm of the sum, target's logit). With sequence parallelism: Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 4.2.2; without: Shoeybi et al. 2019, "Megatron-LM",
section 3, which also has the loss. An embedding's sum may stay whole on every rank, an all-reduce of twice the bytes, for a
model that draws conclusions from it: then the stream begins at the first block's entry, where the gradient is gathered, so
that entry counts with the embedding. Without loss parallelism the head may gather the logits, once.

To these come what styles inside a region send (`Expect`): a norm over a split width one number a token, a sum inside
the region the width of the sum; and the rows of a packed weight, which is stored by another dimension (`Layout.rows`).
With context parallelism a part needs what it needs without it, of this rank's tokens, and a mixer also

    products of what enters it    one all-to-all in the forward, one in the backward
    a product that closes it      the same

of tokens x rows, the rows of each rank that shares key/value heads counted. What its code reads before its products is
gathered: that is no part of the bound, and named apart (`communication`).

A style of another library declares nothing: its mixer or MLP counts as one region. A region is entered once, however
many styles inside of it gather.

Gradients of replicated parameters that are sums over the ranks are no part of this: they are summed together, once a
step, by FSDP's units or before the optimizer's step (`partial_gradients`). Nor are the scales of float8, a number a
tensor or a row.
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
    """One collective that is needed: any of `operations`, of at most `elements` in the whole tensor."""

    operations: tuple[str, ...]
    elements: int
    module: str = ""
    """Fully qualified name of the module that needs it; "" for an end's."""


class Allowances(NamedTuple):
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
    if module == decoder.names[0] or holder(module, [decoder.embedding]):
        return "embedding"
    if holder(module, [decoder.head, decoder.norm]):
        return "head"
    return holder(module, decoder.names) or module or "the model"


@contextmanager
def noted_calls(model: nn.Module, applied: AppliedPlan) -> Iterator[Calls]:
    """Note the calls of what the plan names in `model`, which it has split and nothing has compiled."""
    calls: dict[str, list[Call]] = {}
    styles = _judged(applied)
    # The last key of a module is its own, which comes behind those of its parameters or alone.
    by_module = {_path(key, applied): style for key, style in sorted(styles.items(), reverse=True)}
    border, inside = applied.border, within_mixers(applied)
    stream = border.stream

    def note(name: str, style: Style, module: nn.Module, args: Any, kwargs: Any) -> None:
        first = kwargs.get(getattr(style, "input_name", "hidden_states"))
        given = [x for x in (*args, first) if isinstance(x, torch.Tensor)]
        if not given:
            given = [x for x in kwargs.values() if isinstance(x, torch.Tensor)][:1]
        is_sharded = stream.is_sharded
        sharded = stream.dim if is_sharded and not style.is_inside_region else None
        shapes = tuple(local_shape(x, border, is_sharded and style.takes_token_ids) for x in given)
        # Regions are entered over the ranks of tensor parallelism, and inside all that share the heads compute.
        degree = applied.mesh.size() if name in inside and not style.enters_full else border.group[1]
        calls.setdefault(name, []).append(Call(shapes, sharded, degree, exchanged_rows(module, border)))

    with ExitStack() as stack:
        for name, style in by_module.items():
            module, hook = model.get_submodule(name), partial(note, name, style)
            stack.enter_context(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        yield calls


def bound(model: nn.Module, applied: AppliedPlan, options: TPOptions, calls: Calls) -> dict[str, Allowances]:
    """Return what each block of a split `model` and each of its ends needs, by part.

    `calls` are of one forward; `options` those by which it is judged, as a rule `applied.plan.options`.
    """
    decoder, degree = applied.decoder, applied.border.group[1]
    needed: dict[str, tuple[list[Allowance], list[Allowance]]] = {name: ([], []) for name in decoder.names}
    needed |= {end: ([], []) for end in ("embedding", "head", "loss")}

    def add(part: str, sent: ExpectedCollective, module: str = "") -> None:
        for direction, operations in zip(
            needed.setdefault(part, ([], [])), (sent.forward, sent.backward), strict=True
        ):
            if operations:
                direction.append(Allowance(operations, sent.elements, module))

    regions: dict[str, Sequence[Call]] = {}
    styles, inside = _judged(applied), within_mixers(applied)
    for key, style in styles.items():
        path, home = _path(key, applied), holder(key, (*decoder.mixers, *decoder.mlps)) or key
        own = calls.get(path, ())
        if style.enters_full:
            if home in regions:
                continue
            regions[home] = own
        part, module = part_of(path, decoder), home if style.enters_full else path
        around = () if own else next((c for name, c in regions.items() if within(key, name)), ())
        if around and path in inside:
            around = [with_all_tokens(call, applied) for call in around]
        for call in own or around:
            if call.degree == 1:
                continue  # nothing is cut by weights
            for sent in style.sends(model.get_submodule(path), call):
                add(part, sent, "" if part in ("embedding", "head") else module)

    for name, layout in applied.layouts.items():
        if layout.is_collective and degree > 1:
            assert layout.rows is not None
            path, _, parameter = name.rpartition(".")
            whole = model.get_submodule(path)._parameters[parameter]
            dim, runs = layout.rows
            elements = sum(run.size for run in runs) * whole.numel() // whole.shape[dim]  # type: ignore[union-attr]
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
    if stream.dim is not None and first is not None and not applied.resolved.begin_stream:
        add("embedding", ExpectedCollective((), ("all_gather",), first.elements))
    for call in calls.get(decoder.head or "", ()):
        vocabulary = model.get_submodule(decoder.head or "")._parameters["weight"].shape[0]  # type: ignore[union-attr]
        if degree == 1:
            continue
        if options.loss_parallel:
            # Two numbers a token and rank in one, as ours; or three of a number, as torch's and torchtitan's.
            add("loss", ExpectedCollective(("all_gather", "all_reduce"), (), 2 * degree * call.tokens))
            for _ in range(2):
                add("loss", ExpectedCollective(("all_reduce",), (), call.tokens))
        else:
            add(
                "head",
                ExpectedCollective(("all_gather",), (), call.tokens * next_multiple(vocabulary, degree)),
            )
    return {part: Allowances(*map(tuple, directions)) for part, directions in needed.items()}


def _judged(applied: AppliedPlan) -> dict[str, Style]:
    """Return the styles by which a model is judged: those of its plan, of regions first, and what foreign ones stand for."""
    decoder, plan = applied.decoder, applied.plan
    expected = {name: plan.mlp_region()[""] for name in (*decoder.mixers, *decoder.mlps)}
    if decoder.embedding is not None:
        expected[decoder.embedding] = plan.vocab_embedding()
    if decoder.head is not None:
        expected[decoder.head] = plan.vocab_head()
    own = native_styles(applied.styles)
    crossing = {key: style for key, style in own.items() if style.enters_full}
    return crossing | {key: style for key, style in native_styles(expected).items() if key not in own} | own


def _path(key: str, applied: AppliedPlan) -> str:
    """Return the name of the module that a key names, or that holds the parameter which it names."""
    entry = applied.resolved.by_key.get(key)
    return key if entry is None else entry.path


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
        and (anywhere or holder(collective.module, [allowance.module]) is not None)
    )


def _elements(collective: Collective) -> int:
    assert collective.elements is not None  # what runs has sizes
    return collective.elements
