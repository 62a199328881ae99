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
# The fields of an entry that say where Diffusers loads the component from.
_SOURCE = "pretrained_model_name_or_path"
_REVISION = "revision"


def find_index_file(folder: Path) -> Path | None:
    """The index of the pipeline in this folder: `model_index.json` if there are both. None if there is no pipeline."""
    return next((folder / name for name in INDEX_FILES if (folder / name).is_file()), None)


def copy_index(base: Path, output_folder: Path, changes: Mapping[str, Any]) -> None:
    """Write the index of the pipeline folder `base` to another folder, with `changes` to its entries.

    A modular index would still load components from the base's repository. Its entries get no source, with which
    Diffusers loads the components of a local folder.
    """
    source = find_index_file(base) or base / INDEX_FILE
    index = {**read_json(source), **changes}
    write_json(output_folder / source.name, set_component_source(index, None))


def set_component_source(index: Mapping[str, Any], source: str | None) -> dict[str, Any]:
    """A copy of an index whose modular entries are loaded from `source`, the name of a repository on the Hub."""
    return {name: _set_entry_source(value, source) for name, value in index.items()}


def _set_entry_source(value: Any, source: str | None) -> Any:
    # A modular entry is [library, class, fields]; a stock one is [library, class].
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[2], dict):
        return value
    return [*value[:2], {**value[2], _SOURCE: source, _REVISION: None}]
