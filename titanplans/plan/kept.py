"""Plans that `titanplans derive --keep` has derived and proved: `kept_plan` returns one, `keep_plan` writes one.

There is one file for each structure of a model. Its first two lines state the facts that the proof depends on: the model's
structure, its code and the versions of libraries. The class of the plan follows. A file is used only if all of its facts
are equal to the model's.
"""

import contextlib
import glob
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from titanplans.config.families import PLANS
from titanplans.disk import write_atomically
from titanplans.errors import PlanError
from titanplans.plan.plan import TPPlan
from titanplans.plan.registry import model_type_of
from titanplans.plan.structure import (
    classes_of,
    digest_of_folders,
    digests,
    structure_of,
    switches_of,
)
from titanplans.text import class_name
from titanplans.user_code import as_user_error
from titanplans.versions import library_versions

_FIRST_LINE = "# Written by titanplans derive --keep. A file that was changed is not used.\n"
_SECONDS_KEPT = 24 * 60 * 60
"""How long a plan for other code or other versions stays at least: another environment may be starting a job with it."""


@dataclass(frozen=True)
class KeptPlan:
    """A plan that was derived, proved and kept."""

    plan: type[TPPlan]
    file: Path
    proof: str
    """What was proved: "3 cases at tp 2; cp 2"."""

    @property
    def origin(self) -> str:
        return f"derived {self.plan.__name__}, proved in {self.proof}, kept in {self.file}"


def kept_folder() -> Path:
    """Return the folder of kept plans: titanplans/plans in $XDG_CACHE_HOME, by default in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "titanplans" / "plans"


def facts_of(model: nn.Module) -> dict[str, Any]:
    """Return what a kept plan depends on, as JSON values, for an unsplit model on any device.

    Raises:
        PlanError: a class of the model is in no file.
    """
    engine = Path(__file__).parent.parent
    return {
        "model": class_name(model),
        "model_type": model_type_of(model),
        "structure": structure_of(model),
        "config": switches_of(model),
        "sources": digests(classes_of(model)),
        # For titanplans the contents of its files count, since the code in a git clone changes without a new version.
        "versions": library_versions("torch", "transformers", "fla")
        | {"titanplans": digest_of_folders([engine, *import_module(PLANS).__path__])},
    }


def file_for(facts: Mapping[str, Any]) -> Path:
    """Return the file of the plan that is kept for these facts, whether it exists or not."""
    return kept_folder() / f"{_prefix(facts)}{_checksum(json.dumps(facts, sort_keys=True))[:16]}.py"


def _prefix(facts: Mapping[str, Any]) -> str:
    return re.sub(r"\W", "_", str(facts["model_type"])) + "-"


def kept_plan(model: nn.Module) -> KeptPlan | None:
    """Return the kept plan of an unsplit model; None if there is none, or if a base class of the plan has changed.

    Raises:
        PlanError: the plan's file was changed; a class of the model is in no file.
    """
    facts = facts_of(model)
    file = file_for(facts)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PlanError(f"derive = true: {file} can't be read ({error.strerror}); remove it") from error
    header = _header(text, file)
    if header["facts"] != facts:  # another structure with the same 64 bits of the checksum
        return None
    plan = _import(file, text, header["name"], header["checksum"])
    if digests(plan.__mro__[1:]) != header["bases"]:
        return None
    return KeptPlan(plan, file, header["proof"])


def keep_plan(facts: Mapping[str, Any], plan: type[TPPlan], text: str, proof: str) -> Path:
    """Write a proved plan, and return its file. Two processes may write the same file at the same time.

    Plans of the same model class for other code or other versions are removed, unless they are younger than a day.

    Args:
        facts: the result of `facts_of` for the model of the plan.
        plan: the class.
        text: the content of the class's source file, which does not register the class.
        proof: what was proved, for `KeptPlan.proof`.

    Raises:
        OSError: the file can't be written.
    """
    file = file_for(facts)
    header = {"name": plan.__name__, "proof": proof, "bases": digests(plan.__mro__[1:]), "facts": dict(facts)}
    header["checksum"] = _checksum(json.dumps(header, sort_keys=True) + text)
    # Processes write to different temporary files, since each process renames its file when it is complete.
    temporary = file.with_name(f"{file.stem}.{platform.node()}.{os.getpid()}")
    write_atomically(temporary, f"{_FIRST_LINE}# {json.dumps(header)}\n{text}")
    temporary.replace(file)
    _remove_outdated(facts)
    return file


def _remove_outdated(facts: Mapping[str, Any]) -> None:
    """Remove the plans of the same model class whose facts no model can have with the code and versions of `facts`."""
    for file in kept_folder().glob(f"{glob.escape(_prefix(facts))}*.py"):
        # A file that can't be read, or that was changed, stays: its owner decides. Another process may remove it, too.
        with contextlib.suppress(OSError, PlanError):
            other = _header(file.read_text(encoding="utf-8"), file)["facts"]
            is_young = time.time() - file.stat().st_mtime < _SECONDS_KEPT
            if other["model"] == facts["model"] and not is_young and _is_outdated(other, facts):
                file.unlink()
                file.with_suffix(".lock").unlink(missing_ok=True)


def _is_outdated(other: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    # Models of one class may differ in their structure and config, and so in the modules that define their classes.
    shared = other["sources"].keys() & facts["sources"].keys()
    return other["versions"] != facts["versions"] or any(
        other["sources"][name] != facts["sources"][name] for name in shared
    )


def not_kept(model: nn.Module) -> PlanError:
    """Return the error for a model that has neither a registered plan nor a kept one, although kept plans are allowed."""
    return PlanError(
        f"derive = true: no plan is registered for {class_name(model)} (model_type = {model_type_of(model)!r}), and none in "
        f"{kept_folder()} is proved for this structure, code and libraries; run titanplans derive config.json --keep with "
        "the model's config.json, or name a plan: plan = 'module:Class'"
    )


def _header(text: str, file: Path) -> dict[str, Any]:
    """Return the second line of a kept file.

    Raises:
        PlanError: the file was changed after it was written.
    """
    first, line, body = [*text.split("\n", 2), "", ""][:3]
    try:
        header = json.loads(line.removeprefix("# "))
        checksum = header.pop("checksum")
    except (ValueError, KeyError, AttributeError):
        header, checksum = {}, ""
    if f"{first}\n" != _FIRST_LINE or checksum != _checksum(json.dumps(header, sort_keys=True) + body):
        raise PlanError(
            f"derive = true: {file} was changed after its plan was proved; remove it, or name a copy as your own plan: "
            "plan = 'module:Class'"
        )
    return header | {"checksum": checksum}


def _import(file: Path, text: str, name: str, checksum: str) -> type[TPPlan]:
    """Run the text of a kept file as a module, once for each checksum, and return the class `name`."""
    module_name = f"titanplans_kept_{checksum}"
    if module_name not in sys.modules:
        module = ModuleType(module_name)
        module.__file__ = str(file)
        with as_user_error(f"derive = true: {file} can't be imported; remove it"):
            # Not imported: an import may run cached bytecode, which is matched to the file only by its modification time.
            exec(compile(text, file, "exec"), module.__dict__)
        sys.modules[module_name] = module
    return getattr(sys.modules[module_name], name)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
