"""Tells names on the Hub from local paths, and says what to type if something is not where it was looked for."""

import difflib
import re
from pathlib import Path

from dit_lora.config.catalog import recipe_names

HUB = "hub:"
"""The prefix of OWNER/NAME: it is on the Hub, whatever it looks like."""
# What folders of clips, models and runs are called; accounts on the Hub that are called so belong to somebody.
_FOLDERS = re.compile(
    r"(adapter|archive|audio|base|cache|checkpoint|ckpt|clip|config|data|dataset|demo|doc|download|eval|example|exp|"
    r"experiment|export|file|folder|frame|gif|home|image|img|input|local|log|lora|media|merged|mine|mnt|model|movie|"
    r"my|notebook|opt|out|output|path|photo|picture|pretrained|prior|project|quantized|raw|recipe|result|root|run|"
    r"sample|save|saved|scratch|script|shard|src|tar|temp|test|tiny|tmp|train|training|val|validation|var|vid|video|"
    r"weight|work|workspace)s?",
    re.IGNORECASE,
)
_FILE = re.compile(
    r".*\.(avi|bin|ckpt|csv|gif|jpe?g|jsonl?|mkv|mov|mp4|npz|parquet|png|pth?|safetensors|tar|tsv|txt|webm|webp|"
    r"ya?ml|zip)",
    re.IGNORECASE,
)


def hub_name(path: str) -> str | None:
    """Return the OWNER/NAME on the Hub that a text means; None where it is, or looks like, a place on this machine.

    The one rule for models, data and adapters: what is here comes first, and a mistyped folder is asked of nobody.
    """
    if path.startswith(HUB):
        return path.removeprefix(HUB)
    return None if looks_local(path) or Path(path).expanduser().exists() else path


def looks_local(path: str) -> bool:
    """Return whether a path that is not there is no id of the Hub's, or reads as a folder that somebody mistyped.

    That is one whose first part is here, or is called as folders are; `hub:` before it says otherwise.
    """
    if path.startswith(HUB):
        return False
    first, slash, last = path.partition("/")
    if not slash or not last or "/" in last or "\\" in path or first.startswith((".", "~")):
        return True
    return bool(_FOLDERS.fullmatch(first) or _FILE.fullmatch(last)) or Path(first).is_dir()


def hub_hint(path: str) -> str:
    """Return what to add to the error about a folder that is not there, where its name could be one of the Hub's."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(".")
    return f"; if you mean the Hub's, write {HUB}{path}" if is_name else ""


def recipe_remedy(path: Path) -> str:
    """Return where a recipe that is not there may be: beside it, or among those that come with dit-lora."""
    beside = {near.stem: near for near in path.parent.glob("*.yaml")}
    close = difflib.get_close_matches(path.stem, beside, n=1)
    if close:
        return f"did you mean {beside[close[0]]}?"
    name = path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    if name in recipe_names():
        return f"write it into a folder of your own: dit-lora init {name} my-run"
    return "dit-lora recipes lists what dit-lora init can write"
