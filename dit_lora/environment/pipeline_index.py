"""The index file of a pipeline's folder, which names the pipeline's class and its components.

Diffusers has two: `model_index.json` of a `DiffusionPipeline`, and `modular_model_index.json` of a `ModularPipeline`,
whose entries also say from which folder or repository each component is loaded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dit_lora.files import read_json, write_json

INDEX_FILE = "model_index.json"
MODULAR_INDEX_FILE = "modular_model_index.json"
INDEX_FILES = (INDEX_FILE, MODULAR_INDEX_FILE)


def find_index_file(folder: Path) -> Path | None:
    """The index of the pipeline in a folder: `model_index.json` if both exist, None without a pipeline."""
    return next((folder / name for name in INDEX_FILES if (folder / name).is_file()), None)


def copy_index(base: Path, output_folder: Path, changes: Mapping[str, Any]) -> None:
    """Write the index of the pipeline folder `base` to another folder, with `changes` to its entries.

    A modular index would still load components from the base's repository. Its entries get no source, with which
    Diffusers loads the components of a local folder.
    """
    # A missing index raises an error that names the usual file.
    source = find_index_file(base) or base / INDEX_FILE
    index = {**read_json(source), **changes}
    write_json(output_folder / source.name, set_component_source(index, None))


def set_component_source(index: Mapping[str, Any], source: str | None) -> dict[str, Any]:
    """A copy of an index whose modular entries are loaded from `source`, the name of a repository on the Hub."""
    changed_index = dict(index)
    for name, value in index.items():
        # A modular entry is [library, class, fields]; a stock one is [library, class], and options have other values.
        if isinstance(value, list) and len(value) == 3 and isinstance(value[2], dict):
            # The revision is one of the former source.
            changed_index[name] = [*value[:2], {**value[2], "pretrained_model_name_or_path": source, "revision": None}]
    return changed_index
