"""What a proof runs on: weights far from their initial values, tokens and labels that reach every shard."""

import inspect
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.tensor_parallel.decoder import find_decoder


def randomise(model: nn.Module, seed: int) -> None:
    """Give every parameter of `model` new values, in place, the same for the same seed and name.

    An initial model hides mistakes: a bias or a projection of zeros lets nothing through, a norm of
    ones multiplies nothing, equal heads may be exchanged. So matrices become normal with standard
    deviation fan_in^-1/2, which keeps activations near 1, and vectors and scalars, whose scale has
    often a meaning (a norm's 1, a decay's logarithm), are moved by 0.3 randn. Drawn on the CPU, in
    float64, so that every rank and every device has the same.
    """
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param)
        with torch.no_grad():
            if param.ndim > 1:
                param.copy_(noise * (param.numel() / max(len(param), 1)) ** -0.5)
            else:
                param.add_(0.3 * noise)


def token_ids(
    model: nn.Module, batch_size: int, seq_len: int, sequence_dim: int, seed: int
) -> dict[str, Any]:
    """Return token ids [batch, sequence], or [sequence, batch] if `sequence_dim` is 0, as the model's keyword."""
    shape = (seq_len, batch_size) if sequence_dim == 0 else (batch_size, seq_len)
    parameters = inspect.signature(model.forward).parameters
    name = "input_ids" if "input_ids" in parameters else next(iter(parameters))
    ids = _spread(shape, vocabulary_size(model), seed)
    if (padding := _padding(model)) is not None and ids.numel() > 2 and not (ids == padding).any():
        # Its row of the embedding gets no gradient, which shows only where it is read; the ends stay.
        inner = ((ids != ids.min()) & (ids != ids.max())).flatten().nonzero()
        ids.view(-1)[inner[0]] = padding
    return {name: ids}


def _padding(model: nn.Module) -> int | None:
    """Return the token whose row of the embedding gets no gradient; None for no such token."""
    size = vocabulary_size(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == size:
            return module.padding_idx
    return None


def labels_for(logits: torch.Tensor, seed: int) -> torch.Tensor:
    """Return labels for `logits` [..., vocabulary], of shape [...]."""
    return _spread(tuple(logits.shape[:-1]), logits.shape[-1], seed + 1).to(logits.device)


def _spread(shape: tuple[int, ...], size: int, seed: int) -> torch.Tensor:
    """Return numbers below `size`: one at random out of each of equal strata, shuffled, the ends included.

    Plain random ones could miss a rank's share of the vocabulary, and its last rows.
    """
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    strata = (torch.arange(count) + torch.rand(count, generator=generator, dtype=torch.float64)) / count
    ids = (strata * size).long().clamp_max(size - 1)
    ids[0], ids[-1] = 0, size - 1
    return ids[torch.randperm(count, generator=generator)].view(shape)


def vocabulary_size(model: nn.Module) -> int:
    """Return the size of the vocabulary by the model's config, or else by its embedding.

    Raises:
        PlanError: neither says.
    """
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if isinstance(size := getattr(config, "vocab_size", None), int):
        return size
    embedding = find_decoder(model).embedding
    if embedding is None:
        raise PlanError(
            f"{type(model).__name__} has neither config.vocab_size nor an embedding beside its blocks: "
            "pass verify(inputs=...)"
        )
    return model.get_submodule(embedding).num_embeddings  # type: ignore[return-value]


def moved(inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return `inputs` on `device`, tensors of floating point in `dtype`."""
    return {
        name: value.to(device, dtype if value.is_floating_point() else None)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in inputs.items()
    }
