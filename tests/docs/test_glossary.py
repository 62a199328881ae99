"""The glossary: every public name and every name in the code that it gives exists."""

import functools
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import typer
from launching import ROOT
from pydantic import BaseModel

import dit_lora
from dit_lora.cli.app import app
from dit_lora.config.recipe import Recipe


class Term(NamedTuple):
    name: str
    meaning: str
    public: str
    code: str


def read_terms() -> list[Term]:
    rows = []
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines():
        if not line.startswith("| ") or line.startswith("| term |"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 4, line
        rows.append(Term(*cells))
    return rows


TERMS = read_terms()


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a key may hold, inside of unions and tuples too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from models_in(inner)


def is_recipe_key(name: str) -> bool:
    sections: list[type[BaseModel]] = [Recipe]
    for key in name.split("."):
        fields = [s.model_fields[key] for s in sections if key in s.model_fields]
        if not fields:
            return False
        sections = [model for field in fields for model in models_in(field.annotation)]
    return True


def exists(name: str) -> bool:
    """Is this a command, an exported name or a key of a recipe?"""
    if name.startswith("dit-lora "):
        commands = getattr(typer.main.get_command(app), "commands", {})
        return name.removeprefix("dit-lora ") in commands
    if name.startswith("dit_lora."):
        exported, *attributes = name.removeprefix("dit_lora.").split(".")
        if exported not in dit_lora.__all__:
            return False
        functools.reduce(getattr, attributes, getattr(dit_lora, exported))
        return True
    return is_recipe_key(name)


def test_the_glossary_has_each_term_once_and_in_order() -> None:
    assert len(TERMS) >= 115
    names = [term.name for term in TERMS]
    assert len(set(names)) == len(names)
    sections = (ROOT / "docs" / "glossary.md").read_text().split("\n## ")[1:]
    for section in sections:
        listed = re.findall(r"^\| (?!term )([^|]+) \|", section, flags=re.MULTILINE)
        assert listed == sorted(listed, key=str.lower)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_every_name_of_a_term_exists(term: Term) -> None:
    assert re.fullmatch(r"\S.*\.", term.meaning)
    assert term.public or term.code
    if term.public:
        assert exists(term.public.strip("`")), term.public
    if term.code:
        module, attribute = term.code.strip("`").split(":")
        root = "" if module.startswith("dit_lora_kernels") else "dit_lora."
        functools.reduce(getattr, attribute.split("."), import_module(f"{root}{module}"))


@pytest.mark.parametrize("name", ["dit-lora nothing", "dit_lora.nothing", "train.nothing", "nothing", "train.steps.x"])
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert not exists(name)
