"""User models: any nn.Module that is not in transformers, given by the name of its class.

    [model]
    class = "my_package.model:MyModel"
    arguments = { width = 512, layers = 8 }

Its forward takes `input_ids` [batch, sequence] and returns logits [batch, sequence, vocabulary], an object or dict with
`logits`, or a tuple whose first element is the logits. Its constructor initialises every parameter. The model may have a
`config`, a transformers PretrainedConfig. Otherwise it gets one, whose `model_type` is the attribute `model_type` of the
class or the name of the class. Plans are registered for this `model_type`.
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
"""Fields of the config from which the model is constructed again."""


class UserModelConfig(PretrainedConfig):
    """The config of a user model that has no config itself: the model's class and the arguments of its constructor."""


class UserModel(nn.Module):
    """Base class that gives a user model those attributes of a transformers model that titanplans uses."""

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """The source of each tied parameter, by name."""
        first: dict[int, str] = {}
        named = self.named_parameters(remove_duplicate=False)
        return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}

    @property
    def _no_split_modules(self) -> list[str]:
        return sorted({type(block.module).__name__ for block in find_decoder(self, required=False).blocks})

    def is_custom_code(self) -> bool:
        """Return False, since transformers has not loaded the code."""
        return False

    def _initialize_weights(self, module: nn.Module, custom: bool) -> None:
        """Do nothing: the constructor has initialised the parameters."""


def user_model_config(
    source: str, arguments: Mapping[str, Any], sizes: str | None = None
) -> PretrainedConfig:
    """Construct a user model on meta and return its config.

    Args:
        source: the model's class, "module:Class".
        arguments: the keyword arguments of the class's constructor.
        sizes: the file and flavor that the arguments are from, for errors; None: they are from a job.

    Raises:
        ModelError: the class does not exist, its constructor fails, its config is not a PretrainedConfig, it has neither a
            config nor an embedding, or its forward takes no `input_ids`.
    """
    with torch.device("meta"):
        model = _construct(source, arguments, sizes)
    try:
        inspect.signature(model.forward).bind(input_ids=None)
    except TypeError as error:
        raise ModelError(
            f"model.class = {source!r}: its forward can't be called with input_ids alone ({error}): give it an argument of "
            "this name, and give all other arguments defaults"
        ) from error
    config = getattr(model, "config", None)
    if config is None:
        embedding = find_decoder(model).embedding
        if embedding is None:
            raise ModelError(
                f"model.class = {source!r}: {type(model).__name__} has no nn.Embedding outside its blocks, so its "
                "vocabulary is not known: give it a config, a transformers PretrainedConfig with vocab_size"
            )
        config = UserModelConfig()
        config.model_type = model_type_of(model)  # type: ignore[assignment]
        config.vocab_size = model.get_submodule(embedding).num_embeddings
    elif not isinstance(config, PretrainedConfig):
        raise ModelError(
            f"model.class = {source!r}: its config is a {type(config).__name__}: make it a transformers PretrainedConfig, "
            "or give the attribute another name"
        )
    setattr(config, _CLASS, source)
    setattr(config, _ARGUMENTS, dict(arguments))
    return config


def is_user_model(config: PretrainedConfig) -> bool:
    """Whether `config` is the config of a user model."""
    return hasattr(config, _CLASS)


def construct_user_model(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Construct the user model of `config` with `device` and `dtype` as defaults, and set its `config`.

    Raises:
        ModelError: the constructor fails.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = _construct(getattr(config, _CLASS), getattr(config, _ARGUMENTS))
    finally:
        torch.set_default_dtype(before)
    cls = type(model)
    model.__class__ = type(cls.__name__, (UserModel, cls), {"__module__": cls.__module__})
    model.config = config
    return model


def _construct(source: str, arguments: Mapping[str, Any], sizes: str | None = None) -> nn.Module:
    what = f"model.class = {source!r}" if sizes is None else f"{sizes}: class = {source!r}"
    cls = load_attribute(source, what, ModelError, _is_module)
    if not _is_module(cls):
        raise ModelError(f"{what}: it is not a subclass of nn.Module; name a class of a model")
    call = f"{what}, {'model.arguments' if sizes is None else 'arguments'} = {dict(arguments)}"
    check_keywords(cls, arguments, call, ModelError)
    with as_user_error(call, ModelError):
        return cls(**arguments)


def _is_module(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)
