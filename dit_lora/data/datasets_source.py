"""Images of a Hugging Face dataset, written once as PNG files that every layout's reader takes.

Needs the `datasets` package, which is no dependency of ours: `pip install 'dit-lora[datasets]'`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dit_lora.errors import DitLoraError

# What `save_to_disk` writes: a dataset, or one a split.
_SAVED = ("state.json", "dataset_dict.json")
_PNG_MODES = ("RGB", "RGBA", "L", "LA", "P")
_VERSION = 1  # raised when files would be written otherwise


def is_saved_dataset(root: Path) -> bool:
    return any((root / name).is_file() for name in _SAVED)


def is_hub_name(name: str) -> bool:
    """Whether a path that is no folder reads like `owner/dataset`."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/"))


def exported(path: str, captions: Sequence[str], cache: Path) -> Path:
    """A folder of PNG files and a metadata.jsonl, of the split `train` or the only one.

    `captions` are the columns that may hold the caption, the first one found is taken; a ClassLabel gives its
    class's name. Written aside and renamed, so that it is whole if it is there.
    """
    rows = _load(path)
    image, caption = _columns(path, rows, captions)
    # No public name: it changes with the files and with whatever was done to the dataset.
    facts = [_VERSION, rows._fingerprint, image, caption]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    out = cache / "datasets" / digest
    if not out.is_dir():
        _write(rows, image, caption, out)
    return out


def _load(path: str) -> Any:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DitLoraError(
            f"data.path: {path} is a dataset, and the datasets package is not installed; "
            "pip install 'dit-lora[datasets]'"
        ) from error
    root = Path(path).expanduser()
    try:
        found = datasets.load_from_disk(root) if root.is_dir() else datasets.load_dataset(path)
    except (DatasetsError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DitLoraError(
            f"data.path: no folder {path}, and as a dataset it cannot be read: {reason}"
            if not root.is_dir()
            else f"data.path: the dataset in {path} cannot be read: {reason}"
        ) from error
    if not isinstance(found, dict):
        return found
    splits = list(found)
    if "train" not in splits and len(splits) != 1:
        raise DitLoraError(
            f"data.path: {path} has the splits {', '.join(splits)}, none called train; save the one "
            "to train on with save_to_disk"
        )
    return found["train" if "train" in splits else splits[0]]


def _columns(path: str, rows: Any, captions: Sequence[str]) -> tuple[str, str]:
    from datasets import ClassLabel, Image, Value

    features = rows.features
    images = [name for name, feature in features.items() if isinstance(feature, Image)]
    labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    texts = [n for n, f in features.items() if isinstance(f, Value) and "string" in f.dtype]
    named = [name for name in captions if name in (*labels, *texts)]
    wanted = named or (labels if len(captions) > 1 else [])  # one alone is the recipe's own choice
    if not images or not wanted:
        what = "an image" if not images else f"text or classes among {', '.join(captions)}"
        columns = ", ".join(f"{name} ({type(f).__name__})" for name, f in features.items())
        raise DitLoraError(f"data.path: {path} has no column of {what}; it has {columns}")
    return images[0], wanted[0]


def _write(rows: Any, image: str, caption: str, out: Path) -> None:
    partial = out.with_name(f".{out.name}.{os.getpid()}")  # ranks may write at once
    partial.mkdir(parents=True)
    feature, lines = rows.features[caption], []
    try:
        for number, row in enumerate(rows):
            name, value = f"{number:08d}.png", row[caption]
            picture = row[image]
            # What is transparent stays so, for `read_frames` to put on white.
            kept = picture if picture.mode in _PNG_MODES else picture.convert("RGB")
            kept.save(partial / name)
            text = feature.int2str(value) if isinstance(value, int) else (value or "")
            lines.append(json.dumps({"file_name": name, "text": text}))
        (partial / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not out.is_dir():  # another rank's is as good
            raise DitLoraError(f"cannot write the dataset's images to {out}: {error}") from error
