"""The gated recurrence over chunks of tokens: forward and backward as matrix products.

Inside a chunk of C tokens the output is `A V` with the lower triangular matrix

    A[i, j] = sum_d q[i, d] k[j, d] exp(g[j+1, d] + ... + g[i, d])        j <= i

The textbook form factors the exponential into `exp(b_i) exp(-b_j)` with the running sum b, and the second
factor overflows as soon as the gates of a chunk add up to less than -88 in float32. Here A is filled by
halves instead: two neighbouring blocks of h tokens meet at a boundary, the decay from j to i is
the decay from j to the boundary times the decay from the boundary to i, and both are products of numbers
in [0, 1]. log2(C) levels, each one (batched) matrix product; nothing is ever divided or exponentiated with
the wrong sign, one exponential is taken per gate, and every decay carries the rounding of log2(C)
products however strong the gates are. The gradient of the gates follows the same tree downwards, as sums of
terms that all carry their decay: it does not subtract large numbers to get a small one.

Between chunks a [K, V] state is carried, one step a chunk.

Shapes: R rows (batch x heads), M chunks, C tokens a chunk, K and V; N = R * M.
"""

from typing import Any

import torch

# Blocks this small: a broadcast product, not a batched gemm of 1x1 and 2x2 matrices (35% of the backward
# pass's level loop).
BROADCAST_BLOCK = 2


@torch.library.custom_op("titanplans::gated_recurrence", mutates_args=())
def gated_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs [R, M, C, V], final states [R, K, V], and for the backward pass A [N, C, C] and the entering states.

    q (scaled), k, g: [R, M, C, K] and contiguous, v: [R, M, C, V], state: [R, K, V], all of one dtype.

    It is one operator to PyTorch, so that `torch.compile` neither breaks its graph here nor spends minutes on
    unrolled loops whose time is in matrix products anyway.
    """
    levels, from_start, to_end = _decays(g)
    scores_NCC = _scores(q, k, levels)
    update = (k * to_end).transpose(2, 3) @ v
    states, final = _scan(update, from_start[:, :, -1], state)
    o = scores_NCC @ v.flatten(0, 1)
    o.baddbmm_((q * from_start).flatten(0, 1), states.flatten(0, 1))
    return o.view_as(v), final, scores_NCC, states


@torch.library.custom_op("titanplans::gated_recurrence_backward", mutates_args=())
def gated_recurrence_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scores_NCC: torch.Tensor,
    states: torch.Tensor,
    do: torch.Tensor,
    dfinal: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The adjoint of every line of `gated_recurrence`, last line first: gradients of q, k, v, g and state."""
    levels, from_start, to_end = _decays(g)
    chunk_decay = from_start[:, :, -1]
    do_NCV, v_NCV = do.flatten(0, 1), v.flatten(0, 1)

    # dstates[m] is the gradient of the state that chunk m leaves behind.
    dupdate = (q * from_start).transpose(2, 3) @ do
    dstates, dstate = _scan_back(dupdate, chunk_decay, dfinal)

    dscores_NCC = do_NCV @ v_NCV.transpose(1, 2)
    dv = scores_NCC.transpose(1, 2) @ do_NCV
    dv.baddbmm_((k * to_end).flatten(0, 1), dstates.flatten(0, 1))
    dq = (do @ states.transpose(2, 3)).mul_(from_start)
    dk = (v @ dstates.transpose(2, 3)).mul_(to_end)

    # Gradients of the logarithms of the decays: from the chunk's start, and to its end.
    dfrom_start, dto_end = q * dq, k * dk
    dfrom_start[:, :, -1] += (states * dstates).sum(-1) * chunk_decay
    dg = _levels_back(q, k, levels, dscores_NCC, dq, dk, dfrom_start, dto_end)
    dself = dscores_NCC.diagonal(0, 1, 2).reshape(*q.shape[:3], 1)
    return dq.addcmul_(dself, k), dk.addcmul_(dself, q), dv.view_as(v), dg, dstate


@gated_recurrence.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, num_chunks, chunk_size, key_dim = q.shape
    scores = q.new_empty(rows * num_chunks, chunk_size, chunk_size)
    return (
        torch.empty_like(v),
        torch.empty_like(state),
        scores,
        v.new_empty(rows, num_chunks, key_dim, v.shape[3]),
    )


@gated_recurrence_backward.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scores_NCC: torch.Tensor,
    states: torch.Tensor,
    do: torch.Tensor,
    dfinal: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    empty = torch.empty_like
    return empty(q), empty(k), empty(v), empty(g), empty(dfinal)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, g, _ = inputs
    _, final, scores_NCC, states = output
    ctx.save_for_backward(q, k, v, g, scores_NCC, states)
    ctx.final_shape = final.shape
    ctx.set_materialize_grads(False)  # nobody differentiates A and the entering states


def _backward(
    ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None, *_: None
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, g, scores_NCC, states = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do.contiguous()
    dfinal = states.new_zeros(ctx.final_shape) if dfinal is None else dfinal.contiguous()
    # A gemm in bfloat16, where a backward pass runs under autocast, would lose the accumulation dtype.
    with torch.autocast(do.device.type, enabled=False):
        return gated_recurrence_backward(q, k, v, g, scores_NCC, states, do, dfinal)


gated_recurrence.register_autograd(_backward, setup_context=_save)


def _decays(g: torch.Tensor) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, torch.Tensor]:
    """Decays of log gates [R, M, C, K], as products up a binary tree.

    Returns, for each level h = 1, 2, .., C/2 of neighbouring blocks of h tokens, the decays from
    the boundary to each token of the second block (its own gate included) and from each token
    of the first block (its own gate excluded) to the boundary, [N, C/2h, h, K] each; then both for the
    whole chunk, [R, M, C, K].
    """
    from_start, to_end = g.exp(), torch.ones_like(g)
    levels = []
    for h in _block_sizes(g.shape[2]):
        first_from_start, second_from_start = _halves(from_start, h)
        first_to_end, _ = _halves(to_end, h)
        levels.append((second_from_start.clone(), first_to_end.clone()))
        first_to_end *= second_from_start[:, :, -1:]
        second_from_start *= first_from_start[:, :, -1:]
    return levels, from_start, to_end


def _scores(
    q: torch.Tensor, k: torch.Tensor, levels: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """A, [N, C, C]; zero above the diagonal."""
    rows, num_chunks, chunk_size, _ = q.shape
    scores_NCC = q.new_zeros(rows * num_chunks, chunk_size, chunk_size)
    scores_NCC.diagonal(0, 1, 2).copy_((q * k).sum(-1).flatten(0, 1))
    for h, (from_boundary, to_boundary) in zip(_block_sizes(chunk_size), levels, strict=True):
        q2, k1 = _halves(q, h)[1] * from_boundary, _halves(k, h)[0] * to_boundary
        if h <= BROADCAST_BLOCK:
            block = (q2.unsqueeze(3) * k1.unsqueeze(2)).sum(-1)
        else:
            block = (q2.flatten(0, 1) @ k1.flatten(0, 1).transpose(1, 2)).view(*q2.shape[:3], h)
        _blocks(scores_NCC, h).copy_(block)
    return scores_NCC


def _levels_back(
    q: torch.Tensor,
    k: torch.Tensor,
    levels: list[tuple[torch.Tensor, torch.Tensor]],
    dscores_NCC: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dfrom_start: torch.Tensor,
    dto_end: torch.Tensor,
) -> torch.Tensor:
    """Adjoint of `_scores` and `_decays`: adds to dq and dk in place, returns dg (in dfrom_start's storage).

    Above level h, dfrom_start and dto_end hold the gradients of the log decays of blocks of 2h tokens, below
    it those of blocks of h: a block's total decay gets what its neighbour's tokens owe to it.
    """
    for h, (from_boundary, to_boundary) in zip(
        reversed(_block_sizes(q.shape[2])), reversed(levels), strict=True
    ):
        dfirst, dsecond = _halves(dfrom_start, h)
        dfirst_to_end, _ = _halves(dto_end, h)
        dfirst[:, :, -1] += dsecond.sum(2)
        dsecond[:, :, -1] += dfirst_to_end.sum(2)

        q2, k1 = _halves(q, h)[1] * from_boundary, _halves(k, h)[0] * to_boundary
        dblock = _blocks(dscores_NCC, h)
        if h <= BROADCAST_BLOCK:
            dq2 = (dblock.unsqueeze(4) * k1.unsqueeze(2)).sum(3)
            dk1 = (dblock.unsqueeze(4) * q2.unsqueeze(3)).sum(2)
        else:
            dblock = dblock.reshape(-1, h, h)
            dq2 = (dblock @ k1.flatten(0, 1)).view_as(q2)
            dk1 = (dblock.transpose(1, 2) @ q2.flatten(0, 1)).view_as(k1)
        dsecond.addcmul_(dq2, q2)
        dfirst_to_end.addcmul_(dk1, k1)
        _halves(dq, h)[1].addcmul_(dq2, from_boundary)
        _halves(dk, h)[0].addcmul_(dk1, to_boundary)
    return dfrom_start


def _scan(
    update: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """States that enter each chunk, [R, M, K, V], and the one that leaves the last, [R, K, V]."""
    entering = torch.empty_like(update)
    for m in range(update.shape[1]):
        entering[:, m] = state
        state = torch.addcmul(update[:, m], state, decay[:, m, :, None])
    return (
        entering,
        state.clone(),
    )  # an operator may not return its input, which it is where there is no chunk


def _scan_back(
    dupdate: torch.Tensor, decay: torch.Tensor, dstate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, from the last chunk to the first, on gradients."""
    dstates = torch.empty_like(dupdate)
    for m in reversed(range(dupdate.shape[1])):
        dstates[:, m] = dstate
        dstate = torch.addcmul(dupdate[:, m], dstate, decay[:, m, :, None])
    return dstates, dstate.clone()


def _block_sizes(chunk_size: int) -> list[int]:
    """1, 2, 4, .., chunk_size / 2."""
    return [1 << level for level in range(chunk_size.bit_length() - 1)]


def _halves(x: torch.Tensor, h: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second blocks of h tokens in [R, M, C, D], as two views [N, C/2h, h, D]."""
    first, second = x.view(-1, x.shape[2] // (2 * h), 2, h, x.shape[3]).unbind(2)
    return first, second


def _blocks(scores_NCC: torch.Tensor, h: int) -> torch.Tensor:
    """The view [N, C/2h, h, h] of the blocks where second blocks of h tokens look at first ones."""
    n, chunk_size, _ = scores_NCC.shape
    pairs = chunk_size // (2 * h)
    return (
        scores_NCC.view(n, pairs, 2, h, pairs, 2, h)[:, :, 1, :, :, 0].diagonal(0, 1, 3).permute(0, 3, 1, 2)
    )
