"""Sequences packed along the tokens of a batch of one, as `cu_seqlens` describes them: a recurrence runs over each."""

from collections.abc import Callable, Mapping
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
) -> Result:
    """Call `run` with `inputs` [B, T, ...] and initial states, or once for each packed sequence and its own states.

    Args:
        run: returns outputs [B, T, ...] and any number of final states [N, ...].
        inputs: by name, for `run`; the first has one step a token, others may have several.
        states: by name, N of them, the number of packed sequences or B.
        cu_seqlens: the N + 1 bounds of the sequences; B is 1 then. They are read on the host, which is a graph
            break under `torch.compile`.

    Raises:
        KernelError: bounds that don't fit the tokens, or a batch of more than one.
    """
    if cu_seqlens is None:
        return run(dict(inputs), dict(states))
    batch, tokens = next(iter(inputs.values())).shape[:2]
    if batch != 1:
        raise KernelError(f"batch size {batch} with cu_seqlens; flatten the sequences to batch size 1")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
        raise KernelError(f"cu_seqlens {bounds} must rise from 0 to T={tokens}")
    results = []
    for n, (first, end) in enumerate(pairwise(bounds)):
        part = {}
        for name, x in inputs.items():
            steps = x.shape[1] // tokens
            part[name] = x[:, first * steps : end * steps]
        own = {name: of_state(itemgetter(slice(n, n + 1)), state) for name, state in states.items()}
        results.append(run(part, own))
    outputs, *finals = zip(*results, strict=True)
    return torch.cat(outputs, 1), *(_joined(states) for states in finals)


def _joined(states: tuple[State, ...]) -> State:
    if states[0] is None:
        return None
    if isinstance(states[0], tuple):
        return tuple(map(torch.cat, zip(*states, strict=True)))  # type: ignore[arg-type]
    return torch.cat(states)  # type: ignore[arg-type]
