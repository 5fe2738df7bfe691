"""The model of a proof, its dtype and its inputs; and whether the proof fits into memory."""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from titanplans import modeling
from titanplans.apply.prepare import Preparation
from titanplans.apply.prepare import prepare as prepare_modules
from titanplans.cli.verify.smaller_config import cut
from titanplans.cli.verify.subject import Subject
from titanplans.errors import VerifyError
from titanplans.parallel.memory import memory
from titanplans.proof.batches.conditions import MicroBatch
from titanplans.proof.batches.sample import Sampler
from titanplans.split.decoder import find_decoder
from titanplans.user_code import as_user_error

_TOKENS = 16
"""Tokens in a sequence, unless an image needs more: two for each rank at degree 8."""

_COPIES = 12
"""Copies of the weights that the whole model's training holds at once: values before and after it, gradients of three
steps, AdamW's moments; and values, gradients and moments of the run that measures units."""


_KEPT = 6
"""Copies that a proof keeps while ranks begin with one each: the model, its weights and gradients of three steps after the
training, and the ranks' shards."""


@dataclass(frozen=True)
class Prepared:
    """The model and the inputs of a proof."""

    model: nn.Module
    """On meta, unless `make` is None."""
    make: Callable[[], nn.Module] | None
    """Builds it with weights; None: it has them."""
    config: PretrainedConfig | None
    dtype: torch.dtype
    batch_size: int
    seq_len: int
    notes: tuple[str, ...]
    """Choices, and limits of the proof, in words."""

    def inputs(self, batch_size: int, seq_len: int, seed: int) -> dict[str, Any]:
        """Return keyword arguments of the forward: tokens, and images if the model takes them and they fit."""
        if _has_images(self.config) and seq_len >= _image_tokens(self.config) + 2:
            assert self.config is not None
            return modeling.sample_inputs(self.config, batch_size=batch_size, seq_len=seq_len, seed=seed)
        return Sampler(self.model, None, 1, seed).tokens(MicroBatch(batch_size, seq_len), 0)


def prepare(
    subject: Subject, request: Namespace, device: torch.device, dtype: torch.dtype | None = None
) -> Prepared:
    """Choose model, dtype and sizes before anything large is built; a UserError if it can't be built as asked.

    `dtype` None: float64, or float32 if the model's kernels compute no other.
    """
    notes, make = [], None
    if subject.config is None:
        model, config = _made(subject, request, device), None
        if isinstance(model, PreTrainedModel):
            config = model.config
    else:
        config, model, notes = cut(subject, request.layers, request.vocab_size)
    dtype = dtype or _dtype(model, device, notes)
    if config is not None and subject.config is not None:
        make = partial(_build, config, dtype, device, subject)
    notes += _words(_changed(model, subject, device), subject)
    seq_len = request.seq_len or _sequence(config)
    return Prepared(model, make, config, dtype, request.batch_size, seq_len, tuple(notes))


def _build(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, subject: Subject) -> nn.Module:
    # Without noise: the proof draws new parameters.
    model: nn.Module = modeling.build_real(config, dtype=dtype, noise=0.0)
    model.to(device)
    _changed(model, subject, device)
    return model


def _changed(model: nn.Module, subject: Subject, device: torch.device) -> Preparation:
    """Give `model` the float8 modules, the adapters and the frozen parameters of `subject`."""
    return prepare_modules(
        model, float8=subject.float8, lora=subject.lora, freezes=subject.freeze, device_type=device.type
    )


def _words(done: Preparation, subject: Subject) -> Iterator[str]:
    """Yield the changes of a model in words."""
    if (float8 := done.float8) is not None:
        left = f", {len(float8.filtered)} are not" if float8.filtered else ""
        yield f"{len(float8.converted)} Linear modules are float8 ({float8.recipe}), whole and split{left}"
    if done.adapters is not None:
        rank, dropout = subject.lora.rank, subject.lora.dropout
        drawn = f", with the same draws of lora.dropout = {dropout}" if dropout else ""
        yield f"{len(done.adapters.modules)} Linear modules have adapters of rank {rank}, whole and split{drawn}"
    if done.frozen is not None:
        yield f"{done.frozen:,} parameters are frozen"


def _made(subject: Subject, request: Namespace, device: torch.device) -> nn.Module:
    """Return the model of a function of the user's own."""
    for option, value in (("layers", request.layers), ("vocab-size", request.vocab_size)):
        if value is not None:
            raise VerifyError(
                f"--{option} {value}: {subject.words} makes a model of a fixed size; let it make a smaller one"
            )
    if not callable(subject.make):
        raise VerifyError(
            f"{subject.words} is of type {type(subject.make).__name__}, not a function that returns an nn.Module"
        )
    with as_user_error(subject.words, VerifyError):
        model = subject.make()
    if not isinstance(model, nn.Module):
        raise VerifyError(
            f"{subject.words} returned something of type {type(model).__name__}, not an nn.Module"
        )
    on_meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if on_meta is not None:
        raise VerifyError(
            f"{subject.words} returned a model without weights ({on_meta} is on meta); give it some"
        )
    return model.to(device)


def _dtype(model: nn.Module, device: torch.device, notes: list[str]) -> torch.dtype:
    triton = any(type(module).__module__.partition(".")[0] == "fla" for module in model.modules())
    if device.type != "cpu" and triton:
        notes.append("float32, since Triton kernels of flash-linear-attention compute no float64 (--dtype)")
        return torch.float32
    return torch.float64


def _has_images(config: PretrainedConfig | None) -> bool:
    return config is not None and config.get_text_config() is not config


def _image_tokens(config: PretrainedConfig | None) -> int:
    return getattr(config, "mm_tokens_per_image", 0) if _has_images(config) else 0


def _sequence(config: PretrainedConfig | None) -> int:
    """Tokens in a sequence: an image with text on both sides has to fit."""
    return max(_TOKENS, -(-(_image_tokens(config) + 2) // _TOKENS) * _TOKENS)


def check_memory(
    model: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device, copies: int = 0
) -> None:
    """Refuse a model if its logits, or the copies of its weights that a proof holds, don't fit into memory.

    An accepted model may still not fit: activations and replicas need memory too. `tokens` are those of a batch, `copies` of
    the whole model, one for each rank that is a thread. The model may lie on meta.
    """
    parameters = sum(p.numel() for p in model.parameters())
    needed = max(_COPIES, _KEPT + copies) * parameters * dtype.itemsize
    if device.type == "cpu" and dist.is_initialized():
        needed *= int(os.environ["LOCAL_WORLD_SIZE"])
    there, named = memory(device), dict(model.named_parameters(remove_duplicate=False))
    decoder = find_decoder(model, required=False)
    head = named.get(f"{decoder.head or decoder.embedding}.weight")
    logits = tokens * (1 if head is None else head.shape[0]) * dtype.itemsize
    if logits > there:
        raise VerifyError(
            f"the logits of {tokens:,} tokens take {logits / 1e9:,.1f} GB, and there are {there / 1e9:,.1f} GB: a smaller "
            "--seq-len or --batch-size"
        )
    if needed > there:
        raise VerifyError(
            f"a proof of {parameters:,} parameters in {str(dtype).removeprefix('torch.')}"
            f"{f', one copy for each of {copies} threads,' if copies else ''} needs more than "
            f"{needed / 1e9:,.1f} GB, and there are {there / 1e9:,.1f} GB: fewer --layers, a smaller --vocab-size, --tp or "
            "flavor"
        )
