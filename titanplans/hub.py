"""Push a folder to the Hugging Face Hub: `check_access` before the folder is written, then `push`. Imports no torch."""

from pathlib import Path

import httpx
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from titanplans.errors import ConfigError, RunError

MODEL_CARD = "README.md"
"""The file that the Hub shows as the model's card."""
_ERRORS = (OSError, httpx.HTTPError)
"""What huggingface_hub raises if the Hub refuses a request, or can't be reached."""


def check_access(repository: str) -> None:
    """Check that `repository` is a possible name, and that the Hub accepts this machine's token.

    Raises:
        ConfigError: it is not, there is no token, or the Hub refuses it or can't be reached.
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

    Weights that the repository has and the folder lacks are deleted in the commit, so that a model in fewer files leaves no
    old ones. A model card that the repository has is kept.

    Args:
        folder: the folder whose files are uploaded.
        repository: "owner/name".
        private: whether a new repository is private. An existing one is not changed.
        message: the commit message.

    Raises:
        RunError: the Hub refuses it, or can't be reached. The folder is kept.
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


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
