"""Under --json standard output is one JSON document, whatever libraries print there."""

import json
import subprocess
import sys
from typing import Any

import pytest
import typer

from dit_lora.cli import json_output
from dit_lora.cli.app import app

NOISY = """
import atexit, os, subprocess, sys
from unittest import mock
early = sys.stdout  # as a library's log handler keeps it
def noisy(*arguments):
    print("one")
    os.write(1, b"two\\n")
    early.write("three\\n")
    subprocess.run(["echo", "four"])
    atexit.register(print, "five")
    return {}
from dit_lora import cli
sys.argv = ["dit-lora", "recipes", "--json"]
with mock.patch("dit_lora.cli.init.map_recipe_paths", noisy):
    cli.main()
"""


def test_what_others_print_goes_to_standard_error() -> None:
    process = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True)
    assert json.loads(process.stdout) == {"recipes": []}
    assert process.stdout.endswith("}\n")
    assert {"one", "two", "three", "four", "five"} <= set(process.stderr.split())
    assert process.returncode == 0


def flags(command: Any, name: str) -> list[tuple[str, Any]]:
    """Every --json that takes no value, by its verb."""
    if hasattr(command, "commands"):
        return [flag for verb, sub in command.commands.items() for flag in flags(sub, verb)]
    return [(name, p) for p in command.params if "--json" in p.opts and getattr(p, "is_flag", 0)]


def test_every_verb_has_the_one_flag() -> None:
    flags_of_verbs = flags(typer.main.get_command(app), "")
    assert len(flags_of_verbs) >= 10
    # Typer wraps what it is given.
    different = [
        n
        for n, flag in flags_of_verbs
        if getattr(flag.callback, "__wrapped__", 0) is not json_output._divert_if_requested
    ]
    assert different == []


@pytest.mark.parametrize("arguments", [["recipes", "--json", "--family", "nobody"]])
def test_an_error_leaves_it_empty(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "dit_lora", *arguments]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert "unknown family 'nobody'" in process.stderr
