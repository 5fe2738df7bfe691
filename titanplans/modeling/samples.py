"""Initialised models and sample inputs for a proof."""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from titanplans.errors import ModelError
from titanplans.modeling.build import build
from titanplans.modeling.initialize import initialize


def build_real(
    config: PretrainedConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0, noise: float = 0.1
) -> PreTrainedModel:
    """Return the unsplit model of `config` on the CPU, initialised, in training mode.

    FLA's models need `kernels.install("cpu")` first.

    Normal noise is added to each parameter whose elements are all equal, since such values hide faults: if biases are 0, a
    bias that is added twice; if norm weights are 1, two norms that are swapped; with Gemma 3's projector of zeros, every
    gradient of its vision tower.

    Args:
        config: a config, e.g. from `load_config`; its attention implementation is used.
        dtype: the dtype of the parameters. Rotary frequencies of transformers stay float32.
        seed: the seed of the parameters; in another dtype they have the same values, rounded.
        noise: the standard deviation of the noise; 0: none.

    Raises:
        ModelError: `titanplans.modeling.build` or `titanplans.modeling.initialize` raises it.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = build(config)
    finally:
        torch.set_default_dtype(default)
    model.to_empty(device="cpu")
    initialize(model, seed=seed)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if noise and parameter.numel() and parameter.min() == parameter.max():
                values = torch.randn(parameter.shape, dtype=torch.float32)
                parameter.copy_(parameter.float() + noise * values)
    return model


def sample_inputs(
    config: PretrainedConfig, *, batch_size: int, seq_len: int, seed: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return random keyword arguments of a forward.

    For every model:
        input_ids [B, T], int64: tokens of the full vocabulary except padding and image tokens.

    For `gemma3` also one image per sequence:
        input_ids: each sequence has a run of `mm_tokens_per_image` image tokens, with text on both sides. A run of two or
            more tokens contains the middle of the sequence, so that sharding over an even number of ranks splits the
            image. Neighbouring sequences have their runs at different positions.
        pixel_values [B, channels, height, width], float32, standard normal.
        token_type_ids [B, T], int64: 1 at image tokens, else 0; the tokens of an image then attend to each other.

    Raises:
        ModelError: `seq_len` is too short for an image, the vocabulary has only special tokens, or the model has inputs of
            another modality that is not supported.
    """
    generator = torch.Generator().manual_seed(seed)
    text = config.get_text_config()
    special = {getattr(text, "pad_token_id", None)}  # the config of CodeGen has none
    if text is not config:
        special |= {getattr(config, f"{name}_token_id", None) for name in ("image", "boi", "eoi")}
    tokens = torch.tensor([token for token in range(text.vocab_size) if token not in special])
    if not len(tokens):
        raise ModelError(f"vocab_size = {text.vocab_size} has only special tokens; take a larger vocabulary")
    picks = torch.randint(len(tokens), (batch_size, seq_len), generator=generator)
    inputs = {"input_ids": tokens[picks]}
    if config.model_type == "gemma3":
        inputs |= _with_images(config, inputs["input_ids"], generator)
    elif text is not config:
        raise ModelError(
            f"model_type {config.model_type!r} takes more inputs than tokens, and these are made here only for gemma3; call "
            "the model with your own inputs"
        )
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _with_images(config: Any, input_ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the inputs of gemma3, with image tokens written over the text of each sequence."""
    batch_size, seq_len = input_ids.shape
    run = config.mm_tokens_per_image
    if seq_len < run + 2:
        raise ModelError(
            f"seq_len = {seq_len} is too short for an image: {run} tokens and text on both sides need "
            f"{run + 2}; take more, or a smaller mm_tokens_per_image"
        )
    input_ids, token_type_ids = input_ids.clone(), torch.zeros_like(input_ids)
    for row in range(batch_size):
        start = seq_len // 2 - 1 - row % max(1, run - 1)
        start = min(max(start, 1), seq_len - 1 - run)
        input_ids[row, start : start + run] = config.image_token_id
        token_type_ids[row, start : start + run] = 1
    vision = config.vision_config
    pixels = (batch_size, vision.num_channels, vision.image_size, vision.image_size)
    return {
        "input_ids": input_ids,
        "pixel_values": torch.randn(pixels, generator=generator, dtype=torch.float32),
        "token_type_ids": token_type_ids,
    }
