"""Tell names on the Hub from local paths, and suggest what to type if a path does not exist."""

import difflib
import re
from pathlib import Path

from dit_lora.config.catalog import list_recipe_names

HUB_PREFIX = "hub:"
"""Prefix that marks OWNER/NAME as a name on the Hub, even if it looks like a path."""
# Usual names of local folders. Accounts with such names exist on the Hub, and a mistyped path must not reach them.
_FOLDER_NAME = re.compile(
    r"(adapter|archive|audio|base|cache|checkpoint|ckpt|clip|config|data|dataset|demo|doc|download|eval|example|exp|"
    r"experiment|export|file|folder|frame|gif|home|image|img|input|local|log|lora|media|merged|mine|mnt|model|movie|"
    r"my|notebook|opt|out|output|path|photo|picture|pretrained|prior|project|quantized|raw|recipe|result|root|run|"
    r"sample|save|saved|scratch|script|shard|src|tar|temp|test|tiny|tmp|train|training|val|validation|var|vid|video|"
    r"weight|work|workspace)s?",
    re.IGNORECASE,
)
# A repository's name does not end with a file extension.
_FILE_NAME = re.compile(
    r".*\.(avi|bin|ckpt|csv|gif|jpe?g|jsonl?|mkv|mov|mp4|npz|parquet|png|pth?|safetensors|tar|tsv|txt|webm|webp|"
    r"ya?ml|zip)",
    re.IGNORECASE,
)


def get_hub_name(path: str) -> str | None:
    """The OWNER/NAME on the Hub that a text stands for; None if it exists locally or looks like a local path.

    Models, data and adapters all use this rule: existing paths come first, and a mistyped folder is never requested
    from the Hub.
    """
    if path.startswith(HUB_PREFIX):
        return path.removeprefix(HUB_PREFIX)
    # An existing path always wins over a name on the Hub.
    return None if is_likely_local(path) or Path(path).expanduser().exists() else path


def is_likely_local(path: str) -> bool:
    """True if a path that does not exist cannot be a Hub id, or looks like a mistyped local folder.

    The latter is so if its first part exists here or is a usual folder name. False with the prefix `hub:`.
    """
    if path.startswith(HUB_PREFIX):
        return False
    # A Hub id has exactly one slash, and no part that only a path has.
    owner, slash, name = path.partition("/")
    if not slash or not name or "/" in name or "\\" in path or owner.startswith((".", "~")):
        return True
    return bool(_FOLDER_NAME.fullmatch(owner) or _FILE_NAME.fullmatch(name)) or Path(owner).is_dir()


def suggest_hub_prefix(path: str) -> str:
    """A hint for the error about a missing folder if its name could be one on the Hub; else empty."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(".")
    return f"; for the repository on the Hub, write {HUB_PREFIX}{path}" if is_name else ""


def describe_missing_model(path: str) -> str:
    """Message for a `model.path` that is not a folder, and not a name on the Hub."""
    if Path(path).expanduser().exists():
        return f"model.path: {path} is a file; give the folder of a Diffusers checkpoint"
    remedy = f"give the folder of a Diffusers checkpoint, or a Hub id{suggest_hub_prefix(path)}"
    # The recipes for tests refer to such folders, which `dit-lora tiny` writes.
    if Path(path).parent.name == "tiny":
        remedy = f"create it with dit-lora tiny {Path(path).name} {path}"
    return f"model.path: {path} does not exist; {remedy}"


def describe_missing_clips(path: str) -> str:
    """Message for a `data.path` that is not a folder, if the data is not a .tar or a dataset."""
    if Path(path).expanduser().exists():
        return f"{path} is a file; give the folder of your clips, or a .tar file"
    return (
        f"the folder {path} does not exist; put your clips there, or set data.path to their "
        f"folder; for a first test: dit-lora tiny shapes {path}{suggest_hub_prefix(path)}"
    )


def describe_missing_conversations(path: str | Path) -> str:
    """Message for a `data.path` of a chat model that is not a file."""
    problem = "is a folder" if Path(path).expanduser().is_dir() else "does not exist"
    return f"{path} {problem}; give a .json or .jsonl file of conversations"


def suggest_recipe(path: Path) -> str:
    """Suggest a recipe for a path that does not exist: a similar file in its folder, or a packaged one."""
    # Compared without the suffix, which all of them share.
    siblings = {sibling.stem: sibling for sibling in path.parent.glob("*.yaml")}
    close = difflib.get_close_matches(path.stem, siblings, n=1)
    if close:
        return f"did you mean {siblings[close[0]]}?"
    name = path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    if name in list_recipe_names():
        return f"copy it to a folder: dit-lora init {name} my-run"
    return "see dit-lora recipes"
