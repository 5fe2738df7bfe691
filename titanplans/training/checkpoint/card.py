"""The card of a checkpoint, `titanplans.json` in its folder: its content, its job, and every file's checksum.

It is written last, so a folder with a card is whole; its last key is a checksum of itself. Needs no torch.
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

CARD = "titanplans.json"
_FORMAT = 1
_BLOCK = 2**22
_NAME = re.compile(r"step-([0-9]+)")


@dataclass(frozen=True)
class Card:
    """The card's content."""

    step: int
    """Steps taken."""

    holds: Literal["training", "weights"]
    """All that training goes on from, or the weights alone."""

    model: Mapping[str, Any]
    """The model's config, but for what changes no weight (`titanplans.training.job.checks`)."""

    job: Mapping[str, Any]
    """The job's values by dotted key, as TOML has them."""

    files: Mapping[str, tuple[int, str]]
    """Bytes and checksum (XXH3, 128 bits, hexadecimal) of each file, the card aside."""

    @property
    def weights_alone(self) -> str:
        """Say of a checkpoint with the weights alone what it holds, and which option made it so."""
        option = "last_save_model_only" if ".metadata" in self.files else "last_save_in_hf"
        return f"holds the weights alone (checkpoint.{option}), so training can't be resumed from it"


def base_of(job: Mapping[str, Any]) -> str | None:
    """Return the folder whose weights a job started from, by its values on a card; None if it drew them."""
    named = job.get("checkpoint.initial_load_path")
    return named or (job.get("model.hf_assets_path") if job.get("checkpoint.initial_load_in_hf") else None)


def chat_templates_of(job: Mapping[str, Any]) -> set[str | None]:
    """Return the Jinja files by which a job wrote conversations, by its values on a card; None is the tokenizer's own."""
    of_training = {key: job.get(f"training.chat.{key}") for key in ("enable", "chat_template")}
    chats = [source.get("chat", {}) for source in job.get("data.sources") or ()] or [of_training]
    return {chat.get("chat_template") for chat in chats if chat.get("enable")}


def write_card(folder: Path, card: Card) -> None:
    """Write the card, and bring it to the disk."""
    values: dict[str, Any] = {"format": _FORMAT, **asdict(card)}
    values["checksum"] = _checksum(values)
    with (folder / CARD).open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_card(checkpoint: Path) -> Card:
    """Return the card of a checkpoint.

    Raises:
        ConfigError: it is damaged, or of a later format.
    """
    path = checkpoint / CARD
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
        return Card(**values, files=files)
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

    Each of several ranks reads the card, and a part of the other files; or only those of `names` are read.
    """
    try:
        card = read_card(checkpoint)
    except ConfigError as error:
        return str(error)
    if (named := _NAME.fullmatch(checkpoint.name)) and int(named[1]) != card.step:
        return f"{checkpoint} holds step {card.step}; it has been renamed"
    files = card.files
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
    """Return the checksum of a file as a card has it."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def changes(theirs: Mapping[str, Any], ours: Mapping[str, Any], but: Collection[str] = ()) -> str:
    """Return the first five keys `but` these with another value, in words; "" if there are none."""
    differing = [
        f"{key} = {', now '.join('unset' if value is None else show(value) for value in values)}"
        for key, *values in _differing(theirs, ours, but)
    ]
    more = f" and {len(differing) - 5} more keys" if len(differing) > 5 else ""
    return "; ".join(differing[:5]) + more


def _differing(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], but: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key with another value, and both values; keys of a config in a config are dotted."""
    for key in sorted({*theirs, *ours} - {*but}):
        before, now = theirs.get(key), ours.get(key)
        if is_config(before, key) and is_config(now, key):
            for name, then, since in _differing(before, now, but):
                yield f"{key}.{name}", then, since
        elif before != now:
            yield key, before, now


def is_config(value: Any, key: str) -> TypeGuard[Mapping[str, Any]]:
    """Whether the value of a model's key is the config of a part of it."""
    return isinstance(value, Mapping) and key.endswith("_config")


def _checksum(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()
