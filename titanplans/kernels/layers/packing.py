"""Sequences packed along the tokens of a batch of one, as `cu_seqlens` describes them: a recurrence runs over each."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from titanplans.errors import KernelError

State = torch.Tensor | tuple[torch.Tensor, ...] | None
"""What a recurrence carries on of each sequence: tensors [N, ...]."""
Result = tuple[Any, ...]
"""Outputs [B, T, ...] and final states, each a `State`."""


def of_state(change: Callable[[torch.Tensor], torch.Tensor], state: State) -> State:
    """Return `state` with each of its tensors changed."""
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
    """Call `run` with `inputs` [B, T, ...] and initial states; packed sequences are a batch for it, of similar lengths.

    The shorter ones are filled up behind, with tokens of zeros: no key, no decay, so no effect on a state.

    Args:
        run: returns outputs [B, T, ...] and any number of final states [N, ...].
        inputs: by name, for `run`; the first has one step a token, others may have several.
        states: by name, N of them, the number of packed sequences or B.
        cu_seqlens: the N + 1 bounds of the sequences; B is 1 then. They are read on the host, which is a graph
            break under `torch.compile`.
        of_tokens: the second value of `run` is no state, but [B, T, ...] like the outputs.

    Raises:
        KernelError: bounds that don't fit the tokens, a batch of more than one, or states of another number of sequences,
            which FLA's kernels refuse, too.
    """
    if cu_seqlens is None:
        return run(dict(inputs), dict(states))
    batch, tokens = next(iter(inputs.values())).shape[:2]
    bounds = _bounds(cu_seqlens, batch, tokens)
    for name, state in states.items():
        for x in state if isinstance(state, tuple) else () if state is None else (state,):
            if len(x) != len(bounds) - 1:
                raise KernelError(
                    f"{name} holds {len(x)} states, and cu_seqlens bounds {len(bounds) - 1} sequences"
                )
    if len(bounds) == 2:
        return run(dict(inputs), dict(states))
    alike: dict[int, list[int]] = {}  # at most twice as long as each other
    for n, (first, end) in enumerate(pairwise(bounds)):
        alike.setdefault(max(end - first, 1).bit_length(), []).append(n)
    places, index, shapes = [0] * tokens, [], []  # of the tokens, and of zeros
    for numbers in alike.values():
        length = max(max(bounds[n + 1] - bounds[n] for n in numbers), 1)
        shapes.append((len(numbers), length))
        for n in numbers:
            first, end = bounds[n : n + 2]
            places[first:end] = range(len(index), len(index) + end - first)
            index += [*range(first, end), *[tokens] * (length - end + first)]
    parts = {name: _taken(x, index, tokens, shapes) for name, x in inputs.items()}
    results = []
    for group, numbers in enumerate(alike.values()):
        own = torch.tensor(numbers)
        of_group = {
            name: of_state(lambda x, own=own: x.index_select(0, own.to(x.device)), state)
            for name, state in states.items()
        }
        results.append(run({name: part[group] for name, part in parts.items()}, of_group))
    order = [n for numbers in alike.values() for n in numbers]
    back = torch.tensor(order).argsort()

    def joined(parts: tuple[Any, ...], tokenwise: bool) -> Any:
        """Put `parts`, one of each group, back in order."""
        if parts[0] is None:
            return None
        if isinstance(parts[0], tuple):
            return tuple(joined(one, tokenwise) for one in zip(*parts, strict=True))
        if tokenwise:
            tokens_of_all = torch.cat([x.flatten(0, 1) for x in parts])
            return tokens_of_all.index_select(0, torch.tensor(places, device=parts[0].device))[None]
        return torch.cat(parts).index_select(0, back.to(parts[0].device))

    outputs, *finals = zip(*results, strict=True)
    return joined(outputs, True), *(joined(final, of_tokens) for final in finals)


def _taken(
    x: torch.Tensor, index: list[int], tokens: int, shapes: list[tuple[int, int]]
) -> list[torch.Tensor]:
    """Return the tokens of x [1, T, ...] or, of several steps a token, [1, T steps, ...], group by group; number T is zeros.

    Each group is [N, L, ...] or [N, L steps, ...], N sequences of L tokens as `shapes` says.
    """
    steps = x.shape[1] // tokens
    by_token = x[0].unflatten(0, (tokens, steps)) if steps > 1 else x[0]
    by_token = torch.cat([by_token, by_token.new_zeros(1, *by_token.shape[1:])])
    taken = by_token.index_select(0, torch.tensor(index, device=x.device))
    groups = [
        part.unflatten(0, shape)
        for part, shape in zip(taken.split([n * length for n, length in shapes]), shapes, strict=True)
    ]
    return [group.flatten(1, 2) for group in groups] if steps > 1 else groups


def sequences(
    inputs: Mapping[str, torch.Tensor], cu_seqlens: torch.Tensor | None
) -> Iterator[tuple[int | None, dict[str, torch.Tensor]]]:
    """Yield the number and the `inputs` [1, t, ...] of each packed sequence; of a batch that is not packed, None and all.

    Raises:
        KernelError: see `by_sequence`.
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
        raise KernelError(f"batch size {batch} with cu_seqlens; flatten the sequences to batch size 1")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
        raise KernelError(f"cu_seqlens {bounds} must rise from 0 to T={tokens}")
    return bounds
