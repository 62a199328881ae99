"""Results that were pushed to the Hub, as local folders."""

from collections.abc import Sequence
from pathlib import Path

from dit_lora.config import repo_id_problem
from dit_lora.errors import DitLoraError
from dit_lora.remedies import HUB, hub_hint, hub_name


def fetched(target: str | Path, files: Sequence[str]) -> Path:
    """Return the target if it is there or can be no repository, else a folder with its files from the Hub.

    `files` are patterns of what is wanted. Raises `DitLoraError` for what looks like a mistyped folder, and
    if the Hub does not give any of the files.
    """
    name, path = hub_name(str(target)), Path(target)
    # What is here goes before a repository of the same name.
    if path.exists():
        return path
    if name is None and hub_hint(str(target)):
        raise DitLoraError(f"no file or folder {target}{hub_hint(str(target))}")
    problem = repo_id_problem(name) if name else None
    # With the Hub's prefix it is no folder, so a bad name is an error.
    if problem and str(target).startswith(HUB):
        raise DitLoraError(f"{target}: {problem}")
    if name is None or problem:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(files)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DitLoraError(
            f"no local file or folder {name}, and the Hub did not give it: {reason}"
        ) from error
    if not any(any(folder.glob(pattern)) for pattern in files):
        raise DitLoraError(f"{name} on the Hub has none of {', '.join(files)}")
    return folder
