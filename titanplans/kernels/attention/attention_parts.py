"""For a CPU, the parts of FLA's softmax mixers other than softmax attention, where its `naive.py` has it in another form.

Mixture of block attention, for which FLA has no reference; the values of DeltaFormer, whose own reference knows no padding;
pooled keys; FlexAttention, whose backward needs a GPU; and stick-breaking attention, whose module refuses a CPU and float32.
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
    """Return attention of each query to its own block and the `topk` - 1 earlier ones whose mean key it likes best.

    Args:
        q: [1, T, H, K].
        k: [1, T, H, K].
        v: [1, T, H, V].
        cu_seqlens: bounds of packed sequences; no block reaches over one.
        max_seqlen: how a kernel splits its work.
        chunk_size: tokens of a block.
        topk: blocks that a query attends to. Below 2, or where no sequence is longer than a block, it attends to all.

    Raises:
        KernelError: keys have fewer heads than queries, which FLA's code does not take apart.
    """
    if k.shape[2] != q.shape[2]:
        raise KernelError(
            f"parallel_moba: {k.shape[2]} heads of keys for {q.shape[2]} of queries, and flash-linear-attention's MoBA "
            "takes as many of each; leave num_kv_heads out"
        )
    # Over all packed sequences, as the kernel counts them: of each but the last.
    targets = sum((length - 1) // chunk_size for length in cu_seqlens.diff().tolist())
    chosen = min(topk - 1, targets)
    outputs = []
    for _, part in sequences({"q": q, "k": k, "v": v}, cu_seqlens):
        q_n, k_n, v_n = (x.transpose(1, 2) for x in part.values())  # [1, H, t, ...]
        time = torch.arange(q_n.shape[2], device=q.device)
        seen = time[:, None] >= time
        if chosen > 0:
            seen = seen & _blocks(q_n, k_n, chunk_size, chosen)
        outputs.append(F.scaled_dot_product_attention(q_n, k_n, v_n, attn_mask=seen).transpose(1, 2))
    return torch.cat(outputs, 1)


def _blocks(q: torch.Tensor, k: torch.Tensor, size: int, chosen: int) -> torch.Tensor:
    """True where the key [.., s] is in the query's own block or in one of its `chosen` [B, H, t, s]; never of later ones."""
    length = q.shape[2]
    block = torch.arange(length, device=q.device) // size
    same = block[:, None] == block
    whole = (length - 1) // size  # the last block is nobody's choice
    if whole == 0:
        return same
    means = k[:, :, : whole * size].unflatten(2, (whole, size)).mean(3)
    gate = torch.einsum("bhtk,bhnk->bhtn", q.to(accumulation_dtype(q)), means.to(accumulation_dtype(k)))
    past = block[:, None] > torch.arange(whole, device=q.device)
    best = gate.masked_fill(~past, -torch.inf).topk(min(chosen, whole), -1).indices
    taken = torch.zeros_like(gate).scatter(-1, best, 1.0) * past
    # Keys of the last block are in no choice.
    return same | (F.pad(taken.repeat_interleave(size, -1), (0, length - whole * size)) > 0)


def check_nsa(given: dict[str, Any]) -> None:
    """Refuse the arguments of `parallel_nsa` that its kernel refuses, or takes for others.

    Raises:
        KernelError: it would look at another number of blocks, or has no room for so many.
    """
    counts, size = given.get("block_counts", 16), given.get("block_size", 64)
    most = counts if isinstance(counts, int) else int(counts.max())
    if most & (most - 1):
        raise KernelError(
            f"block_counts = {most}: FLA's kernel looks at the next power of two; set {1 << most.bit_length()}, or "
            f"{1 << most.bit_length() - 1}"
        )
    if size < 2 * most:
        raise KernelError(
            f"block_size = {size}: FLA's kernel needs twice as many tokens in a block as block_counts = {most}; set "
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
    """As `naive_nsa_selection`, without its loop over queries: attention of each to its blocks of keys.

    Args:
        q: [B, T, H, K].
        k: [B, T, G, K], H a multiple of G.
        v: [B, T, G, V].
        block_indices: of the blocks that a query attends to, [B, T, G, S]; -1: none.
        block_size: tokens of a block.
        scale: of scores; None: K ** -0.5.
        cu_seqlens: bounds of packed sequences.
    """
    groups = q.shape[2] // k.shape[2]
    inputs = {"q": q, "block": block_indices} | {
        name: x.repeat_interleave(groups, 2) for name, x in (("k", k), ("v", v))
    }
    outputs = []
    for _, part in sequences(inputs, cu_seqlens):
        q_n, block, k_n, v_n = (x.transpose(1, 2) for x in part.values())
        time = torch.arange(q_n.shape[2], device=q.device)
        chosen = (block[..., None] == time // block_size).any(3).repeat_interleave(groups, 1)
        seen = chosen & (time[:, None] >= time)
        outputs.append(
            F.scaled_dot_product_attention(q_n, k_n, v_n, attn_mask=seen, scale=scale).transpose(1, 2)
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
    """Return u [B, T, H, D]: u_t = v_t - beta_t sum_{s<t} softmax_s(q_t k_s / sqrt(D)) u_s.

    Args:
        q: [B, T, H, D], as k and v.
        k: keys.
        v: values.
        beta: [B, T, H]; None: ones.
        C: how a kernel splits its work.
        cu_seqlens: bounds of packed sequences.
    """
    dtype = accumulation_dtype(q, k, v, beta)
    inputs = {"q": q, "k": k, "v": v, "beta": torch.ones_like(q[..., 0]) if beta is None else beta}
    outputs = []
    for _, part in sequences(inputs, cu_seqlens):
        q_n, k_n, v_n, beta_n = (x.to(dtype).transpose(1, 2) for x in part.values())
        scores = q_n @ k_n.transpose(-1, -2) * q.shape[-1] ** -0.5
        past = torch.ones_like(scores, dtype=torch.bool).tril(-1)
        weights = scores.masked_fill(~past, torch.finfo(dtype).min).softmax(-1) * past
        # (I + diag(beta) W) u = v
        u = torch.linalg.solve_triangular(beta_n[..., None] * weights, v_n, upper=False, unitriangular=True)
        outputs.append(u.transpose(1, 2))
    return torch.cat(outputs, 1).to(v.dtype)


def mean_pooling(x: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean of each `chunk_size` tokens of x [B, T, H, D]; the last of a sequence may be fewer."""
    parts = [part["x"].split(chunk_size, 1) for _, part in sequences({"x": x}, cu_seqlens)]
    means = [chunk.to(accumulation_dtype(x)).mean(1, keepdim=True) for part in parts for chunk in part]
    return torch.cat(means, 1).to(x.dtype)


def create_block_mask(
    mask_mod: Callable[..., torch.Tensor], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int
) -> torch.Tensor:
    """FlexAttention's, of a mask for all sequences and heads: True where a query may look, [Q_LEN, KV_LEN]."""
    assert (B, H) == (None, None)
    zero = torch.zeros((), dtype=torch.long)
    return mask_mod(zero, zero, torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN))


def flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """FlexAttention of q, k, v [B, H, T, D] where the mask of `create_block_mask` is True."""
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
    """`StickBreakingAttention.forward` without its refusals of a CPU and of other dtypes than 16 bits."""
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
