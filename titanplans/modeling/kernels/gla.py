"""Gated Linear Attention on a CPU: `chunk_gla` and `fused_recurrent_gla` with FLA's signatures.

The recurrence, for one head with key size K and value size V (Yang et al. 2024, arXiv:2312.06635, eq. 3):

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T          o_t = scale * S_t^T q_t

This file checks arguments and lays tokens out in chunks; the mathematics is in `gla_chunks.py`.
"""

from itertools import pairwise
from typing import Any

import torch

from titanplans.errors import KernelError
from titanplans.modeling.kernels.gla_chunks import gated_recurrence
from titanplans.modeling.kernels.precision import accumulation_dtype

# Measured, not derived: benchmarks/cpu_kernels.py. 32 and 64 are level in time at K=64, V=128; 64 keeps
# half as many chunk states for the backward pass.
CHUNK_SIZE = 64


def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated linear attention over whole sequences, as `fla.ops.gla.chunk_gla`, in plain PyTorch.

    Args:
        q: queries, [B, T, H, K].
        k: keys, [B, T, H, K].
        v: values, [B, T, H, V].
        g: log forget gates, [B, T, H, K]; no lower bound, -inf included, since nothing is ever divided by
            a decay.
        scale: factor on the queries; `K ** -0.5` if None.
        initial_state: [N, H, K, V], or [N, H, V, K] with `state_v_first`; zeros if None. N is B, or the
            number of packed sequences.
        output_final_state: also return the states after the last token of each sequence.
        state_v_first: layout of the states that go in and come out.
        cu_seqlens: [N + 1] boundaries of sequences packed along T; B must be 1. They are read on the
            host, which is a graph break under `torch.compile`.
        cu_seqlens_cpu: a host copy of `cu_seqlens`; read instead of it if given.

    Returns:
        The outputs [B, T, H, V] in the dtype of `v`, and the final states in the dtype of the
        accumulation (float64 for float64 inputs, else float32) or None.

    Raises:
        KernelError: shapes that don't agree.
    """
    _check_shapes(q, k, v, g)
    batch, seq_len, num_heads, _ = q.shape
    lengths = _sequence_lengths(q, cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    num_sequences = batch if lengths is None else len(lengths)
    dtype = accumulation_dtype(q, k, v, g, initial_state)
    state = _state_in(q, v, initial_state, num_sequences, state_v_first).to(dtype)

    chunk_size = _chunk_size(max(lengths) if lengths else seq_len)
    if lengths is None:
        num_chunks = -(-seq_len // chunk_size)
        bounds, positions = [0, num_chunks], None
        state = state.reshape(batch * num_heads, 1, *state.shape[2:])
    else:
        bounds, positions = _chunk_bounds(lengths, chunk_size, q.device)
        num_chunks = bounds[-1]
        state = state.transpose(0, 1)  # [H, N, K, V]: a head is a row, its sequences are runs of chunks

    def to_chunks(x_BTHD: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D] -> [B * H, M, C, D]; padded tokens are zero: no key, no decay, so no effect."""
        x_BTHD = x_BTHD.to(dtype)
        if positions is not None:
            x_BTHD = x_BTHD.new_zeros(1, num_chunks * chunk_size, *x_BTHD.shape[2:]).index_copy(
                1, positions, x_BTHD
            )
        elif num_chunks * chunk_size > seq_len:
            # Not F.pad, whose gradient torch's compiler gives other strides than it has where the length is a symbol.
            missing = num_chunks * chunk_size - seq_len
            x_BTHD = torch.cat([x_BTHD, x_BTHD.new_zeros(batch, missing, *x_BTHD.shape[2:])], 1)
        x_BHTD = x_BTHD.transpose(1, 2).contiguous()
        return x_BHTD.view(batch * num_heads, num_chunks, chunk_size, x_BHTD.shape[-1])

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # A gemm in bfloat16 would lose what the accumulation dtype is for.
    with torch.autocast(q.device.type, enabled=False):
        o, state, _, _ = gated_recurrence(
            to_chunks(q) * scale, to_chunks(k), to_chunks(v), to_chunks(g), state, bounds
        )
    o = o.reshape(batch, num_heads, num_chunks * chunk_size, v.shape[-1]).transpose(1, 2)
    o = o[:, :seq_len] if positions is None else o.index_select(1, positions)
    if not output_final_state:
        return o.to(v.dtype), None
    state = state.reshape(batch, num_heads, *state.shape[2:]) if lengths is None else state.transpose(0, 1)
    return o.to(v.dtype), (state.transpose(-1, -2) if state_v_first else state).contiguous()


def fused_recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same function under the name FLA uses for T <= 64 and for decoding; a CPU gains nothing from a second one.

    Arguments as for `chunk_gla`; `gk` is its `g` (no decay if None), and `reverse` runs every sequence
    from its last token to its first.

    Raises:
        KernelError: `gv` (gates on the value dimension, which no FLA layer uses with this function), an
            unknown keyword, or shapes that don't agree.
    """
    if gv is not None:
        raise KernelError(
            "fused_recurrent_gla: gv is not computed on a CPU; gate the keys (gk) or run on a GPU"
        )
    if kwargs:
        raise KernelError(f"fused_recurrent_gla: unknown arguments {', '.join(sorted(kwargs))} on a CPU")
    gk = torch.zeros_like(k) if gk is None else gk
    if reverse:
        q, k, v, gk = (x.flip(1) for x in (q, k, v, gk))
        cu_seqlens = None if cu_seqlens is None else q.shape[1] - cu_seqlens.flip(0)
        if cu_seqlens is not None and initial_state is not None:
            initial_state = initial_state.flip(0)
    o, state = chunk_gla(q, k, v, gk, scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    if reverse:
        o = o.flip(1)
        state = state.flip(0) if cu_seqlens is not None and state is not None else state
    return o, state


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> None:
    if not (q.shape == k.shape == g.shape and v.shape[:-1] == q.shape[:-1]):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkvg", (q, k, v, g), strict=True))
        raise KernelError(f"chunk_gla: {shapes}; q, k and g must be [B, T, H, K] alike and v [B, T, H, V]")


def _sequence_lengths(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[int] | None:
    """Lengths of the packed sequences, on the host; None for an ordinary batch."""
    if cu_seqlens is None:
        return None
    bounds = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in pairwise(bounds)]
    if q.shape[0] != 1:
        raise KernelError(
            f"chunk_gla: batch size {q.shape[0]} with cu_seqlens; flatten the sequences to batch size 1"
        )
    if bounds[0] != 0 or bounds[-1] != q.shape[1] or min(lengths, default=0) < 0:
        raise KernelError(f"chunk_gla: cu_seqlens {bounds} must rise from 0 to T={q.shape[1]}")
    return lengths


def _state_in(
    q: torch.Tensor, v: torch.Tensor, state: torch.Tensor | None, num_sequences: int, state_v_first: bool
) -> torch.Tensor:
    """The initial states as [N, H, K, V]."""
    shape = (num_sequences, q.shape[2], q.shape[3], v.shape[3])
    if state is None:
        return v.new_zeros(shape)
    state = state.transpose(-1, -2) if state_v_first else state
    if state.shape != shape:
        layout = "[N, H, V, K]" if state_v_first else "[N, H, K, V]"
        raise KernelError(f"chunk_gla: initial_state must be {layout} with N, H, K, V = {shape}")
    return state


def _chunk_bounds(
    lengths: list[int], chunk_size: int, device: torch.device
) -> tuple[list[int], torch.Tensor]:
    """The chunks at which sequences begin (and the last one ends), and every token's place among the padded chunks.

    >>> _chunk_bounds([3, 4, 1], chunk_size=2, device=torch.device("cpu"))
    ([0, 2, 4, 5], tensor([0, 1, 2, 4, 5, 6, 7, 8]))
    """
    bounds, positions = [0], []
    for length in lengths:
        positions.append(torch.arange(length, device=device) + bounds[-1] * chunk_size)
        bounds.append(bounds[-1] + -(-length // chunk_size))
    return bounds, torch.cat(positions)


def _chunk_size(longest: int) -> int:
    """`CHUNK_SIZE`, or the power of two that holds sequences shorter than that.

    By comparisons: `torch.compile` then compiles once for all lengths of one chunk size, not for each length.
    """
    size = 1
    while size < min(longest, CHUNK_SIZE):
        size *= 2
    return size
