"""Pages made from the code when the site is built: every key of a recipe, every verb and option, all public names."""

import re
from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

import dit_lora
from dit_lora.cli.app import app
from dit_lora.config.load import build_recipe_schema

Schema = dict[str, Any]
_NUMBERS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "reference/recipe.md": recipe_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def recipe_page() -> str:
    """A table for each section of a recipe, in the order of the YAML."""
    schema = build_recipe_schema()
    lines = [
        "# Recipe reference",
        "",
        "Every key that a recipe may have, from the classes that read it. On the command line a key is written with "
        "dots:",
        "`train.steps=2000`. Unknown keys and wrong types are refused, all at once. `schema.json` beside the",
        "recipes is the same as JSON Schema, with which editors complete and check recipes.",
        "",
    ]
    for name, section in schema["properties"].items():
        required = name in schema["required"]
        lines += _section(name, section, schema["$defs"], 2, "" if required else "May be left out.")
    return "\n".join(lines)


def commands_page() -> str:
    """Typer's own documentation of the command, with links, and examples as code."""
    command = typer.main.get_command(app)
    context = command.make_context("dit-lora", ["recipes"], resilient_parsing=True)
    page = get_docs_for_click(obj=command, ctx=context, name="dit-lora")
    page = page.replace("# `dit-lora`", "# Command reference", 1)
    page = re.sub(r"^\* `([a-z]+)`: .*$", _linked(command), page, flags=re.MULTILINE)
    return re.sub(r"^(\S.*:)\n((?:  .*\n?)+)", _example, page, flags=re.MULTILINE)


def python_page() -> str:
    """The public names of `dit_lora`, for mkdocstrings to fill in."""
    lines = [
        "# Python reference",
        "",
        "What `import dit_lora` gives to a loop of your own. All else may change between versions.",
    ]
    homes = {name: home for name, home in dit_lora._MODULES.items() if name in dit_lora.__all__}
    return "\n\n".join(["\n".join(lines), *(f"::: {home}.{name}" for name, home in homes.items())])


def _linked(command: Any) -> Any:
    """Typer cuts what commands do short in its list; here it is whole, with a link to the command."""

    def line(found: re.Match[str]) -> str:
        verb = command.commands.get(found[1])
        if verb is None:  # a command of a group: its own list
            return found[0]
        first = (verb.help or "").split("\n\n")[0].replace("\n", " ")
        return f"* [`{found[1]}`](#dit-lora-{found[1]}): {first}"

    return line


def _example(found: re.Match[str]) -> str:
    lines = [line.removeprefix("  ").replace(r"\[", "[") for line in found[2].splitlines()]
    return "\n".join([found[1], "", "```bash", *lines, "```", ""])


def _section(path: str, schema: Schema, defs: Schema, level: int, note: str) -> Iterator[str]:
    """The heading, what the section is, its keys, then the sections within it."""
    own, several = _model(schema, defs)
    assert own is not None, path
    shown = f"{path}[]" if several else path
    yield from (f"{'#' * min(level, 4)} `{shown}`", "")
    said = [text for text in (note, schema.get("description", own.get("description", ""))) if text]
    yield from (" ".join(" ".join(said).split()), "") if said else ()
    inner = []
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for name, key in own["properties"].items():
        model, _ = _model(key, defs)
        if model is not None and "properties" in model:
            inner.append((name, key))
        default = "required" if name in own.get("required", ()) else _value(key.get("default"))
        kind = f"[section](#{_slug(shown, name, key, defs)})" if model else _kind(key)
        meaning = " ".join(key.get("description", "").split())
        yield f"| `{name}` | {kind} | {default} | {meaning.replace('|', chr(92) + '|')} |"
    yield ""
    for name, key in inner:
        yield from _section(f"{shown}.{name}", key, defs, level + 1, "")


def _slug(path: str, name: str, key: Schema, defs: Schema) -> str:
    return re.sub(r"[^\w-]", "", f"{path}{name}")


def _model(schema: Schema, defs: Schema) -> tuple[Schema | None, bool]:
    """The section that a key holds, and whether it is a list of them; None of a plain value."""
    for option in schema.get("anyOf", [schema]):
        if "$ref" in option:
            return defs[option["$ref"].rsplit("/", 1)[1]], False
        inner = option.get("items", {})
        if "$ref" in inner:
            return defs[inner["$ref"].rsplit("/", 1)[1]], True
    return None, False


def _kind(schema: Schema) -> str:
    """`integer, at least 1`, `auto`, `on` or `off`, `list of text`, ... or null."""
    if "anyOf" in schema:
        return " or ".join(_kind(option) for option in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        kind = _kind(schema["items"]) if "items" in schema else "values"
        return f"list of {kind}"
    words = {"string": "text", "object": "mapping"}.get(schema["type"], schema["type"])
    bounds = [f"{words} {schema[key]}" for key, words in _NUMBERS.items() if key in schema]
    return ", ".join([words, *bounds])


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | dict):
        return f"`{value}`".replace("'", "").replace("None", "null") if value else "none"
    return f"`{value}`" if value != "" else "none"
