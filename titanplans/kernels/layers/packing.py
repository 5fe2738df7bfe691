"""Run a recurrence over sequences that are packed into a batch of one (`cu_seqlens`). Start at `by_sequence`."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from titanplans.errors import KernelError

State = torch.Tensor | tuple[torch.Tensor, ...] | None
"""The state of a recurrence: tensors [N, ...], or None."""
Result = tuple[Any, ...]
"""Outputs [B, T, ...] and final states, each a `State`."""


def of_state(change: Callable[[torch.Tensor], torch.Tensor], state: State) -> State:
    """Return `state` with `change` applied to each of its tensors."""
    if state is None:
        return None
    return tuple(map(change, state)) if isinstance(state, tuple) else change(state)


def by_sequence(
    run: Callable[[dict[str, torch.Tensor], dict[str, State]], Result],
    inputs: Mapping[str, torch.Tensor],
    states: Mapping[str, State],
    cu_seqlens: torch.Tensor | None,
    of_tokens: bool = False,
) -> Result:
    """Call `run` with inputs [B, T, ...] and initial states. Packed sequences of similar lengths are passed to `run` as a
    batch.

    Shorter sequences of a batch are padded at the end with zeros, which have no key and no decay, so they do not change a
    state.

    Args:
        run: returns outputs [B, T, ...] and any number of final states [N, ...].
        inputs: the inputs by name. The first has one step per token, others may have several.
        states: the initial states by name, [N, ...], where N is the number of packed sequences, or B.
        cu_seqlens: the N + 1 bounds of packed sequences, with B = 1. They are copied to the host, which breaks graphs of
            torch.compile.
        of_tokens: the second result of `run` is [B, T, ...] like the outputs, not a final state.

    Raises:
        KernelError: bounds do not match the tokens, B is not 1, or the number of states is not N. FLA's kernels refuse
            these, too.
    """
    if cu_seqlens is None:
        return run(dict(inputs), dict(states))
    batch, tokens = next(iter(inputs.values())).shape[:2]
    bounds = _bounds(cu_seqlens, batch, tokens)
    for name, state in states.items():
        for x in state if isinstance(state, tuple) else () if state is None else (state,):
            if len(x) != len(bounds) - 1:
                raise KernelError(
                    f"{name} has {len(x)} states, but cu_seqlens has {len(bounds) - 1} sequences"
                )
    if len(bounds) == 2:
        return run(dict(inputs), dict(states))
    # Sequences in a group differ in length by less than a factor of two.
    groups: dict[int, list[int]] = {}
    for n, (first, end) in enumerate(pairwise(bounds)):
        groups.setdefault(max(end - first, 1).bit_length(), []).append(n)
    # `source` has, for each position in the concatenated batches, the index of the token there, or `tokens` for padding.
    # `position` is the inverse: for each token, its position in the concatenated batches.
    position, source, shapes = [0] * tokens, [], []
    for members in groups.values():
        length = max(max(bounds[n + 1] - bounds[n] for n in members), 1)
        shapes.append((len(members), length))
        for n in members:
            first, end = bounds[n : n + 2]
            position[first:end] = range(len(source), len(source) + end - first)
            source += [*range(first, end), *[tokens] * (length - end + first)]
    batches = {name: _to_batches(x, source, tokens, shapes) for name, x in inputs.items()}
    results = []
    for index, members in enumerate(groups.values()):
        selected = torch.tensor(members)
        of_group = {
            name: of_state(lambda x, selected=selected: x.index_select(0, selected.to(x.device)), state)
            for name, state in states.items()
        }
        results.append(run({name: batch[index] for name, batch in batches.items()}, of_group))
    order = torch.tensor([n for members in groups.values() for n in members]).argsort()

    def join(by_group: tuple[Any, ...], tokenwise: bool) -> Any:
        """Concatenate the results of the groups in the order of the packed tokens, or of the sequences."""
        if by_group[0] is None:
            return None
        if isinstance(by_group[0], tuple):
            return tuple(join(one, tokenwise) for one in zip(*by_group, strict=True))
        if tokenwise:
            padded = torch.cat([x.flatten(0, 1) for x in by_group])
            return padded.index_select(0, torch.tensor(position, device=by_group[0].device))[None]
        return torch.cat(by_group).index_select(0, order.to(by_group[0].device))

    outputs, *finals = zip(*results, strict=True)
    return join(outputs, True), *(join(final, of_tokens) for final in finals)


def _to_batches(
    x: torch.Tensor, source: list[int], tokens: int, shapes: list[tuple[int, int]]
) -> list[torch.Tensor]:
    """Return the tokens `source` of x [1, T, ...] as one padded batch [N, L, ...] for each of `shapes`; index T is padding.

    With several steps per token, x is [1, T steps, ...], and a batch [N, L steps, ...].
    """
    steps = x.shape[1] // tokens
    by_token = x[0].unflatten(0, (tokens, steps)) if steps > 1 else x[0]
    by_token = torch.cat([by_token, by_token.new_zeros(1, *by_token.shape[1:])])
    selected = by_token.index_select(0, torch.tensor(source, device=x.device))
    batches = [
        batch.unflatten(0, shape)
        for batch, shape in zip(selected.split([n * length for n, length in shapes]), shapes, strict=True)
    ]
    return [batch.flatten(1, 2) for batch in batches] if steps > 1 else batches


def sequences(
    inputs: Mapping[str, torch.Tensor], cu_seqlens: torch.Tensor | None
) -> Iterator[tuple[int | None, dict[str, torch.Tensor]]]:
    """Yield the index and the inputs [1, t, ...] of each packed sequence; without `cu_seqlens`, None and all inputs.

    Raises:
        KernelError: as `by_sequence`.
    """
    if cu_seqlens is None:
        yield None, dict(inputs)
        return
    batch, tokens = next(iter(inputs.values())).shape[:2]
    for n, (first, end) in enumerate(pairwise(_bounds(cu_seqlens, batch, tokens))):
        steps = {name: x.shape[1] // tokens for name, x in inputs.items()}
        yield n, {name: x[:, first * steps[name] : end * steps[name]] for name, x in inputs.items()}


def _bounds(cu_seqlens: torch.Tensor, batch: int, tokens: int) -> list[int]:
    if batch != 1:
        raise KernelError(f"batch size {batch} with cu_seqlens: flatten the sequences to batch size 1")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
        raise KernelError(f"cu_seqlens {bounds} must rise from 0 to T={tokens}")
    return bounds
