"""A model of one's own, which transformers does not know: an nn.Module by the name of its class.

    [model]
    class = "my_package.model:MyModel"
    arguments = { width = 512, layers = 8 }

Its forward takes `input_ids` [batch, sequence] and returns logits [batch, sequence, vocabulary], or an object or dict that
has them as `logits`, or a tuple that begins with them. Its constructor gives every parameter its value. It may have a
`config`, a transformers PretrainedConfig; otherwise it gets one, whose `model_type` is the class's own `model_type` or its
name, by which a plan is registered.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from titanplans.errors import ModelError
from titanplans.plan.registry import model_type_of
from titanplans.split.decoder import find_decoder
from titanplans.user_code import as_user_error, check_keywords, load_attribute

_CLASS, _ARGUMENTS = "own_class", "own_arguments"
"""Fields of the config that say how the model is made again."""


class OwnConfig(PretrainedConfig):
    """The config of a model that has none: which class it is, and the keywords of its constructor."""


class OwnModel(nn.Module):
    """The attributes of a transformers model that the engine reads, for a model of one's own."""

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """Each parameter that is tied, and the one that it is tied to."""
        first: dict[int, str] = {}
        named = self.named_parameters(remove_duplicate=False)
        return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}

    @property
    def _no_split_modules(self) -> list[str]:
        return sorted({type(block.module).__name__ for block in find_decoder(self, required=False).blocks})

    def is_custom_code(self) -> bool:
        """No: transformers loads nothing of it."""
        return False

    def _initialize_weights(self, module: nn.Module, custom: bool) -> None:
        """Nothing: its own constructor has done it."""


def own_config(source: str, arguments: Mapping[str, Any], sizes: str | None = None) -> PretrainedConfig:
    """Return the config of the model that the class `source`, "module:Class", makes of these keywords.

    It is made once, on meta.

    Args:
        source: the class.
        arguments: keywords of its constructor.
        sizes: where they stand, if not in a job.

    Raises:
        ModelError: there is no such class, it fails, its config is no PretrainedConfig, it has no embedding, or its forward
            takes no `input_ids`.
    """
    with torch.device("meta"):
        model = _made(source, arguments, sizes)
    try:
        inspect.signature(model.forward).bind(input_ids=None)
    except TypeError as error:
        raise ModelError(
            f"model.class = {source!r}: its forward can't be called with input_ids alone ({error}): give it an argument of "
            "that name, and the others defaults"
        ) from error
    config = getattr(model, "config", None)
    if config is None:
        embedding = find_decoder(model).embedding
        if embedding is None:
            raise ModelError(
                f"model.class = {source!r}: {type(model).__name__} has no nn.Embedding outside its blocks, so its "
                "vocabulary is not known: give it a config, a transformers PretrainedConfig with vocab_size"
            )
        config = OwnConfig()
        config.model_type = model_type_of(model)  # type: ignore[assignment]
        config.vocab_size = model.get_submodule(embedding).num_embeddings
    elif not isinstance(config, PretrainedConfig):
        raise ModelError(
            f"model.class = {source!r}: its config is a {type(config).__name__}: make it a transformers PretrainedConfig, "
            "or call it otherwise"
        )
    setattr(config, _CLASS, source)
    setattr(config, _ARGUMENTS, dict(arguments))
    return config


def is_own(config: PretrainedConfig) -> bool:
    """Whether `config` is that of a model of one's own."""
    return hasattr(config, _CLASS)


def construct_own(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Run the class's constructor with `device` and `dtype` as defaults, and give the model `config`.

    Raises:
        ModelError: it fails.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = _made(getattr(config, _CLASS), getattr(config, _ARGUMENTS))
    finally:
        torch.set_default_dtype(before)
    cls = type(model)
    model.__class__ = type(cls.__name__, (OwnModel, cls), {"__module__": cls.__module__})
    model.config = config
    return model


def _made(source: str, arguments: Mapping[str, Any], sizes: str | None = None) -> nn.Module:
    what = f"model.class = {source!r}" if sizes is None else f"{sizes}: class = {source!r}"
    cls = load_attribute(source, what, ModelError, _is_module)
    if not _is_module(cls):
        raise ModelError(f"{what}: it is not a class of nn.Module; name one")
    given = f"{what}, {'model.arguments' if sizes is None else 'arguments'} = {dict(arguments)}"
    check_keywords(cls, arguments, given, ModelError)
    with as_user_error(given, ModelError):
        return cls(**arguments)


def _is_module(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)
