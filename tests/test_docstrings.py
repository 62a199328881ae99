"""Docstrings of the library are sentences: they have a subject, or begin with a verb."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAGMENTS = ("As", "By", "How", "In", "Of", "Those", "What", "Where", "Whether", "With")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every docstring with its line, those of fields and constants too."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for line in body if isinstance(body, list) else []:
            if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
                yield line.lineno, str(line.value.value)


def fragments(source: str) -> list[int]:
    lines = docstrings(ast.parse(source))
    return [line for line, text in lines if text.split()[:1] and text.split()[0] in FRAGMENTS]


@pytest.mark.parametrize("folder", ["dit_lora", "kernels/dit_lora_kernels"])
def test_no_docstring_is_a_fragment(folder: str) -> None:
    found = {path: fragments(path.read_text()) for path in (ROOT / folder).rglob("*.py")}
    assert len(found) > 5
    assert {str(path): lines for path, lines in found.items() if lines} == {}


def test_a_fragment_is_found_wherever_it_stands() -> None:
    source = '"""Of all."""\nX = 1\n"""By name."""\ndef f():\n    """As before."""\n'
    assert sorted(fragments(source)) == [1, 3, 5]
    assert fragments('"""Return what is there."""') == []
