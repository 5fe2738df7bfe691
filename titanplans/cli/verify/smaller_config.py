"""A smaller config of the same architecture, with fewer blocks and tokens, that a plan splits in the same way.

Of blocks of one kind (equal classes, shapes, settings and plan) one stands for all.
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


def cut(
    source: Subject, layers: int | None, vocab_size: int | None
) -> tuple[PretrainedConfig, nn.Module, list[str]]:
    """Return the smaller config, its model on meta with the first `layers` blocks, and the cuts in words.

    Args:
        source: the whole model, with a config.
        layers: None for as few as hold every kind of block (by classes, shapes, settings and plan), and at least two,
            since the stream begins at the first. A tower of another modality is cut to the same number if it has more.
        vocab_size: tokens in the vocabulary; None for the smallest that is split like the whole one.

    Raises:
        ModelError: the model can't be built.
        VerifyError: it has fewer blocks or tokens, or a smaller model would have other first blocks.
    """
    assert source.config is not None
    config, model, notes = source.config, modeling.build(source.config), []
    if is_user_model(config):
        for option, value in (("layers", layers), ("vocab-size", vocab_size)):
            if value is not None:
                raise VerifyError(
                    f"--{option} {value}: the keyword for it in {source.words} is not known: give a flavor or arguments "
                    "of that size"
                )
        return config, model, notes
    blocks = kinds(model)
    if layers is not None and layers > len(blocks):
        raise VerifyError(
            f"--layers {layers}: {source.words} has {len(blocks)} blocks; name fewer, or leave it out"
        )
    number = layers or first_that_hold_all(blocks, plans(model, source))
    if layers is None:  # each stage of a pipeline has one
        number = min(max([number, *(cut.pp for cut in source.degrees or ())]), len(blocks))
    if number < len(blocks):
        config = _with_layers(config, number)
        why = ": the others are of the same classes, shapes and settings, and have the same plan (--layers)"
        notes.append(f"the first {number} of {len(blocks)} blocks{'' if layers else why}")
    tokens = config.get_text_config().vocab_size
    if vocab_size is not None and vocab_size > tokens:
        raise VerifyError(
            f"--vocab-size {vocab_size}: {source.words} has {tokens:,} tokens; name fewer, or leave it out"
        )
    if vocab_size is None:
        vocab_size = _smaller(config)
    if vocab_size < tokens:
        config = _with_vocabulary(config, vocab_size)
        notes.append(f"a vocabulary of {vocab_size:,} instead of {tokens:,} (--vocab-size)")
    if notes:
        model = modeling.build(config)
    if kinds(model) != blocks[:number]:
        raise VerifyError(
            f"--layers {number}: the config of {source.words} gives {number} blocks that are not the first {number} of its "
            f"{len(blocks)}; give --layers {len(blocks)}, or a config.json of its own"
        )
    return config, model, notes


def _parts(
    config: PretrainedConfig, values: dict[str, Any]
) -> Iterator[tuple[PretrainedConfig, dict[str, Any]]]:
    """Yield a config and its inner ones, such as a vision tower's, each with its part of `values`."""
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


def _smaller(config: PretrainedConfig) -> int:
    """Return a vocabulary that degrees up to 4, 6, 8, 12 and 16 divide as they do the whole one, also in blocks of 16."""
    tokens = config.get_text_config().vocab_size
    sizes = range(384 + tokens % 384, tokens, 384) if tokens >= 768 else ()
    return next((size for size in sizes if _holds(config, size)), tokens)


def _special(values: dict[str, Any]) -> dict[str, int]:
    return {
        key: value
        for key, value in values.items()
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }


def _moved(token: int, before: int, tokens: int) -> int:
    """Return a special token's number in the cut vocabulary: if its row goes, its distance from the end stays."""
    return token if token < tokens else max(token - before + tokens, 0)


def _holds(config: PretrainedConfig, tokens: int) -> bool:
    """Whether different special tokens stay different in a vocabulary cut to `tokens`."""
    before = config.get_text_config().vocab_size
    inner = [values for _, values in _parts(config, config.to_dict())]
    special = {token for values in inner for token in _special(values).values() if 0 <= token < before}
    return len({_moved(token, before, tokens) for token in special}) == len(special)


def _with_vocabulary(config: PretrainedConfig, tokens: int) -> PretrainedConfig:
    """Cut the vocabulary; special tokens whose rows go, such as an image's, keep their distance from the end."""
    values, before = config.to_dict(), config.get_text_config().vocab_size
    for _, inner in _parts(config, values):
        if inner.get("vocab_size") == before:
            inner["vocab_size"] = tokens
        inner |= {key: _moved(token, before, tokens) for key, token in _special(inner).items()}
    return type(config).from_dict(values)


_PLACE = ("layer_idx", "layer_id", "layer_number", "num_hidden_layers")
"""Attributes by which a block knows its number, and the number of blocks."""


def kinds(model: nn.Module) -> list[Any]:
    """Return the kind of each block."""
    return [kind(block.module) for block in find_decoder(model, required=False).blocks]


def kind(block: nn.Module) -> Any:
    """Return the classes, shapes and settings of a block, without its number; equal for blocks of one kind."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, p.shape) for key, p in module._parameters.items() if p is not None),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | int | str | None) and key not in _PLACE
            ),
        )
        for name, module in block.named_modules()
    )


def plans(model: nn.Module, subject: Subject) -> list[Any]:
    """Return the class and the values of each block's styles, in every case that the plan of `subject` accepts.

    A style that asks a module for its number as the model runs can't be told from others.
    """
    blocks = find_decoder(model, required=False).blocks
    found: list[list[Any]] = [[] for _ in blocks]
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
        return found  # the proof explains the refusal better
    for styles in cases.values():
        for block, described in zip(blocks, found, strict=True):
            prefix = f"{block.name}."
            described.append(
                {
                    key.removeprefix(prefix): (type(style), vars(style))
                    for key, style in styles.items()
                    if f"{key}.".startswith(prefix)
                }
            )
    return found


def first_that_hold_all(*properties: Sequence[Any]) -> int:
    """Return how many first blocks hold every combination of the properties; at least two, if there are two."""
    rows = list(zip(*properties, strict=True))
    every = next(
        n for n in range(len(rows) + 1) if all(row in rows[:n] for row in itertools.islice(rows, n, None))
    )
    return min(max(every, 2), len(rows))
