"""Give a model or a result as a local folder: the one place that downloads them from the Hub."""

from collections.abc import Sequence
from pathlib import Path

from dit_lora.config.recipe import ModelConfig, repo_id_problem
from dit_lora.config.remedies import HUB, hub_hint, hub_name
from dit_lora.errors import DitLoraError
from dit_lora.files import require_regular


def model_folder(model: ModelConfig, files: Sequence[str]) -> Path:
    """Return the folder of `model.path`; if it is a name on the Hub, the files of these patterns are fetched first.

    Raises `DitLoraError` if the folder is neither here nor to be had.
    """
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        require_regular(folder)
        return folder
    name = hub_name(model.path)
    if name is None:
        raise DitLoraError(_missing_folder(model.path))
    return _downloaded(name, files, f"model.path: no local folder {model.path}", model.revision)


def result_folder(target: str | Path, files: Sequence[str]) -> Path:
    """Return the target if it is here or can be no repository, else a folder with its files from the Hub.

    `files` are patterns of what is wanted. Raises `DitLoraError` for what looks like a mistyped folder, and if the
    Hub does not give any of the files.
    """
    name, path = hub_name(str(target)), Path(target)
    if path.exists():
        return path
    if name is None and hub_hint(str(target)):
        raise DitLoraError(f"no file or folder {target}{hub_hint(str(target))}")
    problem = repo_id_problem(name) if name else None
    if problem and str(target).startswith(HUB):
        raise DitLoraError(f"{target}: {problem}")
    if name is None or problem:
        return path
    folder = _downloaded(name, files, f"no local file or folder {name}", None)
    if not any(any(folder.glob(pattern)) for pattern in files):
        raise DitLoraError(f"{name} on the Hub has none of {', '.join(files)}")
    return folder


def _downloaded(name: str, files: Sequence[str], missing: str, revision: str | None) -> Path:
    """Return the folder of a repository's files; an error is one line that begins with `missing`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        remedy = _remedy(name, error)
        raise DitLoraError(f"{missing}, and the Hub did not give it: {remedy}") from error


def _remedy(name: str, error: Exception) -> str:
    """Return what the Hub's answer means, and the next command; its own words where it is none of the common ones."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{name}"
    if isinstance(error, GatedRepoError):
        return f"it is gated: accept its terms at {page}, then type: hf auth login"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no such revision; model.revision is a branch, tag or commit of {page}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no {page}, or it is private: correct the name, or type: hf auth login"
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set; download it once: HF_HUB_OFFLINE=0 hf download {name}"
    if isinstance(error, LocalEntryNotFoundError):
        return f"it was not reached; check the connection, or try: hf download {name}"
    return str(error).strip().splitlines()[0]


def _missing_folder(path: str) -> str:
    """Return what to type where a checkpoint can be on this machine alone and is not."""
    place = Path(path)
    if place.parent.name == "tiny":
        return f"model.path: no folder {path}; build it: dit-lora tiny {place.name} {path}"
    return f"model.path: no folder {path}; give a Diffusers checkpoint folder or a Hub id{hub_hint(path)}"
