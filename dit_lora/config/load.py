"""Read and write recipes: YAML, `key.path=value` overrides, and messages about unknown keys."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dit_lora.config.data import DataConfig, Layout
from dit_lora.config.recipe import Recipe
from dit_lora.config.remedies import suggest_recipe
from dit_lora.config.yaml_parsing import parse_yaml, read_yaml
from dit_lora.errors import DitLoraError, format_list
from dit_lora.terminal import make_one_line

_MAX_SHOWN_CHARACTERS = 200  # characters of a value in a message


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file, apply `key.path=value` overrides and validate it as a whole.

    Raises one `DitLoraError` that lists all unknown keys, missing keys and wrong types.
    """
    path = Path(path)
    try:
        values = read_yaml(path)
    except FileNotFoundError as error:
        raise DitLoraError(f"there is no recipe {path}; {suggest_recipe(path)}") from error
    except OSError as error:
        raise DitLoraError(f"cannot read the recipe {path}: {error.strerror}") from error
    if not isinstance(values, dict):
        raise DitLoraError(f"{path} must contain sections such as model: and data:; got {values!r}")
    # Before validation: an override may supply a key that the file lacks.
    for override in overrides:
        _apply_override(values, override)
    return parse_recipe(values, source=str(path))


def is_recipe(target: str) -> bool:
    """True if the argument is the name of a YAML file."""
    return Path(target).suffix in (".yaml", ".yml")


def parse_recipe(values: dict[str, Any], source: str) -> Recipe:
    """Validate plain values as a `Recipe`. `source` names them in the message of the `DitLoraError`."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise DitLoraError(format_list(f"{source}: correct these values", list(_iterate_problems(error)))) from error


def load_folder_config(path: str, overrides: Sequence[str] = ()) -> DataConfig:
    """The data section for a single folder, tar or dataset without a recipe. Its height and width are placeholders.

    `overrides` say where captions, references and masks are, for example `data.mask_folder=masks`. Raises
    `DitLoraError` for other keys, which need a recipe.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        _apply_override(values, override)
    allowed = [f"data.{name}" for name in Layout.model_fields]
    # Keys of other sections, and of `data` itself such as its height.
    refused = [key for key in (override.partition("=")[0] for override in overrides) if key not in allowed]
    if refused:
        raise DitLoraError(
            f"{', '.join(refused)}: needs a recipe (.yaml); of {path} itself, these can be given: {', '.join(allowed)}"
        )
    try:
        # Height and width are required fields, and are not used without a recipe.
        return DataConfig(**values.get("data", {}), path=path, height=1, width=1)
    except ValidationError as error:
        raise DitLoraError(format_list(f"{path}: correct these values", list(_iterate_problems(error)))) from error


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, which `load_recipe` reads back unchanged, without sections that its mode does not have."""
    # Plain lists and numbers, which YAML can represent; tuples would become Python tags.
    values = recipe.model_dump(mode="json")
    # Mode `full` has no adapter: leave out the sections that describe one.
    if recipe.train.mode == "full":
        del values["lora"], values["optim"]["groups"]["adapter"], values["optim"]["groups"]["adapter_b"]
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def build_recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors."""
    schema = Recipe.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for entry in section.get("properties", {}).values():
            _allow_single_text_in_schema(entry)
    return schema


def _allow_single_text_in_schema(entry: dict[str, Any]) -> None:
    """Change a key's JSON Schema so that a list of texts also takes a single one, as the recipe's sections do."""
    choices = entry.get("anyOf", [entry])
    items = [choice["items"] for choice in choices if choice.get("type") == "array" and "items" in choice]
    texts = [item for item in items if item.get("type") == "string"]
    if not texts or any(choice.get("type") == "string" for choice in choices):
        return
    if "anyOf" not in entry:
        # The title, default and description stay with the key.
        array = {name: entry.pop(name) for name in ("items", "type")}
        annotations = dict(entry)
        entry.clear()
        entry |= {"anyOf": [array], **annotations}
    entry["anyOf"].insert(1, texts[0])


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise DitLoraError(f"an override must be key.path=value, such as train.steps=20; got {override!r}")
    # Create missing sections on the way to the key.
    *parents, leaf = key.split(".")
    section = values
    for parent in parents:
        if not isinstance(section.get(parent), dict):
            section[parent] = {}  # absent, or null in the YAML
        section = section[parent]
    try:
        # Values are YAML too: `[a, b]` is a list, `null` is None.
        value = parse_yaml(text)
    except ValueError as error:
        excerpt = text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
        raise DitLoraError(f"the value of {key} is not valid YAML: {excerpt!r}: {error}") from error
    # Last in its section: of a key's old and new name, the later one counts.
    section.pop(leaf, None)
    section[leaf] = value


def _iterate_problems(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        # Keys come from the file, so they may contain control characters.
        name = ".".join(make_one_line(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            yield f"{name}: unknown key{_suggest_key(problem['loc'])}"
        elif problem["type"] == "missing":
            yield f"{name}: missing"
        else:
            # pydantic puts this prefix before the text of a ValueError.
            message = make_one_line(problem["msg"]).removeprefix("Value error, ")
            # Our own checks of a whole section name the values in their message.
            says_input = problem["type"] == "value_error" and isinstance(problem["input"], dict)
            message = message if says_input else f"{message}; got {problem['input']!r}"
            yield f"{name}: {message}" if name else message


def _suggest_key(location: tuple[int | str, ...]) -> str:
    """Suggest the same key in another section, else the most similar key in this one."""
    # Paths of all keys: a key in the wrong section is more likely than a typing error.
    key_paths = list(_iterate_key_paths(Recipe))
    parent = [str(part) for part in location[:-1]]
    siblings = [path[-1] for path in key_paths if path[:-1] == parent]
    elsewhere = [".".join(path) for path in key_paths if path[-1] == str(location[-1])]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    similar_keys = difflib.get_close_matches(str(location[-1]), siblings, n=1)
    if similar_keys:
        return f"; did you mean {'.'.join([*parent, similar_keys[0]])}?"
    return f"; the keys here are {', '.join(siblings)}"


def _iterate_key_paths(section: type[BaseModel], parent: tuple[str, ...] = ()) -> Iterator[list[str]]:
    for name, field in section.model_fields.items():
        yield [*parent, name]
        # A section may be optional: then its class is an argument of the union.
        for option in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from _iterate_key_paths(option, (*parent, name))
