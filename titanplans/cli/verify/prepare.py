"""Choose the model, dtype and inputs of a proof (`prepare`), and check that the proof fits into memory (`check_memory`)."""

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
from titanplans.cli.verify.smaller_config import reduce_config
from titanplans.cli.verify.subject import Subject
from titanplans.errors import VerifyError
from titanplans.parallel.memory import memory
from titanplans.proof.batches.conditions import MicroBatch
from titanplans.proof.batches.sample import Sampler
from titanplans.split.decoder import find_decoder
from titanplans.user_code import as_user_error

_TOKENS = 16
"""Tokens per sequence, unless an image needs more. At degree 8 these are two per rank."""

_COPIES = 12
"""Peak memory of training the unsplit model, as a number of copies of its weights: the weights before and after training,
gradients of three steps, AdamW's moments, and the weights, gradients and moments of the run that measures rounding
units."""


_KEPT = 6
"""Copies that a proof holds besides one copy per rank: the model, its weights after training, gradients of three steps, and
the ranks' shards."""


@dataclass(frozen=True)
class Prepared:
    """The model and the inputs of a proof."""

    model: nn.Module
    """The model; on meta, unless `make` is None."""
    make: Callable[[], nn.Module] | None
    """Builds the model with weights. None: `model` has weights."""
    config: PretrainedConfig | None
    dtype: torch.dtype
    batch_size: int
    seq_len: int
    notes: tuple[str, ...]
    """Printed lines about choices and limits of the proof."""

    def inputs(self, batch_size: int, seq_len: int, seed: int) -> dict[str, Any]:
        """Return keyword arguments of the forward: token ids, and images if the model takes them and they fit."""
        if _has_images(self.config) and seq_len >= _image_tokens(self.config) + 2:
            assert self.config is not None
            return modeling.sample_inputs(self.config, batch_size=batch_size, seq_len=seq_len, seed=seed)
        return Sampler(self.model, None, 1, seed).tokens(MicroBatch(batch_size, seq_len), 0)


def prepare(
    subject: Subject, request: Namespace, device: torch.device, dtype: torch.dtype | None = None
) -> Prepared:
    """Choose the model, its dtype and its sizes before anything large is built.

    Args:
        subject: the model and its modules.
        request: the options of the command line, which may set sizes.
        device: the device of the proof.
        dtype: the dtype of the weights; None: float64, or float32 for Triton kernels.

    Raises:
        UserError: the model can't be built as requested.
    """
    notes, make = [], None
    if subject.config is None:
        model, config = _build_user_model(subject, request, device), None
        if isinstance(model, PreTrainedModel):
            config = model.config
    else:
        config, model, notes = reduce_config(subject, request.layers, request.vocab_size)
    dtype = dtype or _dtype(model, device, notes)
    if config is not None and subject.config is not None:
        make = partial(_build, config, dtype, device, subject)
    notes += _describe(_prepare_modules(model, subject, device), subject)
    seq_len = request.seq_len or _seq_len(config)
    return Prepared(model, make, config, dtype, request.batch_size, seq_len, tuple(notes))


def _build(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, subject: Subject) -> nn.Module:
    # No noise is added, since the proof sets random parameters.
    model: nn.Module = modeling.build_real(config, dtype=dtype, noise=0.0)
    model.to(device)
    _prepare_modules(model, subject, device)
    return model


def _prepare_modules(model: nn.Module, subject: Subject, device: torch.device) -> Preparation:
    return prepare_modules(
        model, float8=subject.float8, lora=subject.lora, freezes=subject.freeze, device_type=device.type
    )


def _describe(preparation: Preparation, subject: Subject) -> Iterator[str]:
    in_both = "in the unsplit and the split model"
    if (float8 := preparation.float8) is not None:
        filtered = f", {len(float8.filtered)} are not" if float8.filtered else ""
        yield f"{len(float8.converted)} Linear modules are float8 ({float8.recipe}) {in_both}{filtered}"
    if preparation.adapters is not None:
        rank, dropout = subject.lora.rank, subject.lora.dropout
        masks = f", with the same masks of lora.dropout = {dropout}" if dropout else ""
        yield f"{len(preparation.adapters.modules)} Linear modules have adapters of rank {rank} {in_both}{masks}"
    if preparation.frozen is not None:
        yield f"{preparation.frozen:,} parameters are frozen"


def _build_user_model(subject: Subject, request: Namespace, device: torch.device) -> nn.Module:
    for option, value in (("layers", request.layers), ("vocab-size", request.vocab_size)):
        if value is not None:
            raise VerifyError(
                f"--{option} {value}: {subject.words} returns a model of a fixed size: change its size there"
            )
    return call_user_function(subject).to(device)


def call_user_function(subject: Subject) -> nn.Module:
    """Return the model of a user's function.

    Raises:
        VerifyError: the function is not callable, raises an error, or returns something other than a model with weights.
    """
    if not callable(subject.make):
        raise VerifyError(
            f"{subject.words} is of type {type(subject.make).__name__}, not a function that returns an nn.Module"
        )
    with as_user_error(subject.words, VerifyError):
        model = subject.make()
    if not isinstance(model, nn.Module):
        raise VerifyError(
            f"{subject.words} returned an object of type {type(model).__name__}, not an nn.Module"
        )
    on_meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if on_meta is not None:
        raise VerifyError(
            f"{subject.words} returned a model without weights ({on_meta} is on meta): initialize it on the CPU"
        )
    return model


def _dtype(model: nn.Module, device: torch.device, notes: list[str]) -> torch.dtype:
    has_fla_modules = any(type(module).__module__.partition(".")[0] == "fla" for module in model.modules())
    if device.type != "cpu" and has_fla_modules:
        notes.append(
            "float32, since Triton kernels of flash-linear-attention do not support float64 (--dtype)"
        )
        return torch.float32
    return torch.float64


def _has_images(config: PretrainedConfig | None) -> bool:
    return config is not None and config.get_text_config() is not config


def _image_tokens(config: PretrainedConfig | None) -> int:
    return getattr(config, "mm_tokens_per_image", 0) if _has_images(config) else 0


def _seq_len(config: PretrainedConfig | None) -> int:
    """Return the number of tokens per sequence. An image must fit into it, with text before and after it."""
    return max(_TOKENS, -(-(_image_tokens(config) + 2) // _TOKENS) * _TOKENS)


def check_memory(
    model: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device, copies: int = 0
) -> None:
    """Check that the logits, and the copies of the weights that a proof holds, fit into memory.

    An accepted model may still not fit, because activations and replicas need memory, too.

    Args:
        model: the unsplit model; may be on meta.
        tokens: tokens per batch.
        dtype: the dtype of the weights.
        device: the device of the proof.
        copies: copies of the unsplit model, one per rank that is a thread.

    Raises:
        VerifyError: logits or copies do not fit.
    """
    parameters = sum(p.numel() for p in model.parameters())
    needed = max(_COPIES, _KEPT + copies) * parameters * dtype.itemsize
    if device.type == "cpu" and dist.is_initialized():
        needed *= int(os.environ["LOCAL_WORLD_SIZE"])
    available, parameters_by_name = memory(device), dict(model.named_parameters(remove_duplicate=False))
    decoder = find_decoder(model, required=False)
    head = parameters_by_name.get(f"{decoder.head or decoder.embedding}.weight")
    logits = tokens * (1 if head is None else head.shape[0]) * dtype.itemsize
    if logits > available:
        raise VerifyError(
            f"the logits of {tokens:,} tokens take {logits / 1e9:,.1f} GB, and {available / 1e9:,.1f} GB are available: use "
            "a smaller --seq-len or --batch-size"
        )
    if needed > available:
        raise VerifyError(
            f"a proof of {parameters:,} parameters in {str(dtype).removeprefix('torch.')}"
            f"{f', one copy for each of {copies} threads,' if copies else ''} needs more than "
            f"{needed / 1e9:,.1f} GB, and {available / 1e9:,.1f} GB are available: use fewer --layers, or a smaller "
            "--vocab-size, --tp or flavor"
        )
