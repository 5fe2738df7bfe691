"""Random weights, and the batches of a proof. Start at `Sampler` and `randomise`."""

import inspect
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from titanplans.errors import PlanError, either
from titanplans.loss import IGNORED
from titanplans.proof.batches.conditions import FROZEN, MicroBatch
from titanplans.split.cache import CACHES, cache_argument
from titanplans.split.decoder import find_decoder, within

Inputs = Mapping[str, Any] | Callable[[int, int, int], Mapping[str, Any]] | None
"""Keyword arguments of a forward, the same for every batch; or a function that returns them from batch size, sequence length
and seed; or None for token ids."""


_MODALITIES = {"pixel_values": "images", "pixel_values_videos": "videos", "input_features": "sound"}
"""Inputs other than text, by their keyword in transformers' forwards."""


@dataclass(frozen=True)
class Sample:
    """A batch as tensors: keyword arguments of the forward, and labels."""

    inputs: dict[str, Any]
    labels: torch.Tensor


class Sampler:
    """Makes the batches of one model.

    Args:
        model: the unsplit model; only its signature and its config are used, and it does not run.
        inputs: inputs of the forward, as in `verify`.
        sequence_dim: sequence dimension of token ids, 0 or 1.
        seed: seed of tokens and labels.

    Attributes:
        uncovered: conditions that this model or these inputs exclude, each with the reason.
        padded: batches in training may be padded.
        caches: the paddings ("" for no padding) of batches that may fill a cache.
        documents: the keyword that packs several documents into a sequence; None: the model has none.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, sequence_dim: int, seed: int):
        self.inputs, self.sequence_dim, self.seed = inputs, sequence_dim, seed
        self.fixed = isinstance(inputs, Mapping)
        self.vocabulary = 0 if self.fixed else vocabulary_size(model)
        self.padding_id = _padding(model, self.vocabulary)
        parameters = inspect.signature(model.forward).parameters
        first = next(iter(parameters.values()))
        variadic = first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD)
        self.ids_name = "input_ids" if "input_ids" in parameters or variadic else first.name
        self._returns_cache = "use_cache" in parameters
        batch_first = sequence_dim == 1 and not self.fixed
        self.padded = batch_first and "attention_mask" in parameters
        cached = self._returns_cache and cache_argument(model) is not None and not self.fixed
        self.caches = ("", "left")[: 1 + self.padded] if cached else ()
        documents = (name for name in ("cu_seqlens", "position_ids") if batch_first and _takes(model, name))
        self.documents = next(documents, None)
        self.modalities = [name for name in _MODALITIES if name in parameters]

    @property
    def uncovered(self) -> Iterator[str]:
        if self.fixed:
            yield "batches of other sizes and lengths, padding, documents, repeated tokens: the inputs are fixed"
            return
        name = "its forward takes no"
        if not self.padded:
            yield f"padding: {name} attention_mask, or the sequence comes first"
        if self.documents is None:
            yield f"documents in a sequence: {name} cu_seqlens or position_ids, or the sequence comes first"
        if not self.caches:
            lacks = f"ne called {either(CACHES)}" if self._returns_cache else " use_cache"
            yield f"a forward with a cache: {name}{lacks}"

    def missing_modalities(self, batches: Collection[MicroBatch]) -> Iterator[str]:
        """Describe the kinds of input other than text that the model takes but that none of `batches` has."""
        for name in self.modalities:
            if not any(name in self.tokens(batch, 0) for batch in batches):
                yield f"{_MODALITIES[name]}: no batch has {name}, which verify(inputs=...) would give"

    def tokens(self, batch: MicroBatch, index: int, *, cached: bool = False) -> dict[str, Any]:
        """Return the inputs of `batch` as keyword arguments.

        Args:
            batch: its conditions.
            index: the batch's index; batches with different indices have different tokens.
            cached: the forward fills a cache, so padding is allowed even if batches in training must not be padded.
        """
        seed = self.seed + 10 * index
        if isinstance(self.inputs, Mapping):
            return dict(self.inputs)
        if self.inputs is not None and not batch.text:
            inputs = dict(self.inputs(batch.size, batch.length, seed))
            # A sequence with images may be longer than `batch.length`.
            batch = replace(batch, length=inputs[self.ids_name].shape[self.sequence_dim])
        else:
            inputs = {self.ids_name: self._ids(batch, seed)}
        if batch.padding and (cached or self.padded):
            inputs["attention_mask"] = _mask(batch, index)
        if batch.documents and self.documents == "position_ids":
            inputs["position_ids"] = torch.stack(
                [torch.cat(list(map(torch.arange, lengths))) for lengths in _document_lengths(batch, index)]
            )
        elif batch.documents and self.documents == "cu_seqlens":
            # With cu_seqlens a batch is one sequence: [batch, sequence] becomes [1, tokens].
            inputs = {n: v.reshape(1, -1, *v.shape[2:]) for n, v in inputs.items()}
            documents = [length for lengths in _document_lengths(batch, index) for length in lengths]
            inputs["cu_seqlens"] = torch.tensor([0, *documents]).cumsum(0).to(torch.int32)
        return inputs

    def sample(self, batch: MicroBatch, index: int, logits: torch.Size | None) -> Sample:
        """Return the tensors of `batch`, on the CPU.

        Args:
            batch: its conditions.
            index: the batch's index; batches with different indices have different tokens and labels.
            logits: the shape of the logits, [..., vocabulary]; needed only if the inputs are fixed.
        """
        inputs = self.tokens(batch, index)
        *shape, size = logits or (*inputs[self.ids_name].shape, self.vocabulary)
        labels = _stratified_ids(tuple(shape), size, self.seed + 10 * index + 1)
        if batch.padding and self.padded:
            labels = labels.masked_fill(inputs["attention_mask"] == 0, IGNORED)
        if batch.ignored:
            labels.view(-1)[1::3] = IGNORED
        return Sample(inputs, labels)

    def _ids(self, batch: MicroBatch, seed: int) -> torch.Tensor:
        shape = (batch.length, batch.size) if self.sequence_dim == 0 else (batch.size, batch.length)
        ids = _stratified_ids(shape, self.vocabulary, seed)
        if batch.repeated:
            few = _stratified_ids((3,), self.vocabulary, seed)
            return few[torch.arange(ids.numel()) % 3].view(shape)
        if self.padding_id is not None and ids.numel() > 2 and not (ids == self.padding_id).any():
            # Include the padding token, since its row of the embedding must get no gradient. The first and the last id of
            # the vocabulary are kept.
            inner = ((ids != ids.min()) & (ids != ids.max())).flatten().nonzero()
            ids.view(-1)[inner[0]] = self.padding_id
        return ids


def _mask(batch: MicroBatch, index: int) -> torch.Tensor:
    """Return an attention mask [batch, sequence], int64, 0 at padding. Its length varies by sequence and batch."""
    positions = torch.arange(batch.length)
    if batch.padding == "left":
        positions = positions.flip(0)
    sequences = torch.arange(batch.size)[:, None]
    padded = 1 + (2 * sequences + index - 1) % max(batch.length - 1, 1)
    return (positions < batch.length - padded.clamp_max(batch.length - 1)).long()


def _document_lengths(batch: MicroBatch, index: int) -> list[list[int]]:
    """Return the lengths of the two documents in each sequence, which vary by sequence and batch."""
    offsets = [batch.length // 3 + sequence + index for sequence in range(batch.size)]
    firsts = [1 + offset % max(batch.length - 1, 1) for offset in offsets]
    return [[first, batch.length - first] if first < batch.length else [first] for first in firsts]


def _takes(model: nn.Module, name: str) -> bool:
    """Whether the forward of `model` has the keyword `name`, or passes all keywords on to a module whose forward has
    it."""
    parameters = inspect.signature(model.forward).parameters
    if name in parameters:
        return True
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        return False
    codes = [getattr(inspect.unwrap(type(module).forward), "__code__", None) for module in model.modules()]
    return any(code is not None and name in (*code.co_varnames, *code.co_consts) for code in codes)


def longest_block(model: nn.Module) -> int:
    """Return the number of tokens of the largest attention window, or of the largest chunk of a linear mixer.

    The result is at least 128, the largest block of the kernels of PyTorch, FLA and transformers.
    """
    names = ("sliding_window", "window_size", "chunk_size", "block_size")
    sizes = [getattr(module, name, None) for module in model.modules() for name in names]
    return max([128, *(size for size in sizes if isinstance(size, int))])


def randomise(model: nn.Module, seed: int) -> None:
    """Give every parameter of `model` new values, in place. The values depend only on the seed and the parameter's name.

    Initial values hide mistakes: a zero bias or projection passes nothing on, a norm's ones multiply by 1, and equal heads
    can be exchanged. So matrices become normal with standard deviation fan_in^-1/2, which keeps activations near 1. Vectors
    and scalars often have a meaningful scale (a norm's 1, a decay's logarithm), so 0.3 randn is added to them.
    """
    for name, param in model.named_parameters():
        # Draw on the CPU in float64, so that the values are the same on every rank and every device.
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        if not param.is_floating_point():  # codes of a quantized weight
            param.data.copy_(torch.randint(256, param.shape, generator=generator))
            continue
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param)
        with torch.no_grad():
            if param.ndim > 1:
                param.copy_(noise * (param.numel() / max(len(param), 1)) ** -0.5)
            else:
                param.add_(0.3 * noise)


def freeze(model: nn.Module, what: str) -> None:
    """Freeze parameters of `model`.

    Args:
        model: unsplit.
        what: one of `titanplans.proof.batches.conditions.FROZEN`. "mixers and MLPs" freezes all mixers, all MLPs and the
            head, so that gradients pass through modules that do not train. "parameters" freezes all parameters before the
            blocks, the first block, and every second parameter of the other blocks, so that a block's input needs no
            gradient, and some modules have both trained and frozen parameters. If "mixers and MLPs" would freeze nothing,
            or leave nothing to train, as with adapters, "parameters" is used instead. At least one parameter stays
            trained.
    """
    decoder = find_decoder(model, required=False)
    named = dict(model.named_parameters())
    names = list(named)
    frozen = (*decoder.mixers, *decoder.mlps, decoder.head) if what == FROZEN[0] else ()
    kept = [bool(frozen) and not any(module and within(name, module) for module in frozen) for name in names]
    if all(kept) or not any(
        keep and named[name].requires_grad for name, keep in zip(names, kept, strict=True)
    ):
        first = f"{decoder.blocks[0].name}." if len(decoder.blocks) > 1 else None
        until = max((at for at, name in enumerate(names) if first and name.startswith(first)), default=-1)
        kept = [at > until and not at % 2 for at in range(len(names))]
    if not any(kept):
        kept = [at == 0 for at in range(len(names))]
    for param, keep in zip(named.values(), kept, strict=True):
        if not keep:
            param.requires_grad_(False)


def _padding(model: nn.Module, size: int) -> int | None:
    """Return the `padding_idx` of the embedding [size, hidden], the row that gets no gradient; None if there is none."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == size:
            return module.padding_idx
    return None


def _stratified_ids(shape: tuple[int, ...], size: int, seed: int) -> torch.Tensor:
    """Return n random ids below `size`, one from each of n equal ranges, in random order.

    The ids 0 and `size` - 1 are always among them. Independent random ids could miss a rank's shard of the vocabulary, or
    its last rows.
    """
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    strata = (torch.arange(count) + torch.rand(count, generator=generator, dtype=torch.float64)) / count
    ids = (strata * size).long().clamp_max(size - 1)
    ids[0], ids[-1] = 0, size - 1
    return ids[torch.randperm(count, generator=generator)].view(shape)


def vocabulary_size(model: nn.Module) -> int:
    """Return the size of the vocabulary, from the model's config or else from its embedding.

    Raises:
        PlanError: `model` has neither.
    """
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if isinstance(size := getattr(config, "vocab_size", None), int):
        return size
    embedding = find_decoder(model).embedding
    if embedding is None:
        raise PlanError(
            f"{type(model).__name__} has neither config.vocab_size nor an embedding next to its blocks: "
            "pass verify(inputs=...)"
        )
    return model.get_submodule(embedding).num_embeddings  # type: ignore[return-value]


def moved(inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return `inputs` with tensors on `device`, floating-point ones in `dtype`."""
    return {
        name: value.to(device, dtype if value.is_floating_point() else None)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in inputs.items()
    }
