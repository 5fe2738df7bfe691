"""Sequences packed along the tokens of a batch of one, as `cu_seqlens` describes them: a recurrence runs over each."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from operator import itemgetter
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
    """Call `run` with `inputs` [B, T, ...] and initial states, or once for each packed sequence and its own states.

    Args:
        run: returns outputs [B, T, ...] and any number of final states [N, ...].
        inputs: by name, for `run`; the first has one step a token, others may have several.
        states: by name, N of them, the number of packed sequences or B.
        cu_seqlens: the N + 1 bounds of the sequences; B is 1 then. They are read on the host, which is a graph
            break under `torch.compile`.
        of_tokens: what `run` returns beside outputs is no state, but [B, T, ...] as they are.

    Raises:
        KernelError: bounds that don't fit the tokens, or a batch of more than one.
    """
    results = []
    for n, part in sequences(inputs, cu_seqlens):
        own = {
            name: state if n is None else of_state(itemgetter(slice(n, n + 1)), state)
            for name, state in states.items()
        }
        results.append(run(part, own))
    if cu_seqlens is None:
        return results[0]
    outputs, *finals = zip(*results, strict=True)
    return torch.cat(outputs, 1), *(_joined(states, int(of_tokens)) for states in finals)


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
    if batch != 1:
        raise KernelError(f"batch size {batch} with cu_seqlens; flatten the sequences to batch size 1")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
        raise KernelError(f"cu_seqlens {bounds} must rise from 0 to T={tokens}")
    for n, (first, end) in enumerate(pairwise(bounds)):
        steps = {name: x.shape[1] // tokens for name, x in inputs.items()}
        yield n, {name: x[:, first * steps[name] : end * steps[name]] for name, x in inputs.items()}


def _joined(states: tuple[State, ...], dim: int) -> State:
    if states[0] is None:
        return None
    if isinstance(states[0], tuple):
        return tuple(torch.cat(parts, dim) for parts in zip(*states, strict=True))  # type: ignore[arg-type]
    return torch.cat(states, dim)  # type: ignore[arg-type]
