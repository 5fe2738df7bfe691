"""Gated Linear Attention on a CPU: `chunk_gla` and `fused_recurrent_gla` with FLA's signatures.

The recurrence, for one head with key size K and value size V (Yang et al. 2024, arXiv:2312.06635, eq. 3):

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T          o_t = scale * S_t^T q_t

Not FLA's own `naive_recurrent_gla`, a loop over time that is too slow to train with (docs/benchmarks.md has the
ratio). This file checks arguments and lays tokens out in chunks; the mathematics is in `gla_chunks.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from titanplans.errors import KernelError
from titanplans.kernels.layers.packing import Result, by_sequence
from titanplans.kernels.precision import accumulation_dtype
from titanplans.kernels.recurrent.gla_chunks import gated_recurrence

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
) -> Result:
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
        cu_seqlens: [N + 1] boundaries of sequences packed along T; B must be 1.
        cu_seqlens_cpu: a host copy of `cu_seqlens`; read instead of it if given.

    Returns:
        The outputs [B, T, H, V] in the dtype of `v`, and the final states in the dtype of the
        accumulation (float64 for float64 inputs, else float32) or None.

    Raises:
        KernelError: shapes that don't agree.
    """
    bounds = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if not (q.shape == k.shape == g.shape and v.shape[:-1] == q.shape[:-1]):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkvg", (q, k, v, g), strict=True))
        raise KernelError(f"chunk_gla: {shapes}; q, k and g must be [B, T, H, K] alike and v [B, T, H, V]")
    if initial_state is not None:
        state = initial_state.transpose(-1, -2) if state_v_first else initial_state
        shape = (len(bounds) - 1 if bounds is not None else len(q), *q.shape[2:], v.shape[3])
        if state.shape != shape:
            layout = "[N, H, V, K]" if state_v_first else "[N, H, K, V]"
            raise KernelError(f"chunk_gla: initial_state must be {layout} with N, H, K, V = {shape}")
    else:
        state = None
    dtype = accumulation_dtype(q, k, v, g, initial_state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = {name: x.to(dtype) for name, x in zip("qkvg", (q, k, v, g), strict=True)}
    inputs["q"] = inputs["q"] * scale
    o, final = by_sequence(_chunked, inputs, {"state": None if state is None else state.to(dtype)}, bounds)
    if not output_final_state or final is None:
        return o.to(v.dtype), None
    return o.to(v.dtype), (final.transpose(-1, -2) if state_v_first else final).contiguous()


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
) -> Result:
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


def _chunked(inputs: dict[str, torch.Tensor], states: Mapping[str, Any]) -> Result:
    """The recurrence over q (scaled), k, g [B, T, H, K] and v [B, T, H, V], all of one dtype, from a state [B, H, K, V]."""
    v, state = inputs["v"], states["state"]
    batch, seq_len, num_heads, value_size = v.shape
    chunk_size = _chunk_size(seq_len)
    num_chunks = -(-seq_len // chunk_size)
    if state is None:
        state = v.new_zeros(batch, num_heads, inputs["k"].shape[-1], value_size)

    def to_chunks(x_BTHD: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D] -> [B * H, M, C, D]; padded tokens are zero: no key, no decay, so no effect."""
        if num_chunks * chunk_size > seq_len:
            # Not F.pad, whose gradient torch's compiler gives other strides than it has where the length is a symbol.
            missing = num_chunks * chunk_size - seq_len
            x_BTHD = torch.cat([x_BTHD, x_BTHD.new_zeros(batch, missing, *x_BTHD.shape[2:])], 1)
        x_BHTD = x_BTHD.transpose(1, 2).contiguous()
        return x_BHTD.view(batch * num_heads, num_chunks, chunk_size, x_BHTD.shape[-1])

    # A gemm in bfloat16 would lose what the accumulation dtype is for.
    with torch.autocast(v.device.type, enabled=False):
        o, final, _, _ = gated_recurrence(*(to_chunks(inputs[name]) for name in "qkvg"), state.flatten(0, 1))
    o = o.reshape(batch, num_heads, num_chunks * chunk_size, value_size).transpose(1, 2)[:, :seq_len]
    return o, final.view_as(state)


def _chunk_size(seq_len: int) -> int:
    """`CHUNK_SIZE`, or the power of two that holds a sequence shorter than that.

    By comparisons: `torch.compile` then compiles once for all lengths of one chunk size, not for each length.
    """
    size = 1
    while size < min(seq_len, CHUNK_SIZE):
        size *= 2
    return size
