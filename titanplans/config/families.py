"""Read the named models (families) from the TOML files of `titanplans.models` and of other packages.

No model library is imported. `titanplans.models` describes the files, and `titanplans.modeling.configs` creates config
objects from them.
"""

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

from titanplans.config.other_names import MODELS_OF_OTHERS
from titanplans.errors import ModelError, PlanError, did_you_mean
from titanplans.user_code import check_package, import_module

DEFAULT_NAME, DEFAULT_FLAVOR = "gla", "debug"
"""The model of a job that names none."""

MODELS, PLANS = "titanplans.models", "titanplans.plans"
"""The packages with the files of models and with the plans; also the groups of entry points through which other packages
add models and plans."""


@dataclass(frozen=True)
class Family:
    """A named model: the config class that builds it, and its flavors."""

    source: str
    """The file that describes it, for errors."""
    config_class: str | None
    """Module and name of the class, "transformers.LlamaConfig"; None if `own_class` is set."""
    flavors: Mapping[str, dict[str, Any]]
    """The config fields that differ from the class's defaults, by flavor."""
    undeclared: tuple[str, ...] = ()
    """Keywords that the class accepts although it declares no field of this name."""
    own_class: str | None = None
    """"module:Class" of a user's model. Its flavors have keyword arguments of the constructor instead of config fields."""


class Found(NamedTuple):
    """All families that can be read."""

    families: dict[str, Family]
    """The families by name, in alphabetical order."""
    faults: tuple[str, ...]
    """Why families of other packages can't be read: one sentence for each package that has a fault."""


def families() -> dict[str, Family]:
    """Return the families by name, in alphabetical order.

    Raises:
        ModelError: a file of this project does not have the format that `titanplans.models` describes; the message names
            the file.
    """
    return find_families().families


def find_flavor(name: str, flavor: str) -> Family:
    """Return the family `name`, which must have this flavor. Other packages are imported only if no file here has the name.

    Raises:
        ModelError: there is no such family or flavor; the message names the nearest one, or all.
    """
    files = dict(_files(resources.files(MODELS)))
    families_by_name = {name: read_family(files[name])} if name in files else families()
    if name not in families_by_name:
        if (flavors_of_others := MODELS_OF_OTHERS.get(name)) is not None:
            instead = did_you_mean(flavor, flavors_of_others)
            raise ModelError(f"model {name!r} (torchtitan's) has no flavor {flavor!r} here; {instead}")
        all_of_them = (
            f"available: {', '.join(families_by_name)}; for any other Hugging Face model give its config.json"
        )
        raise ModelError(
            f"model {name!r} is unknown; {did_you_mean(name, [*families_by_name, *MODELS_OF_OTHERS], all_of_them)}"
            f"{''.join(f'. Not read: {fault}' for fault in find_families().faults)}"
        )
    if flavor not in families_by_name[name].flavors:
        instead = did_you_mean(flavor, families_by_name[name].flavors)
        raise ModelError(f"model {name!r} has no flavor {flavor!r}; {instead}")
    return families_by_name[name]


def plan_names() -> list[str] | None:
    """Return the names of the registered plans without importing a plan: each family here has a plan of the same name.

    Return None if there may be other plans: another package adds plans, or the registry has been imported, and code may
    have registered plans in it.
    """
    if "titanplans.plan.registry" in sys.modules or metadata.entry_points(group=PLANS):
        return None
    return sorted(family for family, _ in _files(resources.files(MODELS)))


def check_plan(plan: object) -> None:
    """Check that a plan of this name may exist, without importing one.

    Raises:
        PlanError: the plan is not registered, or its package is not installed.
    """
    if names_code(plan):
        check_package(str(plan), f"plan = '{plan}'")
    elif isinstance(plan, str) and (names := plan_names()) and plan not in names:
        raise unknown_plan(plan, names)


def names_code(plan: object) -> bool:
    """Return whether a plan is a path, "module:attribute" or "module.attribute", and not a registered name or a table."""
    return isinstance(plan, str) and (":" in plan or "." in plan)


def unknown_plan(plan: str, known: Iterable[str], faults: Iterable[str] = ()) -> PlanError:
    """Return the error for a plan that is not registered. It names the nearest plan, or all plans."""
    return PlanError(
        f"plan = '{plan}': not registered; a plan of your own is named 'module:Class'; {did_you_mean(plan, list(known))}"
        f"{''.join(f'. Not loaded: {fault}' for fault in faults)}"
    )


@cache
def find_families() -> Found:
    """Return all families. A fault in another package does not prevent the use of the other families.

    Raises:
        ModelError: like `families`.
    """
    families_by_name = {name: read_family(file) for name, file in _files(resources.files(MODELS))}
    faults = []
    for entry in metadata.entry_points(group=MODELS):
        where = f"entry point {entry.name} = {entry.value!r} of the group {MODELS}"
        try:
            for name, file in _files(resources.files(import_module(entry.module, where, ModelError))):
                if name in families_by_name:
                    raise ModelError(
                        f"{where}: model {name!r} is in two files: {families_by_name[name].source} and {file}; rename one"
                    )
                families_by_name[name] = read_family(file)
        except ModelError as fault:
            faults.append(str(fault))
    return Found(dict(sorted(families_by_name.items())), tuple(faults))


def _files(package: Traversable) -> Iterator[tuple[str, Traversable]]:
    """Yield the family's name and the file, for each TOML file of a package."""
    for file in package.iterdir():
        if file.name.endswith(".toml"):
            yield file.name.removesuffix(".toml"), file


def read_family(file: Traversable) -> Family:
    """Return the family that a file describes.

    Raises:
        ModelError: the file does not have the format that `titanplans.models` describes.
    """
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # TOMLDecodeError names line and column, UnicodeDecodeError the byte
        raise ModelError(f"{file} is not TOML: {error}") from error
    config_class, undeclared = values.pop("config_class", None), values.pop("undeclared", [])
    own_class = values.pop("class", None)
    if own_class is not None and (config_class is not None or not isinstance(own_class, str)):
        raise ModelError(
            f"{file}: class = {own_class!r} must be the name of a user's model, 'my_package.model:MyModel', without "
            "config_class"
        )
    if own_class is None and (not isinstance(config_class, str) or "." not in config_class):
        raise ModelError(
            f"{file}: config_class = {config_class!r} must be the module and name of a config class, such as "
            "'transformers.LlamaConfig'"
        )
    if stray := [key for key, value in values.items() if not isinstance(value, dict)]:
        raise ModelError(f"{file}: {stray[0]!r} is in no flavor's table; move it into [defaults]")
    defaults = values.pop("defaults", {})
    flavors = {name: _none(merged(defaults, fields)) for name, fields in values.items()}
    return Family(str(file), config_class, flavors, tuple(undeclared), own_class)


def merged(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` updated with `changes`; nested tables are updated key by key.

    >>> merged({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 4}})
    {'a': 1, 'b': {'c': 2, 'd': 4}}
    """
    result = dict(fields)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if nested else value
    return result


def _none(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy with None in place of "none". It is a copy, since config classes write defaults into nested
    tables."""
    return {
        key: _none(value) if isinstance(value, dict) else None if value == "none" else value
        for key, value in fields.items()
    }
