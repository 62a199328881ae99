"""Resolve a model or a result to a local folder. All downloads of them from the Hub happen here."""

from collections.abc import Sequence
from pathlib import Path

from dit_lora.config.recipe import ModelConfig, find_repo_id_problem
from dit_lora.config.remedies import HUB_PREFIX, describe_missing_model, get_hub_name, suggest_hub_prefix
from dit_lora.errors import DitLoraError
from dit_lora.files import require_regular_files


def resolve_model_folder(model: ModelConfig, patterns: Sequence[str]) -> Path:
    """The local folder of `model.path`. For a name on the Hub, files that match the patterns are downloaded first.

    Raises `DitLoraError` if the folder does not exist and the download fails.
    """
    # A local folder has priority over a repository of the same name.
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        require_regular_files(folder)
        return folder
    name = get_hub_name(model.path)
    if name is None:
        # A mistyped folder must never lead to a request to the Hub.
        raise DitLoraError(describe_missing_model(model.path))
    return _download_files(name, patterns, f"model.path: no local folder {model.path}", model.revision)


def resolve_result_folder(target: str | Path, patterns: Sequence[str]) -> Path:
    """The local path of a result: the target itself if it exists, else a folder with its files from the Hub.

    A target that does not exist and cannot be a repository is returned as it is. `patterns` are patterns of the files
    to download. Raises `DitLoraError` if the target looks like a mistyped folder, or if the repository has none of the
    files.
    """
    name, path = get_hub_name(str(target)), Path(target)
    if path.exists():
        return path
    if name is None and suggest_hub_prefix(str(target)):
        raise DitLoraError(f"no file or folder {target}{suggest_hub_prefix(str(target))}")
    problem = find_repo_id_problem(name) if name else None
    if problem and str(target).startswith(HUB_PREFIX):
        raise DitLoraError(f"{target}: {problem}")
    # The caller reports a missing path in its own words.
    if name is None or problem:
        return path
    folder = _download_files(name, patterns, f"no local file or folder {name}", None)
    # A download in which no file matches the patterns is no error for the Hub.
    if not any(any(folder.glob(pattern)) for pattern in patterns):
        raise DitLoraError(f"{name} on the Hub has none of {', '.join(patterns)}")
    return folder


def _download_files(name: str, patterns: Sequence[str], missing_message: str, revision: str | None) -> Path:
    """Download files of a repository and return their folder. `missing_message` begins the line of an error."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Files in the local cache are not downloaded again.
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        remedy = _describe_remedy(name, error)
        raise DitLoraError(f"{missing_message}, and it cannot be downloaded: {remedy}") from error


def _describe_remedy(name: str, error: Exception) -> str:
    """Message for an error of the Hub: what it means and the next command to type, or the error's own text."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{name}"
    if isinstance(error, GatedRepoError):
        return f"access is gated; accept its terms at {page}, then run: hf auth login"
    if isinstance(error, RevisionNotFoundError):
        return f"the revision does not exist; model.revision must be a branch, tag or commit of {page}"
    if isinstance(error, RepositoryNotFoundError):
        return f"{page} does not exist or is private; correct the name, or run: hf auth login"
    # Checked before the general error below: offline, every missing file raises that one.
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set; download it once: HF_HUB_OFFLINE=0 hf download {name}"
    if isinstance(error, LocalEntryNotFoundError):
        return f"the Hub cannot be reached; check the connection, or try: hf download {name}"
    # The first line: the Hub's errors have details of the request after it.
    return str(error).strip().splitlines()[0]
