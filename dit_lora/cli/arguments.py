"""The arguments that verbs share, and what shells complete for them (from names and files only)."""

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from dit_lora.config.catalog import find_packaged_files_root, list_accelerate_configs, list_recipe_names
from dit_lora.errors import DitLoraError
from dit_lora.families import FAMILIES, get_families
from dit_lora.files import read_json


def complete_recipes(incomplete: str) -> list[str]:
    """Shell completion for `init`: names of recipes, and of families, which stand for their default recipe."""
    return _filter_by_prefix([*FAMILIES, *list_recipe_names()], incomplete)


def complete_families(incomplete: str) -> list[str]:
    """Names of the families with recipes."""
    return _filter_by_prefix(FAMILIES, incomplete)


def complete_launch_config_names(incomplete: str) -> list[str]:
    """Names of the Accelerate configs."""
    return _filter_by_prefix(list_accelerate_configs(), incomplete)


def complete_tiny_names(incomplete: str) -> list[str]:
    """Names of the tiny checkpoints, random and trained, and `shapes`."""
    names = [name for family in get_families().values() for name in family.tiny_variants]
    return _filter_by_prefix([*names, "moving-shapes", "shapes"], incomplete)


def complete_scene_shapes(incomplete: str) -> list[str]:
    """Names of the shapes in the world of `moving-shapes`."""
    # Imports torch, which completion of other words does not need.
    from dit_lora.data.synthetic.scenes import SHAPES

    return _filter_by_prefix([*SHAPES, "known"], incomplete)


def complete_recipe_files(incomplete: str) -> list[str]:
    """YAML files and folders. A folder that is the only choice is entered."""
    entries = _list_entries(incomplete)
    # Follow folders that are the only choice, down to the first with several entries.
    while len(entries) == 1 and entries[0].endswith("/"):
        entries = _list_entries(entries[0])
    return entries


def complete_overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """Recipe keys, as `key.path=`. A key that is the only choice also lists its values or its default."""
    if (ctx.params.get("overrides") or [""])[-1] == "=":
        return []  # bash splits key=value into three words: complete the value as a file
    # The schema file has all keys, without an import of the recipe's classes.
    schema = read_json(find_packaged_files_root() / "recipes" / "schema.json")
    keys = dict(_iterate_keys(schema, schema, ""))
    matching = _filter_by_prefix([f"{key}=" for key in keys], incomplete)
    if len(matching) == 1:  # after a single choice bash would add a space
        matching += [f"{matching[0]}{value}" for value in keys[matching[0][:-1]]]
    return matching


RecipeFile = Annotated[str, typer.Argument(help="A recipe file (.yaml).", autocompletion=complete_recipe_files)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Changes of the recipe, such as train.steps=500.", show_default=False, autocompletion=complete_overrides
    ),
]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a run.")]
NewFolder = Annotated[Path, typer.Argument(help="Folder to create. It must not exist yet.")]
BaseModel = Annotated[str | None, typer.Option(help="Base checkpoint. Default: the one it was trained on.")]
Port = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of the server. Default: any free port.", show_default=False)
]
ChatModel = Annotated[Path, typer.Argument(help="Folder of a run, an adapter or a checkpoint.")]


def make_folder(folder: Path) -> None:
    """Create the folder that a verb fills. Raises `DitLoraError` if it exists or cannot be created."""
    try:
        # Fails if the folder exists, even if it is empty.
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise DitLoraError(f"{folder} already exists; choose another folder, or remove it") from error
    except OSError as error:
        raise DitLoraError(f"cannot create {folder}: {error.strerror}") from error


def require_studio() -> None:
    """Raise `DitLoraError` if a package of the studio is not installed."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise DitLoraError(f"the studio needs {' and '.join(missing)}; pip install 'dit-lora[studio]'")


def _filter_by_prefix(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _list_entries(incomplete: str) -> list[str]:
    # The folder that is typed completely, and the beginning of a name in it.
    folder, slash, start = incomplete.rpartition("/")
    entries = []
    # Folders get a slash, so that the completion can go on inside them.
    for path in sorted(Path(folder + slash or ".").glob(f"{start}*")):
        if path.is_dir() and not path.name.startswith((".", "__")):
            entries.append(f"{folder}{slash}{path.name}/")
        elif path.suffix in (".yaml", ".yml"):
            entries.append(f"{folder}{slash}{path.name}")
    return entries


def _iterate_keys(
    schema: Mapping[str, Any], section: Mapping[str, Any], parent: str
) -> Iterator[tuple[str, list[str]]]:
    """Yield every recipe key that holds a value, with the values that the JSON schema names."""
    for name, entry in section["properties"].items():
        # An optional key is a choice between its type and null.
        options = [entry, *entry.get("anyOf", [])]
        # A reference such as #/$defs/TrainConfig: the key is a section.
        inner = [option["$ref"].split("/")[-1] for option in options if "$ref" in option]
        for definition in inner:
            yield from _iterate_keys(schema, schema["$defs"][definition], f"{parent}{name}.")
        if not inner:
            yield f"{parent}{name}", _list_values(options)


def _list_values(options: list[dict[str, Any]]) -> list[str]:
    named = [value for option in options for value in option.get("enum", [])]
    # JSON Schema has no list of values for booleans.
    if any(option.get("type") == "boolean" for option in options):
        named += [True, False]
    # A key without named values is completed with its default.
    named = named or [options[0]["default"]] if "default" in options[0] else named
    return [value if isinstance(value, str) else json.dumps(value) for value in named]
