"""Estimate the FLOPs of a training step with formulas, from the modules of a model.

As is usual for MFU, recomputation and elementwise operators are not counted, and causal attention counts like full
attention.
"""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from titanplans.split.decoder import Decoder, within

_logger = logging.getLogger(__name__)

_GLA_CHUNK = 64
"""The chunk size of FLA's kernels: tokens attend to each other inside a chunk, and a state connects the chunks."""

_RECURRENT = ("KimiDeltaAttention", "CyclicFlowAttention", "MomAttention", "RWKV7Attention")
"""Classes of FLA that have the attributes of softmax attention, but whose FLOPs per token do not grow with the sequence."""


def count_flops(model: PreTrainedModel, seq_len: int) -> tuple[int, int]:
    """Return the number of parameters, and the FLOPs per token of forward and backward for sequences of `seq_len` tokens.

    `model` is the unsplit model that `titanplans.modeling.build` returns. Tied parameters count once.

    A multiply-add is 2 FLOPs, and the backward costs twice the forward. So each multiply-add of the forward counts as 6
    FLOPs, or as 4 with a frozen parameter. A token has one multiply-add with each parameter. Exceptions are embeddings,
    which are only looked up, and experts (and memories) to which the token is not routed. To this, each token mixer with H
    heads adds multiply-adds per token:

    - softmax attention: H * (D_qk + D_v) * T, where T is the smaller of `seq_len` and the window (for equal
      dimensions D these are the 12 * H * D * T FLOPs of PaLM, arXiv:2204.02311, appendix B);
    - gated linear attention: H * (2 * D_k * D_v + C * (D_k + D_v)), for the update of the state and its product with the
      query, and for attention inside chunks of C = 64 tokens (arXiv:2312.06635, section 4);
    - any other mixer: none, so that the result is a lower bound.

    If the config does not have the number of experts per token, all experts count, and this is logged. A vision tower and
    its projector count as parameters but not as FLOPs: they run once per image, not per token.
    """
    tied = model.all_tied_weights_keys
    total = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in tied)
    return total, round(sum(flops for _, flops in _work(model, seq_len)))


class BlockFlops(NamedTuple):
    """FLOPs per token of the modules that are distributed over pipeline stages."""

    blocks: tuple[int, ...]
    first: int
    """FLOPs of the modules before the blocks, which are in the first stage."""
    last: int
    """FLOPs of the head and the other modules after the blocks, which are in the last stage."""


def flops_of_blocks(model: PreTrainedModel, decoder: Decoder, seq_len: int) -> BlockFlops:
    """Return the FLOPs of each block and of the modules before and after the blocks, counted as in `count_flops`.

    Towers of other modalities count as 0.
    """
    names = decoder.names
    costs, first, last = dict.fromkeys(names, 0.0), 0.0, 0.0
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    for name, flops in _work(model, seq_len):
        block = next((block for block in names if name == block or within(name, block)), None)
        if block is not None:
            costs[block] += flops
        elif name == decoder.head or order[name] > order[names[-1]]:
            last += flops
        else:
            first += flops
    return BlockFlops(tuple(map(round, costs.values())), round(first), round(last))


def _work(model: PreTrainedModel, seq_len: int) -> Iterator[tuple[str, float]]:
    """Yield the FLOPs per token of each parameter and of each token mixer, with the name of its module."""
    tied = model.all_tied_weights_keys
    embeddings = {
        f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Embedding)
    }
    looked_up = embeddings - set(tied.values())
    heads = {source: head for head, source in tied.items() if source in embeddings}
    config = model.config.get_text_config()
    text_modules = _text_modules(model)
    routed_fraction = _routed_fraction(config)
    if routed_fraction is None and any(".experts." in name for name, _ in model.named_parameters()):
        _logger.info(
            f"the config of {type(model).__name__} does not say how many experts a token is sent to (num_experts and "
            "num_experts_per_tok): FLOPs and MFU count all experts"
        )
    for name, parameter in model.named_parameters():
        if name in tied or name in looked_up:
            continue
        if model.get_submodule(name.rpartition(".")[0]) in text_modules:
            uses = (routed_fraction or 1.0) if ".experts." in name else _uses_per_token(model, name)
            # A third of the FLOPs are for the gradient of the parameter, which a frozen parameter does not have.
            flops = parameter.numel() * uses * (6 if parameter.requires_grad else 4)
            yield heads.get(name, name).rpartition(".")[0], flops  # a tied embedding multiplies in the head
    for name, module in model.named_modules():
        if module in text_modules:
            yield name, 6 * _mixer_products(module, seq_len)


def _text_modules(model: PreTrainedModel) -> set[nn.Module]:
    """Return all modules except those of towers of other modalities."""
    if model.config.get_text_config() is model.config:
        return set(model.modules())
    head = model.get_output_embeddings()
    return {*model.get_decoder().modules(), *(head.modules() if head is not None else ())}


def _routed_fraction(config: PretrainedConfig) -> float | None:
    """Return the fraction of a layer's routed experts to which a token is sent; None if the config does not have it."""
    experts = _positive_int(config, "num_experts", "num_local_experts", "n_routed_experts")
    per_token = _positive_int(config, "num_experts_per_tok")
    return per_token / experts if per_token and experts else None


def _positive_int(owner: Any, *names: str) -> int | None:
    """Return the first of these attributes that is a positive integer."""
    values = (getattr(owner, name, None) for name in names)
    return next((x for x in values if isinstance(x, int) and not isinstance(x, bool) and x > 0), None)


def _is_flas(module: nn.Module, *names: str) -> bool:
    """Whether the class of `module` has one of these names and is FLA's; a user's class with the same name does not
    count."""
    return type(module).__name__ in names and type(module).__module__.startswith("fla.")


def _uses_per_token(model: PreTrainedModel, name: str) -> float:
    """Return how often a token is multiplied with a parameter; 1 except in FLA's mixture of memories (MomAttention)."""
    path, _, local_name = name.partition(".attn.")
    mixer: Any = model.get_submodule(f"{path}.attn") if local_name else None
    if mixer is None or not _is_flas(mixer, "MomAttention"):
        return 1.0
    child, shared = local_name.partition(".")[0], int(mixer.shared_mem)
    if child == "q_proj":
        return mixer.topk + shared
    if child.startswith("shared_"):
        return shared + mixer.topk * mixer.single_kv_proj
    return mixer.topk / mixer.num_memories if child in ("k_proj", "v_proj", "a_proj", "b_proj") else 1.0


def _mixer_products(module: Any, seq_len: int) -> int:
    """Return the multiply-adds per token of a token mixer, not counting its projections; 0 for any other module."""
    if _is_flas(module, "GatedLinearAttention"):
        d_k, d_v = module.head_k_dim, module.head_v_dim
        return module.num_heads * (2 * d_k * d_v + min(_GLA_CHUNK, seq_len) * (d_k + d_v))
    config = getattr(module, "config", None)
    heads = _positive_int(module, "num_heads") or _positive_int(config, "num_attention_heads")
    size = _positive_int(module, "head_dim")
    if (
        not type(module).__name__.endswith("Attention")
        or _is_flas(module, *_RECURRENT)
        or heads is None
        or size is None
    ):
        return 0
    # FLA has window_size. transformers has sliding_window on the module if layers differ (None: full), else on the config.
    owner = module if hasattr(module, "sliding_window") else config
    window = _positive_int(module, "window_size") or _positive_int(owner, "sliding_window")
    d_qk = _positive_int(module, "qk_head_dim") or size
    d_v = _positive_int(module, "v_head_dim") or size
    return heads * (d_qk + d_v) * min(seq_len, window or seq_len)
