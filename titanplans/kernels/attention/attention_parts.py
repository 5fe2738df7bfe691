"""CPU replacements for further functions of FLA's softmax mixers, for which FLA's `naive.py` has no suitable reference.

FLA has no reference for mixture of block attention, and its reference for DeltaFormer does not support padding. The backward
of FlexAttention needs a GPU. The module of stick-breaking attention refuses a CPU and float32.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from titanplans.errors import KernelError
from titanplans.kernels.layers.packing import sequences
from titanplans.kernels.precision import accumulation_dtype


def parallel_moba(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    chunk_size: int,
    topk: int,
) -> torch.Tensor:
    """Return attention of each query to its block and the `topk` - 1 earlier blocks whose mean keys have the largest scores.

    Args:
        q: [1, T, H, K].
        k: [1, T, H, K].
        v: [1, T, H, V].
        cu_seqlens: bounds of packed sequences, at which blocks begin, too.
        max_seqlen: only for the launch grid of the kernel; has no effect.
        chunk_size: tokens per block.
        topk: blocks that a query attends to. If it is below 2, or no sequence is longer than a block, queries attend to all
            earlier tokens.

    Raises:
        KernelError: keys have fewer heads than queries, which FLA's code does not support.
    """
    if k.shape[2] != q.shape[2]:
        raise KernelError(
            f"parallel_moba: {k.shape[2]} key heads for {q.shape[2]} query heads, but flash-linear-attention's MoBA needs "
            "the same number: remove num_kv_heads"
        )
    # Like the kernel, count the selectable blocks of all packed sequences. The last block of a sequence is not selectable.
    selectable = sum((length - 1) // chunk_size for length in cu_seqlens.diff().tolist())
    num_selected = min(topk - 1, selectable)
    outputs = []
    for _, sequence in sequences({"q": q, "k": k, "v": v}, cu_seqlens):
        q_n, k_n, v_n = (x.transpose(1, 2) for x in sequence.values())  # [1, H, t, ...]
        time = torch.arange(q_n.shape[2], device=q.device)
        mask = time[:, None] >= time
        if num_selected > 0:
            mask = mask & _select_blocks(q_n, k_n, chunk_size, num_selected)
        outputs.append(F.scaled_dot_product_attention(q_n, k_n, v_n, attn_mask=mask).transpose(1, 2))
    return torch.cat(outputs, 1)


def _select_blocks(q: torch.Tensor, k: torch.Tensor, size: int, num_selected: int) -> torch.Tensor:
    """Return a mask [B, H, t, s], True for keys in the query's block or in one of the earlier blocks that it selects."""
    length = q.shape[2]
    block = torch.arange(length, device=q.device) // size
    same_block = block[:, None] == block
    selectable = (length - 1) // size  # all blocks but the last
    if selectable == 0:
        return same_block
    means = k[:, :, : selectable * size].unflatten(2, (selectable, size)).mean(3)
    gate = torch.einsum("bhtk,bhnk->bhtn", q.to(accumulation_dtype(q)), means.to(accumulation_dtype(k)))
    past = block[:, None] > torch.arange(selectable, device=q.device)
    best = gate.masked_fill(~past, -torch.inf).topk(min(num_selected, selectable), -1).indices
    selected = torch.zeros_like(gate).scatter(-1, best, 1.0) * past
    # Pad with the keys of the last block, which no query selects.
    return same_block | (F.pad(selected.repeat_interleave(size, -1), (0, length - selectable * size)) > 0)


def check_nsa(arguments: dict[str, Any]) -> None:
    """Refuse arguments of `parallel_nsa` that its kernel refuses or misinterprets.

    Raises:
        KernelError: the kernel would use another number of blocks, or a block has too few tokens.
    """
    counts, size = arguments.get("block_counts", 16), arguments.get("block_size", 64)
    most = counts if isinstance(counts, int) else int(counts.max())
    if most & (most - 1):
        raise KernelError(
            f"block_counts = {most}: FLA's kernel uses the next power of two: set {1 << most.bit_length()} or "
            f"{1 << most.bit_length() - 1}"
        )
    if size < 2 * most:
        raise KernelError(
            f"block_size = {size}: FLA's kernel needs twice as many tokens in a block as block_counts = {most}: set "
            f"{2 * most} or more"
        )


def nsa_selection(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    block_size: int = 64,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of each query to its blocks of keys, as FLA's `naive_nsa_selection` without its loop over queries.

    Args:
        q: [B, T, H, K].
        k: [B, T, G, K], H a multiple of G.
        v: [B, T, G, V].
        block_indices: indices of the blocks that a query attends to, [B, T, G, S]; -1: none.
        block_size: tokens per block.
        scale: factor of the scores; None: K ** -0.5.
        cu_seqlens: bounds of packed sequences.
    """
    groups = q.shape[2] // k.shape[2]
    inputs = {"q": q, "block": block_indices} | {
        name: x.repeat_interleave(groups, 2) for name, x in (("k", k), ("v", v))
    }
    outputs = []
    for _, sequence in sequences(inputs, cu_seqlens):
        q_n, block, k_n, v_n = (x.transpose(1, 2) for x in sequence.values())
        time = torch.arange(q_n.shape[2], device=q.device)
        selected = (block[..., None] == time // block_size).any(3).repeat_interleave(groups, 1)
        mask = selected & (time[:, None] >= time)
        outputs.append(
            F.scaled_dot_product_attention(q_n, k_n, v_n, attn_mask=mask, scale=scale).transpose(1, 2)
        )
    return torch.cat(outputs, 1)


def deltaformer_values(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None = None,
    C: int = 0,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the values u [B, T, H, D] of DeltaFormer: u_t = v_t - beta_t sum_{s<t} softmax_s(q_t k_s / sqrt(D)) u_s.

    Args:
        q: [B, T, H, D].
        k: [B, T, H, D].
        v: [B, T, H, D].
        beta: [B, T, H]; None: ones.
        C: the kernel's chunk size; has no effect.
        cu_seqlens: bounds of packed sequences.
    """
    dtype = accumulation_dtype(q, k, v, beta)
    inputs = {"q": q, "k": k, "v": v, "beta": torch.ones_like(q[..., 0]) if beta is None else beta}
    outputs = []
    for _, sequence in sequences(inputs, cu_seqlens):
        q_n, k_n, v_n, beta_n = (x.to(dtype).transpose(1, 2) for x in sequence.values())
        scores = q_n @ k_n.transpose(-1, -2) * q.shape[-1] ** -0.5
        past = torch.ones_like(scores, dtype=torch.bool).tril(-1)
        weights = scores.masked_fill(~past, torch.finfo(dtype).min).softmax(-1) * past
        # (I + diag(beta) W) u = v
        u = torch.linalg.solve_triangular(beta_n[..., None] * weights, v_n, upper=False, unitriangular=True)
        outputs.append(u.transpose(1, 2))
    return torch.cat(outputs, 1).to(v.dtype)


def mean_pooling(x: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean of each chunk of x [B, T, H, D]. The last chunk of a sequence may be shorter."""
    chunks = [sequence["x"].split(chunk_size, 1) for _, sequence in sequences({"x": x}, cu_seqlens)]
    means = [chunk.to(accumulation_dtype(x)).mean(1, keepdim=True) for of_one in chunks for chunk in of_one]
    return torch.cat(means, 1).to(x.dtype)


def create_block_mask(
    mask_mod: Callable[..., torch.Tensor], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int
) -> torch.Tensor:
    """Return the mask [Q_LEN, KV_LEN] of FlexAttention, the same for all sequences and heads; True: the query attends."""
    assert (B, H) == (None, None)
    zero = torch.zeros((), dtype=torch.long)
    return mask_mod(zero, zero, torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN))


def flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return FlexAttention of q, k, v [B, H, T, D] with a mask of `create_block_mask`."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=block_mask)


def stickbreaking_module(
    attn: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    output_attentions: bool = False,
    use_cache: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None, None]:
    """Replace `StickBreakingAttention.forward`, which refuses a CPU and 32-bit or wider dtypes."""
    from fla.layers import stickbreaking_attn as layer

    if use_cache or past_key_values is not None:
        raise NotImplementedError(
            "Stick-breaking attention does not support KV-cache decoding. Use use_cache=False."
        )
    batch_size, length, _ = hidden_states.shape
    hidden_states, indices, cu_seqlens = layer.unpad_hidden_states(
        hidden_states=hidden_states,
        cu_seqlens=kwargs.get("cu_seqlens"),
        attention_mask=attention_mask,
        q_len=length,
    )
    q, k, v = (
        proj(hidden_states).unflatten(-1, (-1, attn.head_dim))
        for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    if attn.qk_norm:
        q, k = attn.q_norm(q), attn.k_norm(k)
    o, _ = layer.parallel_stickbreaking_attn(
        q=q, k=k, v=v, attend_current=attn.attend_current, cu_seqlens=cu_seqlens
    )
    o = attn.o_proj(o.flatten(-2))
    return layer.repad_hidden_states(o, indices, batch_size, length), None, None
