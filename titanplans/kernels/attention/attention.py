"""`flash_attn_func` and `flash_attn_varlen_func` on a CPU, with torch's scaled dot product attention.

FLA's softmax layers call flash-attn, which has no CPU build, and refuse to be constructed without it. Signatures and
semantics are the same as in flash-attn 2: inputs [B, L, H, D], grouped key heads, masks and windows aligned to the last key.
"""

from typing import Any

import torch
import torch.nn.functional as F

from titanplans.errors import KernelError


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """Return softmax attention [B, Lq, H, D] of q [B, Lq, H, D] over k, v [B, Lk, H_kv, D]; H is a multiple of H_kv.

    Query i is at key position p = i + Lk - Lq. With `causal` it attends to keys up to p, with `window_size = (left, right)`
    to keys p - left .. p + right, where -1 means no limit. The output of a query without keys is zero. `deterministic` has
    no effect, since the CPU kernels are always deterministic.

    Raises:
        KernelError: softcap, alibi_slopes or return_attn_probs is set, which torch's operator does not support.
    """
    unsupported = {
        "softcap": bool(softcap),
        "alibi_slopes": alibi_slopes is not None,
        "return_attn_probs": return_attn_probs,
    }
    if any(unsupported.values()):
        names = ", ".join(name for name, is_set in unsupported.items() if is_set)
        raise KernelError(f"flash_attn_func: {names} is not computed on a CPU: remove it or run on a GPU")
    if q.shape[2] % k.shape[2]:
        raise KernelError(
            f"flash_attn_func: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads"
        )

    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    left, right = window_size
    right = 0 if causal else right
    # For a plain causal mask the operator needs no mask tensor, and skips masked keys.
    is_causal, mask = False, None
    if right == 0 and left < 0 and q.shape[1] == k.shape[1]:  # a branch, since lengths may be symbolic
        is_causal = True
    elif left >= 0 or right >= 0:
        mask = _band(q.shape[1], k.shape[1], left, right, q.device)
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=softmax_scale,
    )
    return o.transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    block_table: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return `flash_attn_func` of packed sequences: q [tokens, H, D], k and v [key tokens, H_kv, D].

    Sequence n has the tokens cu_seqlens[n] .. cu_seqlens[n + 1]. The bounds are copied to the host. `max_seqlen_*`, which
    determine a kernel's launch grid, have no effect. `options` are passed to `flash_attn_func`.

    Raises:
        KernelError: as `flash_attn_func`, or `block_table` (paged keys) is set.
    """
    if block_table is not None:
        raise KernelError("flash_attn_varlen_func: block_table (paged keys) is not computed on a CPU")
    lengths_q, lengths_k = (bounds.diff().tolist() for bounds in (cu_seqlens_q, cu_seqlens_k))
    outputs = [
        flash_attn_func(
            q_n[None], k_n[None], v_n[None], dropout_p, softmax_scale, causal, window_size, **options
        )
        for q_n, k_n, v_n in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    ]
    return torch.cat(outputs, 1).squeeze(0)


def _band(num_queries: int, num_keys: int, left: int, right: int, device: torch.device) -> torch.Tensor:
    """Return a mask [Lq, Lk], True where a query attends to a key.

    >>> _band(2, 3, left=1, right=0, device=torch.device("cpu")).int()
    tensor([[1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    keys = torch.arange(num_keys, device=device)
    positions = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    band = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    if left >= 0:
        band &= keys >= positions - left
    if right >= 0:
        band &= keys <= positions + right
    return band
