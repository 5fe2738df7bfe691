"""A smaller config of the same architecture, with fewer blocks and tokens, which a plan splits in the same way."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from titanplans import modeling
from titanplans.cli.verify.subject import Subject
from titanplans.errors import VerifyError
from titanplans.tensor_parallel.decoder import find_decoder

_OWN_NUMBER = ("layer_idx", "layer_id", "layer_number")  # under these names a block knows its place


def cut(
    source: Subject, layers: int | None, vocab_size: int | None
) -> tuple[PretrainedConfig, nn.Module, list[str]]:
    """Return the smaller config, its model on meta with the first `layers` blocks, and what is smaller, in words.

    Args:
        source: the whole model, which has a config.
        layers: None takes as few as hold every kind of block (by classes, shapes and settings), but two, since the
            stream begins at the first. A tower of another modality is cut to the same number if it has more.
        vocab_size: tokens in the vocabulary; None leaves them.

    Raises:
        ModelError: the model can't be built.
        VerifyError: it has fewer blocks or tokens, or its first blocks would not be the same in a smaller model.
    """
    assert source.config is not None
    config, model, notes = source.config, modeling.build(source.config), []
    kinds = _kinds(model)
    if layers is not None and layers > len(kinds):
        raise VerifyError(
            f"--layers {layers}: {source.words} has {len(kinds)} blocks; take fewer, or leave it out"
        )
    number = layers or _smallest(kinds)
    if number < len(kinds):
        config = _with_layers(config, number)
        why = "" if layers else ", as few as hold every kind of block (--layers)"
        notes.append(f"the first {number} of {len(kinds)} blocks{why}")
    tokens = config.get_text_config().vocab_size
    if vocab_size is not None and vocab_size > tokens:
        raise VerifyError(
            f"--vocab-size {vocab_size}: {source.words} has {tokens:,} tokens; take fewer, or leave it out"
        )
    if vocab_size is not None and vocab_size < tokens:
        config = _with_vocabulary(config, vocab_size)
        notes.append(f"a vocabulary of {vocab_size:,} instead of {tokens:,}")
    if notes:
        model = modeling.build(config)
    if _kinds(model) != kinds[:number]:
        raise VerifyError(
            f"--layers {number}: the config of {source.words} gives {number} blocks that are not the first {number} of its "
            f"{len(kinds)}; give --layers {len(kinds)}, or a config.json of its own"
        )
    return config, model, notes


def _kinds(model: nn.Module) -> list[Any]:
    """Return the kind of each block."""
    return [kind(block.module) for block in find_decoder(model, required=False).blocks]


def kind(block: nn.Module) -> Any:
    """Return the classes, shapes and settings of a block, without its number: equal for blocks of one kind."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, p.shape) for key, p in module._parameters.items() if p is not None),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | int | str | None) and key not in _OWN_NUMBER
            ),
        )
        for name, module in block.named_modules()
    )


def _smallest(kinds: list[Any]) -> int:
    """Return how many of the first blocks hold every kind; at least two, if there are two."""
    every = next(n for n in range(len(kinds) + 1) if all(kind in kinds[:n] for kind in kinds))
    return min(max(every, 2), len(kinds))


def _parts(
    config: PretrainedConfig, values: dict[str, Any]
) -> Iterator[tuple[PretrainedConfig, dict[str, Any]]]:
    """Yield a config and those that it holds, such as a vision tower's, each with its part of `values`."""
    yield config, values
    for name in config.sub_configs:
        if isinstance(inner := values.get(name), dict):
            yield getattr(config, name), inner


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    values = config.to_dict()
    for part, inner in _parts(config, values):
        key = type(part).attribute_map.get("num_hidden_layers", "num_hidden_layers")
        if isinstance(inner.get(key), int):
            _cut_values(inner, key, layers)
    return type(config).from_dict(values)


def _cut_values(values: dict[str, Any], key: str, layers: int) -> None:
    """Cut the number of blocks, each list with an entry for every block, and `attn = {"layers": [...]}` of hybrids."""
    before = values[key]
    values[key] = after = min(layers, before)
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) == before:
            values[name] = value[:after]
        elif isinstance(value, dict) and isinstance(value.get("layers"), list):
            values[name] = value | {"layers": [layer for layer in value["layers"] if layer < after]}


def _with_vocabulary(config: PretrainedConfig, tokens: int) -> PretrainedConfig:
    values = config.to_dict()
    for _, inner in _parts(config, values):
        if inner.get("vocab_size") == config.get_text_config().vocab_size:
            inner["vocab_size"] = tokens
            if (padding := inner.get("pad_token_id")) is not None and padding >= tokens:
                inner["pad_token_id"] = None  # a row that is not there
    return type(config).from_dict(values)
