"""The Hugging Face Hub: `local_folder` finds or downloads a model, `push` uploads a folder. Imports no torch."""

import glob
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from titanplans.errors import ConfigError, RunError

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt", "preprocessor_config.json",
    "processor_config.json", "generation_config.json",
)  # fmt: skip
"""The files of a tokenizer, and generation_config.json."""
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
"""The files of a chat template, which may also be in tokenizer_config.json."""
MODEL_CARD = "README.md"
"""The file that the Hub shows as the model's card."""
_SINGLE, _INDEX = constants.SAFETENSORS_SINGLE_FILE, constants.SAFETENSORS_INDEX_FILE
_ERRORS = (OSError, httpx.HTTPError)
"""Errors that huggingface_hub raises if the Hub refuses a request, or can't be reached."""

_log = logging.getLogger(__name__)


class Repository(NamedTuple):
    """A model of the Hub at a revision: "owner/name", or "owner/name@revision"."""

    name: str
    revision: str | None = None
    """A branch, a tag or a commit; None: the newest commit."""

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def has_commit(self) -> bool:
        """Whether the revision is a full commit hash, whose files never change."""
        return self.revision is not None and re.fullmatch("[0-9a-f]{40}", self.revision) is not None


def repository_of(path: str) -> Repository | None:
    """Return the repository that `path` names; None if `path` exists locally, or is not of the form
    "owner/name[@revision]"."""
    name, at, revision = path.partition("@")
    # A name that ends in .json or .toml means a file that does not exist.
    if (
        os.path.exists(path)
        or name.count("/") != 1
        or name.endswith((".json", ".toml"))
        or (at and not revision)
    ):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return Repository(name, revision or None)


def local_folder(path: str, what: str, required: Sequence[str] = (CONFIG,), *, weights: bool = False) -> str:
    """Return the local folder of a model: `path` itself, or the folder of the cache with the files of the repository.

    Files that are not in the cache are downloaded (`download`). If `path` has a commit and all files are in the cache, the
    Hub is not asked.

    Args:
        path: a local path, which is returned, or "owner/name[@revision]".
        what, required, weights: arguments of `download`.

    Raises:
        ConfigError: like `download`.
    """
    if (repository := repository_of(path)) is None:
        return path
    if repository.has_commit:
        folder = _cached_folder(repository, required[0])
        if folder is not None and _first_missing(folder, required, weights) is None:
            return str(folder)
    return str(download(repository, what, required, weights=weights))


def download(repository: Repository, what: str, required: Sequence[str], *, weights: bool) -> Path:
    """Download the files of a model that the cache of huggingface_hub lacks; return their folder, named by the commit.

    The files are config.json, generation_config.json, and the files of the tokenizer and its chat template. If the Hub
    can't be reached, the files in the cache are used, and the log says so.

    Args:
        repository: the repository, and its revision.
        what: the beginning of an error's message, which names the repository.
        required: names of files that have to exist; at least one.
        weights: whether the weights are needed, too: model.safetensors, or the index and the files that it names.

    Raises:
        ConfigError: the repository, its revision or a required file does not exist; it is gated, or the Hub refuses it; or
            the Hub can't be reached, and the cache lacks a required file.
    """
    name, revision = repository
    try:
        info = HfApi().model_info(name, revision=revision)
    except _ERRORS as error:
        if not _is_unreachable(error):
            raise ConfigError(f"{what}: {_refusal(error, repository)}") from error
        reason = "HF_HUB_OFFLINE is set" if isinstance(error, OfflineModeIsEnabled) else _first_line(error)
        folder = _cached_folder(repository, required[0])
        missing = required[0] if folder is None else _first_missing(folder, required, weights)
        if folder is None or missing is not None:
            raise ConfigError(
                f"{what}: the Hub can't be reached ({reason}), and {missing} of this repository is not in the cache "
                f"{constants.HF_HUB_CACHE}; start the job once on a machine that can reach it, or copy its cache"
            ) from error
        level = logging.INFO if isinstance(error, OfflineModeIsEnabled) else logging.WARNING
        _log.log(level, f"{what}: the Hub can't be reached ({reason}): the files of {folder} are used")
        return folder
    available = {file.rfilename for file in info.siblings or ()}
    files = [file for file in (CONFIG, *TOKENIZER_FILES, *TEMPLATE_FILES) if file in available]
    if weights:
        files.append(_INDEX if _INDEX in available else _SINGLE)
    for file in (*required, *files[-1:]):
        if file not in available:
            reason = f"has no {file} at commit {info.sha}"
            if file == _SINGLE:
                reason += f", and no {_INDEX}; weights in other formats, such as pickles, are not read"
            raise ConfigError(
                f"{what}: the repository {reason}; name a repository that has it, or a local folder"
            )
    folder = _cached_folder(repository, files[0])
    if folder is not None and folder.name == info.sha and _first_missing(folder, files, weights) is None:
        return folder
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=files))
        if weights and (shards := [*_shards(folder)]):
            snapshot_download(
                name, revision=folder.name, allow_patterns=[glob.escape(file) for file in shards]
            )
    except _ERRORS as error:
        raise ConfigError(f"{what}: {_refusal(error, repository)}") from error
    return folder


def _cached_folder(repository: Repository, file: str) -> Path | None:
    """Return the folder of the cache that holds a revision, if it has `file`."""
    path = try_to_load_from_cache(repository.name, file, revision=repository.revision)
    return Path(path).parent if isinstance(path, str) else None


def _first_missing(folder: Path, required: Sequence[str], weights: bool) -> str | None:
    """Return the first file that a folder of the cache lacks; None if it has all of them."""
    files = [*required]
    if weights:
        files += _shards(folder) if (folder / _INDEX).is_file() else [_SINGLE]
    return next((file for file in files if not (folder / file).is_file()), None)


def _shards(folder: Path) -> Iterator[str]:
    """Yield the names of the files in the index of a folder; none without an index, or if it is damaged."""
    # `titanplans.weights.folder` reads the index again, and raises for each fault in it.
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        yield from dict.fromkeys(map(str, index["weight_map"].values()))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return


def _is_unreachable(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429  # too many requests
    return isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError | httpx.TransportError)


def _refusal(error: Exception, repository: Repository) -> str:
    """Return why a repository can't be downloaded, and what would work."""
    login = "run hf auth login (or set HF_TOKEN)"
    if isinstance(error, GatedRepoError):
        page = f"{constants.ENDPOINT}/{repository.name}"
        return f"the repository is gated; accept its conditions at {page}, and {login}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no such folder, and no such repository on the Hub; correct the name, or, if it is private, {login}"
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision {repository.revision!r}; write a branch, a tag or a commit after @"
    if _is_unreachable(error):
        reason = _first_line(error.__cause__ or error)
        return f"the connection to the Hub failed ({reason}); start again: files that are complete are kept"
    remedy = f"remove the cause, or run hf download {repository.name}"
    return f"it can't be downloaded ({_first_line(error)}); {remedy}"


def check_access(repository: str) -> None:
    """Check that `repository` is a possible name, and that the Hub accepts this machine's token.

    Raises:
        ConfigError: the name is not possible, there is no token, the Hub refuses the token, or the Hub can't be reached.
    """
    what = f"--push-to-hub {repository}"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{what}: {_first_line(error)}") from error
    if repository.count("/") != 1:
        raise ConfigError(f"{what}: a repository belongs to a user or an organisation; write owner/name")
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            f"{what} needs a token with write access: run hf auth login, or set HF_TOKEN"
        ) from error
    except _ERRORS as error:
        raise ConfigError(
            f"{what}: the Hub refuses the token, or can't be reached ({_first_line(error)})"
        ) from error


def push(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Upload a folder as one commit of a repository, which is created if it does not exist; return the commit's address.

    The commit deletes weight files that the folder lacks, so that no old files stay if the new model has fewer files. A
    model card that the repository has is kept.

    Args:
        folder: the folder whose files are uploaded.
        repository: "owner/name".
        private: whether a new repository is private. An existing one is not changed.
        message: the commit message.

    Raises:
        RunError: the Hub refuses the upload, or can't be reached. The folder is kept.
    """
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        has_card = MODEL_CARD in api.list_repo_files(repository)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=message,
            ignore_patterns=[MODEL_CARD] if has_card else None,
            delete_patterns=["*.safetensors", "*.safetensors.index.json"],
        )
    except _ERRORS as error:
        raise RunError(
            f"{folder} is written, but not pushed to {repository} ({_first_line(error)}); "
            f"hf upload {repository} {folder} pushes it"
        ) from error
    return f"{commit.commit_url}{' (its model card is kept)' if has_card else ''}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
