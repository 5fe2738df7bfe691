"""Sequences packed along the tokens of a batch of one, as `cu_seqlens` describes them: a recurrence runs over each."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch

from titanplans.errors import KernelError

Result = tuple[torch.Tensor, torch.Tensor | None]
"""Outputs [B, T, H, V] and final states [N, H, K, V], or None."""


def by_sequence(
    run: Callable[[dict[str, torch.Tensor], torch.Tensor | None], Result],
    inputs: Mapping[str, torch.Tensor],
    state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> Result:
    """Call `run` with `inputs` [B, T, ...] and the initial state, or once for each packed sequence and its own state.

    Args:
        run: returns outputs of [B, T, ...] and final states [N, ...].
        inputs: by name, for `run`.
        state: [N, ...], N the number of packed sequences or B; None: zeros.
        cu_seqlens: the N + 1 bounds of the sequences; B is 1 then. They are read on the host, which is a graph
            break under `torch.compile`.

    Raises:
        KernelError: bounds that don't fit the tokens, or a batch of more than one.
    """
    if cu_seqlens is None:
        return run(dict(inputs), state)
    batch, tokens = next(iter(inputs.values())).shape[:2]
    if batch != 1:
        raise KernelError(f"batch size {batch} with cu_seqlens; flatten the sequences to batch size 1")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
        raise KernelError(f"cu_seqlens {bounds} must rise from 0 to T={tokens}")
    outputs: list[torch.Tensor] = []
    finals: list[torch.Tensor] = []
    for n, (first, end) in enumerate(pairwise(bounds)):
        part = {name: x[:, first:end] for name, x in inputs.items()}
        output, final = run(part, None if state is None else state[n : n + 1])
        outputs.append(output)
        finals += [] if final is None else [final]
    return torch.cat(outputs, 1), torch.cat(finals) if finals else None
