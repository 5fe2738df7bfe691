"""Parameters and floating-point operations of a training step, counted on the model without running it.

An estimate by formula, in the convention of published MFU figures: what activation checkpointing
recomputes, elementwise operators and the saving by causality do not count.
"""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from titanplans.split.decoder import Decoder, within

_logger = logging.getLogger(__name__)

_GLA_CHUNK = 64
"""Tokens that FLA's chunked kernels multiply with each other directly; chunks are joined by a state."""

_RECURRENT = ("KimiDeltaAttention", "CyclicFlowAttention", "MomAttention", "RWKV7Attention")
"""Of FLA, with heads of a dimension as attention has, but their work does not grow with the sequence."""


def count_flops(model: PreTrainedModel, seq_len: int) -> tuple[int, int]:
    """Parameters, and FLOPs per token of one forward and backward, at sequences of `seq_len` tokens.

    Count on the model as `titanplans.modeling.build` returns it, before it is split. Tied parameters count once.

    A multiply-add is 2 FLOPs, the backward costs twice the forward, so all count sixfold (frozen parameters fourfold):
    the parameters a token is multiplied with, which are all but embeddings that are only looked up and
    experts (and memories) that the token is not routed to, and in each token mixer, with H heads of dimension D,

    - softmax attention: H * (D_qk + D_v) * T, T the smaller of `seq_len` and the window (for equal
      dimensions the 12 * H * D * T of PaLM, arXiv:2204.02311, appendix B);
    - gated linear attention: H * (2 * D_k * D_v + C * (D_k + D_v)), the update and the reading of the
      state, and attention inside chunks of C = 64 tokens (arXiv:2312.06635, section 4);
    - any other mixer: nothing beyond its parameters, so that the result is a lower bound.

    Where the config does not say how many of its experts a token passes, all count, which the log says. A model of any class
    is counted: what its modules do not say is not there.

    Of a model with a vision tower the tower and the projector count as parameters but do no FLOPs: they run once
    an image, not once a token, and on text alone not at all.
    """
    tied = model.all_tied_weights_keys
    total = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in tied)
    return total, round(sum(flops for _, flops in _work(model, seq_len)))


class BlockFlops(NamedTuple):
    """FLOPs per token of the parts of a model that a pipeline's stages divide."""

    blocks: tuple[int, ...]
    first: int
    """Of the modules in front of the blocks, which are in the first stage."""
    last: int
    """Of those behind the blocks, and of the head, which are in the last stage."""


def flops_of_blocks(model: PreTrainedModel, decoder: Decoder, seq_len: int) -> BlockFlops:
    """Return the FLOPs of each block and of both ends of `model`, counted as `count_flops` does.

    A tower of another modality costs nothing here, since text alone passes none of it.
    """
    names = decoder.names
    costs, first, last = dict.fromkeys(names, 0.0), 0.0, 0.0
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
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
    of_text = _text_modules(model)
    routed = _share_of_experts(config)
    if routed is None and any(".experts." in name for name, _ in model.named_parameters()):
        _logger.info(
            f"the config of {type(model).__name__} does not say how many of its experts a token passes (num_experts and "
            "num_experts_per_tok): FLOPs and MFU count all of them"
        )
    for name, parameter in model.named_parameters():
        if name in tied or name in looked_up:
            continue
        if model.get_submodule(name.rpartition(".")[0]) in of_text:
            share = (routed or 1.0) if ".experts." in name else _passes(model, name)
            # A frozen one gets no gradient of its own, which is a third of its work.
            flops = parameter.numel() * share * (6 if parameter.requires_grad else 4)
            yield heads.get(name, name).rpartition(".")[0], flops  # a tied embedding multiplies as the head
    for name, module in model.named_modules():
        if module in of_text:
            yield name, 6 * _mixer_products(module, seq_len)


def _text_modules(model: PreTrainedModel) -> set[nn.Module]:
    """The modules that every token passes: all but those of the towers of other modalities."""
    if model.config.get_text_config() is model.config:
        return set(model.modules())
    head = model.get_output_embeddings()
    return {*model.get_decoder().modules(), *(head.modules() if head is not None else ())}


def _share_of_experts(config: PretrainedConfig) -> float | None:
    """The part of a layer's routed experts that one token passes through; None if the config does not say."""
    experts = _number(config, "num_experts", "num_local_experts", "n_routed_experts")
    passed = _number(config, "num_experts_per_tok")
    return passed / experts if passed and experts else None


def _number(owner: Any, *names: str) -> int | None:
    """Return the first of these attributes that is a positive integer."""
    values = (getattr(owner, name, None) for name in names)
    return next((x for x in values if isinstance(x, int) and not isinstance(x, bool) and x > 0), None)


def _is_flas(module: nn.Module, *names: str) -> bool:
    """Whether FLA's class of one of these names made `module`: one's own may be called so."""
    return type(module).__name__ in names and type(module).__module__.startswith("fla.")


def _passes(model: PreTrainedModel, name: str) -> float:
    """How often a token passes a parameter: in a mixture of memories, once for each that it is routed to."""
    path, _, own = name.partition(".attn.")
    mixer: Any = model.get_submodule(f"{path}.attn") if own else None
    if mixer is None or not _is_flas(mixer, "MomAttention"):
        return 1.0
    part, shared = own.partition(".")[0], int(mixer.shared_mem)
    if part == "q_proj":
        return mixer.topk + shared
    if part.startswith("shared_"):
        return shared + mixer.topk * mixer.single_kv_proj
    return mixer.topk / mixer.num_memories if part in ("k_proj", "v_proj", "a_proj", "b_proj") else 1.0


def _mixer_products(module: Any, seq_len: int) -> int:
    """Multiply-adds per token of a token mixer beyond its projections; 0 for any other module."""
    if _is_flas(module, "GatedLinearAttention"):
        d_k, d_v = module.head_k_dim, module.head_v_dim
        return module.num_heads * (2 * d_k * d_v + min(_GLA_CHUNK, seq_len) * (d_k + d_v))
    config = getattr(module, "config", None)
    heads = _number(module, "num_heads") or _number(config, "num_attention_heads")
    size = _number(module, "head_dim")
    if (
        not type(module).__name__.endswith("Attention")
        or _is_flas(module, *_RECURRENT)
        or heads is None
        or size is None
    ):
        return 0
    # FLA's name; then transformers', on the module where layers differ in it (None: full) and else on the config.
    owner = module if hasattr(module, "sliding_window") else config
    window = _number(module, "window_size") or _number(owner, "sliding_window")
    d_qk = _number(module, "qk_head_dim") or size
    d_v = _number(module, "v_head_dim") or size
    return heads * (d_qk + d_v) * min(seq_len, window or seq_len)
