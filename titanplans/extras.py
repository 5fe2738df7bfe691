"""The libraries of optional features, and the error if such a library is not installed. Imports no torch."""

import importlib.util
from collections.abc import Mapping
from typing import NamedTuple

from titanplans.errors import UserError


class _Extra(NamedTuple):
    distribution: str
    extra: str


EXTRAS: Mapping[str, _Extra] = {
    "torchtitan": _Extra("torchtitan", "train"),
    "datasets": _Extra("datasets", "train"),
    "pyarrow": _Extra("pyarrow", "train"),
    "tokenizers": _Extra("tokenizers", "train"),
    "jinja2": _Extra("jinja2", "train"),
    "xxhash": _Extra("xxhash", "train"),
    "numpy": _Extra("numpy", "train"),
    "tensorboard": _Extra("tensorboard", "train"),
    "plotext": _Extra("plotext", "train"),
    "matplotlib": _Extra("matplotlib", "train"),
    "fla": _Extra("flash-linear-attention", "fla"),
    "triton": _Extra("triton", "fla"),
    "torchao": _Extra("torchao", "float8"),
    "accelerate": _Extra("accelerate", "trainer"),
    "wandb": _Extra("wandb", "wandb"),
    "megatron_fsdp": _Extra("megatron-fsdp", "megatron-fsdp"),
}
"""Maps an importable package to its distribution and to the extra of pyproject.toml that installs it."""


class MissingLibrary(UserError, ImportError):
    """A library of an extra that is not installed."""


def missing_library(package: str, purpose: str) -> MissingLibrary:
    """Return the error for a missing `package`, a key of `EXTRAS`; it says that `purpose`, such as a command, needs it."""
    distribution, extra = EXTRAS[package]
    return MissingLibrary(
        f"{purpose} needs {distribution}, which is not installed: pip install 'titanplans[{extra}]', in a clone '.[{extra}]'"
    )


def is_installed(package: str) -> bool:
    """Whether `package` can be imported; it is not imported."""
    return importlib.util.find_spec(package) is not None


def as_missing_library(error: ImportError, purpose: str) -> MissingLibrary | None:
    """Return the error for `purpose` if `error` came from importing a missing package of an extra; else None."""
    package = (error.name or "").partition(".")[0]
    return missing_library(package, purpose) if package in EXTRAS and not is_installed(package) else None
