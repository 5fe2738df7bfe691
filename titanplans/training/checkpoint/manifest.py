"""The manifest of a checkpoint, `titanplans.json`: the checkpoint's contents, the job that saved it, all files' checksums.

The manifest is written last, so a folder that has one is complete. Its last key is its own checksum. Imports no torch.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import xxhash

from titanplans.errors import ConfigError
from titanplans.text import show

MANIFEST = "titanplans.json"
_FORMAT = 2
_BLOCK = 2**22
_NAME = re.compile(r"step-([0-9]+)")


@dataclass(frozen=True)
class Manifest:
    """The fields of a manifest, which are keys of the file."""

    step: int
    """Number of optimizer steps taken."""

    holds: Literal["training", "weights"]
    """"training": everything needed to resume; "weights": the weights only."""

    model: Mapping[str, Any]
    """The fields of the model's config that are compared with a job's (`match.compared_fields`)."""

    job: Mapping[str, Any]
    """The job's options by dotted key, with the values that TOML has."""

    files: Mapping[str, tuple[int, str]]
    """Size in bytes and checksum (XXH3, 128 bits, hexadecimal) of each file but the manifest."""

    plan: str | None = None
    """The source of the plan that split the model; None: no plan split it, or an earlier version of titanplans saved
    it."""

    @property
    def weights_only_reason(self) -> str:
        """Why training can't be resumed from a checkpoint of weights only, as a phrase that follows the checkpoint's
        name."""
        option = "last_save_model_only" if ".metadata" in self.files else "last_save_in_hf"
        return f"holds only the weights (checkpoint.{option}), so training can't be resumed from it"


def initial_weights_folder(job: Mapping[str, Any]) -> str | None:
    """Return the folder from which a job loaded its initial weights, given `Manifest.job`; None if it loaded none."""
    folder = job.get("checkpoint.initial_load_path")
    return folder or (job.get("model.hf_assets_path") if job.get("checkpoint.initial_load_in_hf") else None)


def chat_templates_of(job: Mapping[str, Any]) -> set[str | None]:
    """Return the Jinja files of a job's chat templates, given `Manifest.job`; None stands for the tokenizer's template."""
    training_chat = {key: job.get(f"training.chat.{key}") for key in ("enable", "chat_template")}
    chats = [source.get("chat", {}) for source in job.get("data.sources") or ()] or [training_chat]
    return {chat.get("chat_template") for chat in chats if chat.get("enable")}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint and sync it to the disk."""
    values: dict[str, Any] = {"format": _FORMAT, **asdict(manifest)}
    values["checksum"] = _checksum(values)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        ConfigError: the manifest is damaged, or has a later format.
    """
    path = checkpoint / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        checksum, format_ = values.pop("checksum"), values.pop("format")
        if format_ > _FORMAT:
            raise ConfigError(
                f"{path} has format {format_}, but this titanplans reads {_FORMAT}; update titanplans"
            )
        if checksum != _checksum({"format": format_, **values}):
            raise ValueError("its checksum differs")
        files = {name: tuple(entry) for name, entry in values.pop("files").items()}
        return Manifest(**values, files=files)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror})") from error
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({error})") from error


def damage(
    checkpoint: Path, rank: int = 0, ranks: int = 1, names: Collection[str] | None = None
) -> str | None:
    """Return a sentence about the first damaged file of a checkpoint; None if all are intact.

    Args:
        checkpoint: its folder.
        rank, ranks: check every `ranks`-th file, beginning with file `rank`. The manifest is always checked.
        names: check only these files; None: all.
    """
    try:
        manifest = read_manifest(checkpoint)
    except ConfigError as error:
        return str(error)
    if (match := _NAME.fullmatch(checkpoint.name)) and int(match[1]) != manifest.step:
        return f"{checkpoint} holds step {manifest.step}, so the folder has been renamed"
    files = manifest.files
    for name in [name for name in files if names is None or name in names][rank::ranks]:
        path, (size, checksum) = checkpoint / name, files[name]
        try:
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size:,} bytes, but {size:,} were written"
            if file_checksum(path) != checksum:
                return f"{path} is damaged: its checksum differs from the recorded one"
        except OSError as error:
            return f"{path} can't be read ({error.strerror})"
    return None


def file_checksum(path: Path) -> str:
    """Return the checksum of a file in the form of `Manifest.files`."""
    checksum = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
    return checksum.hexdigest()


def describe_changes(
    saved: Mapping[str, Any], current: Mapping[str, Any], ignored: Collection[str] = ()
) -> str:
    """Describe the first five keys whose values differ: "lr = 0.1, now 0.2"; return "" if there are none.

    A key in a nested config is shown with the name of that config, as in "text_config.hidden_size". `ignored` lists keys
    without this prefix.
    """
    changes = [
        f"{key} = {', now '.join('unset' if value is None else show(value) for value in values)}"
        for key, *values in _changed_values(saved, current, ignored)
    ]
    more = f" and {len(changes) - 5} more keys" if len(changes) > 5 else ""
    return "; ".join(changes[:5]) + more


def _changed_values(
    saved: Mapping[str, Any], current: Mapping[str, Any], ignored: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*saved, *current} - {*ignored}):
        before, now = saved.get(key), current.get(key)
        if is_config(before, key) and is_config(now, key):
            for name, *values in _changed_values(before, now, ignored):
                yield f"{key}.{name}", *values
        elif before != now:
            yield key, before, now


def is_config(value: Any, key: str) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a field of a model's config is itself a config, such as text_config."""
    return isinstance(value, Mapping) and key.endswith("_config")


def _checksum(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()
