"""The facts that a kept plan depends on: a model's structure (`structure_of`), code (`digests`) and config switches.

None of these facts contains a size, so a plan that was proved for small models is used for large models of the same
structure.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from titanplans.errors import PlanError
from titanplans.split.adapted import FACTORS
from titanplans.split.decoder import find_decoder, within

_CONVERTING = ("titanplans", "torchao")
"""Packages that replace the class of a module by a subclass; the structure then has the original class."""
_LIBRARIES = ("builtins", "abc", "typing", "torch", *_CONVERTING)
"""Packages whose code is identified by their versions, or is not a model's."""
_NOT_STRUCTURE = ("training", "gradient_checkpointing", "name_or_path")
"""Attributes of modules that do not change what a model computes."""
_NOT_SWITCHES = (
    "architectures", "dtype", "name_or_path", "output_attentions", "output_hidden_states", "return_dict", "torch_dtype",
    "transformers_version", "use_cache",
)  # fmt: skip
"""Fields of configs that do not change what a model computes in a training step."""

Structure = Mapping[str, list[Any]]


def structure_of(model: nn.Module) -> dict[str, list[Any]]:
    """Return the structure of an unsplit model, on any device, as JSON values.

    The structure has each kind of block once ("blocks"), the modules outside of blocks ("outside"), and the parameters
    that are tied ("tied"). A module is described by its name, its class, the names and numbers of dimensions of its
    parameters, and its attributes that are booleans or strings.
    """
    blocks = find_decoder(model, required=False).blocks
    kinds = {tuple(_entries(block.module)) for block in blocks}
    names = [block.name for block in blocks]
    tied: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), set()).add(_without_numbers(name))
    return {
        "blocks": sorted(list(kind) for kind in kinds),
        "outside": _entries(model, names),
        "tied": sorted(sorted(group) for group in tied.values() if len(group) > 1),
    }


def missing_in(proved: Structure, structure: Structure) -> str:
    """Return the first part of `structure` that is missing in the structure `proved`; "" if none is missing."""
    proved_entries = {entry for kind in proved["blocks"] for entry in kind}
    for kind in structure["blocks"]:
        if kind not in proved["blocks"]:
            new = [entry for entry in kind if entry not in proved_entries]
            return f"a block with {new[0]}" if new else "one of its kinds of blocks"
    for part in ("outside", "tied"):
        if differing := [entry for entry in structure[part] if entry not in proved[part]]:
            return f"tied {' and '.join(differing[0])}" if part == "tied" else differing[0]
    lacking = [group for group in proved["tied"] if group not in structure["tied"]]
    return f"untied {' and '.join(lacking[0])}" if lacking else ""


def switches_of(model: nn.Module) -> dict[str, Any]:
    """Return the fields of a model's config, with "number" in place of each number but 0, and {} without a config."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    return {} if to_dict is None else _switches(to_dict())


def classes_of(model: nn.Module) -> set[type]:
    """Return the classes of a model's modules, and their base classes."""
    return {cls for module in model.modules() for cls in type(module).__mro__}


def digests(classes: Iterable[type]) -> dict[str, str]:
    """Return the SHA-256 of the source file of each module that defines one of `classes`, by the module's name.

    Raises:
        PlanError: a class is from no file, as in a notebook.
    """
    names = {cls.__module__: cls for cls in classes if cls.__module__.partition(".")[0] not in _LIBRARIES}
    return {name: _digest(name, cls) for name, cls in sorted(names.items())}


def digest_of_folders(folders: Iterable[str | Path]) -> str:
    """Return one SHA-256 of all Python files below some folders."""
    total = hashlib.sha256()
    for folder in folders:
        for file in sorted(Path(folder).rglob("*.py")):
            total.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return total.hexdigest()


def _digest(name: str, cls: type) -> str:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or not Path(file).is_file():
        raise PlanError(
            f"derive = true: {cls.__name__} of {name} is in no file, so a later change of it would not be seen; move it "
            "into a module"
        )
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _entries(root: nn.Module, left_out: Iterable[str] = ()) -> list[str]:
    """Return a line for each module in `root`, sorted, except the modules `left_out` and the modules inside them."""
    outside = [*left_out]
    return sorted(
        {
            _entry(_without_numbers(name), module)
            for name, module in root.named_modules(remove_duplicate=False)
            if not any(name == block or within(name, block) for block in outside)
            and not name.endswith("lora_dropout")
        }
    )


def _entry(name: str, module: nn.Module) -> str:
    cls = next(c for c in type(module).__mro__ if c.__module__.partition(".")[0] not in _CONVERTING)
    parameters = [
        f"{key}[{parameter.ndim}]"
        for key, parameter in sorted(module._parameters.items())
        if parameter is not None and key not in FACTORS
    ]
    settings: list[str] = []
    if not cls.__module__.startswith("torch."):
        settings = [
            f"{key}={value}"
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | str) and not key.startswith("_") and key not in _NOT_STRUCTURE
        ]
    details = ", ".join([*parameters, *settings])
    return f"{name or 'the module itself'}: {cls.__name__}({details})"


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _switches(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _switches(item)
            for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))
            if not str(key).startswith("_") and key not in _NOT_SWITCHES
        }
    if isinstance(value, list | tuple):
        converted: list[Any] = []
        for item in map(_switches, value):  # one entry for each kind: the number of entries is a size
            if item not in converted:
                converted.append(item)
        return converted
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int | float):
        return "number" if value else 0
    return str(value)
