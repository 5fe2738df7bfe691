"""Reduce a config to fewer blocks and a smaller vocabulary, such that a plan splits the model in the same way.

The first blocks are kept, as many as are needed for every kind of block to occur. Blocks of one kind have equal classes,
shapes, settings and plan. Start at `reduce_config`.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from titanplans import modeling
from titanplans.cli.verify.subject import Subject
from titanplans.errors import PlanError, VerifyError
from titanplans.modeling.user_model import is_user_model
from titanplans.proof.verify import accepted_cases, degrees_to_prove
from titanplans.split.decoder import find_decoder


def reduce_config(
    source: Subject, layers: int | None, vocab_size: int | None
) -> tuple[PretrainedConfig, nn.Module, list[str]]:
    """Return the reduced config, its model on meta, and a description of each reduction.

    Args:
        source: the full-size model, with a config.
        layers: number of blocks to keep, from the first on. None: as few as contain every kind of block, but at least two,
            since the first block is special: the stream begins there. Towers of other modalities keep the same number,
            unless they have fewer.
        vocab_size: size of the vocabulary. None: the smallest one that is split in the same way.

    Raises:
        ModelError: the model can't be built.
        VerifyError: the model has fewer blocks or tokens than requested, or the reduced model's blocks would differ from
            the original's first blocks.
    """
    assert source.config is not None
    config, model, notes = source.config, modeling.build(source.config), []
    if is_user_model(config):
        for option, value in (("layers", layers), ("vocab-size", vocab_size)):
            if value is not None:
                raise VerifyError(
                    f"--{option} {value}: the config of {source.words} has no known keyword for it: use a flavor or "
                    "arguments of that size"
                )
        return config, model, notes
    blocks = kinds(model)
    if layers is not None and layers > len(blocks):
        raise VerifyError(
            f"--layers {layers}: {source.words} has {len(blocks)} blocks: use fewer, or remove it"
        )
    count = layers or blocks_with_every_kind(blocks, plans(model, source))
    if layers is None:  # each pipeline stage needs a block
        count = min(max([count, *(degrees.pp for degrees in source.degrees or ())]), len(blocks))
    if count < len(blocks):
        config = _with_layers(config, count)
        why = ": the others have the same classes, shapes, settings and plan (--layers)"
        notes.append(f"the first {count} of {len(blocks)} blocks{'' if layers else why}")
    tokens = config.get_text_config().vocab_size
    if vocab_size is not None and vocab_size > tokens:
        raise VerifyError(
            f"--vocab-size {vocab_size}: {source.words} has {tokens:,} tokens: use fewer, or remove it"
        )
    if vocab_size is None:
        vocab_size = _smaller_vocabulary(config)
    if vocab_size < tokens:
        config = _with_vocabulary(config, vocab_size)
        notes.append(f"a vocabulary of {vocab_size:,} instead of {tokens:,} (--vocab-size)")
    if notes:
        model = modeling.build(config)
    if kinds(model) != blocks[:count]:
        raise VerifyError(
            f"--layers {count}: with {count} layers the config of {source.words} makes blocks that differ from the first "
            f"{count} of its {len(blocks)}: use --layers {len(blocks)}, or a config.json of a smaller model"
        )
    return config, model, notes


def _inner_configs(
    config: PretrainedConfig, values: dict[str, Any]
) -> Iterator[tuple[PretrainedConfig, dict[str, Any]]]:
    """Yield a config and its inner configs, e.g. of a vision tower, each with its dict in `values`."""
    yield config, values
    for name in config.sub_configs:
        if isinstance(inner := values.get(name), dict):
            yield getattr(config, name), inner


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    values = config.to_dict()
    for inner_config, inner in _inner_configs(config, values):
        key = type(inner_config).attribute_map.get("num_hidden_layers", "num_hidden_layers")
        if isinstance(inner.get(key), int):
            _truncate(inner, key, layers)
    return type(config).from_dict(values)


def _truncate(values: dict[str, Any], key: str, layers: int) -> None:
    """Reduce the number of blocks in `values`, the lists with an entry per block, and `attn = {"layers": [...]}` of hybrid
    models."""
    before = values[key]
    values[key] = after = min(layers, before)
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) == before:
            values[name] = value[:after]
        elif isinstance(value, dict) and isinstance(value.get("layers"), list):
            values[name] = value | {"layers": [layer for layer in value["layers"] if layer < after]}


def _smaller_vocabulary(config: PretrainedConfig) -> int:
    """Return a smaller size with the same remainder modulo 384 = 16 x 24.

    Degrees that divide 24 split the smaller size in the same way as the original size, also for float8.
    """
    tokens = config.get_text_config().vocab_size
    sizes = range(384 + tokens % 384, tokens, 384) if tokens >= 768 else ()
    return next((size for size in sizes if _keeps_special_tokens(config, size)), tokens)


def _special_tokens(values: dict[str, Any]) -> dict[str, int]:
    return {
        key: value
        for key, value in values.items()
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }


def _new_id(token: int, before: int, tokens: int) -> int:
    """Return a special token's id in the smaller vocabulary. An id that is too large keeps its distance from the end."""
    return token if token < tokens else max(token - before + tokens, 0)


def _keeps_special_tokens(config: PretrainedConfig, tokens: int) -> bool:
    """Whether different special tokens have different ids in a vocabulary of `tokens`."""
    before = config.get_text_config().vocab_size
    inner = [values for _, values in _inner_configs(config, config.to_dict())]
    special = {token for values in inner for token in _special_tokens(values).values() if 0 <= token < before}
    return len({_new_id(token, before, tokens) for token in special}) == len(special)


def _with_vocabulary(config: PretrainedConfig, tokens: int) -> PretrainedConfig:
    """Return the config with a vocabulary of `tokens`, in which special tokens, e.g. the image token, have new ids."""
    values, before = config.to_dict(), config.get_text_config().vocab_size
    for _, inner in _inner_configs(config, values):
        if inner.get("vocab_size") == before:
            inner["vocab_size"] = tokens
        inner |= {key: _new_id(token, before, tokens) for key, token in _special_tokens(inner).items()}
    return type(config).from_dict(values)


_INDEX_ATTRIBUTES = ("layer_idx", "layer_id", "layer_number", "num_hidden_layers")
"""Attributes in which modules store the index of their block and the number of blocks."""


def kinds(model: nn.Module) -> list[Any]:
    """Return the `kind` of each block."""
    return [kind(block.module) for block in find_decoder(model, required=False).blocks]


def kind(block: nn.Module) -> Any:
    """Return the classes, shapes and settings of a block, but not its index. They are equal for blocks of one kind."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, p.shape) for key, p in module._parameters.items() if p is not None),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | int | str | None) and key not in _INDEX_ATTRIBUTES
            ),
        )
        for name, module in block.named_modules()
    )


def plans(model: nn.Module, subject: Subject) -> list[Any]:
    """Return the classes and attributes of each block's styles, in every case that the plan of `subject` accepts.

    A style that uses the index of its block only when the model runs is not distinguished from the same style in another
    block.
    """
    blocks = find_decoder(model, required=False).blocks
    by_block: list[list[Any]] = [[] for _ in blocks]
    try:
        cases, _ = accepted_cases(
            model,
            subject.plan,
            degrees_to_prove(model, subject.degrees),
            subject.loss_parallel,
            subject.sequence_parallel,
            named=False,
        )
    except PlanError:
        return by_block  # the proof reports the refusal
    for styles in cases.values():
        for block, its_plans in zip(blocks, by_block, strict=True):
            prefix = f"{block.name}."
            its_plans.append(
                {
                    key.removeprefix(prefix): (type(style), vars(style))
                    for key, style in styles.items()
                    if f"{key}.".startswith(prefix)
                }
            )
    return by_block


def blocks_with_every_kind(*properties: Sequence[Any]) -> int:
    """Return how many blocks, from the first on, contain every combination of `properties`, but at least two."""
    blocks = list(zip(*properties, strict=True))
    count = next(
        n
        for n in range(len(blocks) + 1)
        if all(block in blocks[:n] for block in itertools.islice(blocks, n, None))
    )
    return min(max(count, 2), len(blocks))
