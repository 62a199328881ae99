"""What to type when a model, a recipe or a folder of clips is not where it was looked for."""

import difflib
from pathlib import Path

from dit_lora.stock import recipe_names


def looks_local(path: str) -> bool:
    """Whether a checkpoint's path can be none of the Hub's ids, or is where the smoke recipes look for theirs."""
    there = Path(path).expanduser()
    return there.is_absolute() or path.startswith(".") or path.count("/") != 1 or _is_tiny(path)


def missing_folder(path: str) -> str:
    """Of a checkpoint that is looked for on this machine alone: what to type."""
    if _is_tiny(path):
        return f"model.path: no folder {path}; build it: dit-lora tiny {Path(path).name} {path}"
    return f"model.path: no folder {path}; give a Diffusers checkpoint folder or a Hub id"


def hub_remedy(path: str, error: Exception) -> str:
    """What the Hub's answer means, and the next command; its own words where it is none of the common ones."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{path}"
    if isinstance(error, GatedRepoError):
        return f"it is gated: accept its terms at {page}, then type: hf auth login"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no such revision; model.revision is a branch, tag or commit of {page}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no {page}, or it is private: correct the name, or type: hf auth login"
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set; download it once: HF_HUB_OFFLINE=0 hf download {path}"
    if isinstance(error, LocalEntryNotFoundError):
        return f"it was not reached; check the connection, or try: hf download {path}"
    return str(error).strip().splitlines()[0]


def recipe_remedy(path: Path) -> str:
    """Where a recipe that is not there may be: beside it, or among those that come with dit-lora."""
    beside = {near.stem: near for near in path.parent.glob("*.yaml")}
    close = difflib.get_close_matches(path.stem, beside, n=1)
    if close:
        return f"did you mean {beside[close[0]]}?"
    name = path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    if name in recipe_names():
        return f"write it into a folder of your own: dit-lora init {name} my-run"
    return "dit-lora recipes lists what dit-lora init can write"


def _is_tiny(path: str) -> bool:
    return Path(path).parent.name == "tiny"
