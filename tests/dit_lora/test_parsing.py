"""Texts that strangers wrote become values within bounds, or an error of one line."""

import ast
import json
from pathlib import Path

import pytest
import yaml

from dit_lora import parsing
from dit_lora.config.yaml_parsing import parse_yaml, read_yaml
from dit_lora.errors import DitLoraError
from dit_lora.files import read_json
from dit_lora.parsing import ParseError, parse_json, parse_json_at

LIBRARY = Path(parsing.__file__).parent


def levels(count: int, text: str = "1") -> str:
    return "[" * count + text + "]" * count


def laughs(lines: int) -> str:
    """Each line holds the one before nine times."""
    text = "a0: &a0 [x]\n"
    for line in range(1, lines):
        text += f"a{line}: &a{line} [{', '.join([f'*a{line - 1}'] * 9)}]\n"
    return text


def chain(lines: int) -> str:
    """Each line holds the one before once: deep, and no line is."""
    return "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, lines))


def merged(lines: int) -> str:
    """Merge keys, which PyYAML copies out before anything is built."""
    text = "a0: &a0 {k0: 1}\n"
    for line in range(1, lines):
        text += f"a{line}: &a{line} {{<<: [{', '.join([f'*a{line - 1}'] * 9)}]}}\n"
    return text


DIGITS = "9" * 5000
BAD_JSON = {
    "deep": levels(100_000),
    "just too deep": levels(101),
    "deep objects": '{"a":' * 500 + "1" + "}" * 500,
    "never ends": "[" * 100_000,
    "digits": f'{{"a": {DIGITS}}}',
    "more than a hundred digits": f"[-{DIGITS[:101]}]",
    "no JSON": "{torn",
    "nothing": "",
    "bytes": b"\xff\xfe",
}
BAD_YAML = {
    "deep": levels(100_000),
    "just too deep": levels(101),
    "deep blocks": "\n".join("  " * depth + "a:" for depth in range(300)),
    "laughs": laughs(12),
    "merged": merged(12),
    "chain": chain(400),
    "in itself": "a: &a [*a]",
    "digits": f"a: {DIGITS}",
    "hex digits": f"a: 0x{DIGITS}",
    "beyond 64 bits": "a: 9223372036854775808",
    "sexagesimal": "a: " + "1" + ":59" * 200,
    "no date": "a: 2024-99-99",
    "no number": "a: !!int many",
    "a tag": "a: !!python/object/apply:os.system [id]",
    "twice": "a: 1\na: 2",
    "a list for a key": "? [a]\n: 1",
    "half a pair": 'a: "\\ud83d"',
    "no alias": "a: *b",
    "no YAML": "a: [",
    "too long": "#" * 1_000_001,
}


@pytest.mark.parametrize("text", BAD_JSON.values(), ids=BAD_JSON)
def test_bad_json_is_one_line(text: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(ParseError) as error:
        parse_json(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DitLoraError, match=r"a\.json is not valid JSON: "):
        read_json(path)


@pytest.mark.parametrize("text", BAD_YAML.values(), ids=BAD_YAML)
def test_bad_yaml_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ParseError) as error:
        parse_yaml(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(DitLoraError, match=r"a\.yaml is not valid YAML: "):
        read_yaml(tmp_path / "a.yaml")


def test_what_is_within_the_bounds_is_read_as_before() -> None:
    values = {
        "a": [1, -2.5, None, True, "ü\U0001f600"],
        "deep": json.loads(levels(98)),
        "n": -(2**63),
    }
    values_list = [{"x": [index]} for index in range(1000)]
    assert parse_json(json.dumps(values)) == values
    assert parse_json(json.dumps(values_list).encode()) == values_list
    assert parse_json(str(10**99)) == 10**99
    assert parse_yaml(yaml.safe_dump(values, allow_unicode=True)) == values
    shared = "base: &base {lr: 1e-3, betas: &b [0.9, 0.95]}\nother: {<<: *base, more: *b}\nn: 0x1F\n"
    assert parse_yaml(shared) == yaml.safe_load(shared)
    assert parse_yaml("") is None


def test_a_value_within_a_text_is_found_with_its_end_or_its_fault() -> None:
    assert parse_json_at(" [1, 2], 3", 1) == ([1, 2], 7)
    with pytest.raises(ParseError) as error:
        parse_json_at("[1, x]", 0)
    assert error.value.position == 4
    with pytest.raises(ParseError, match="nested deeper than 100 levels"):
        parse_json_at(f"  {levels(5000)}", 2)


OWN = {"run.py", "journal.py", "trackers.py", "card.py", "catalog.py"}
"""Modules that read what the same run wrote, or the recipes of this package."""


def test_nobody_else_reads_json_or_yaml() -> None:
    names = ("json.loads", "json.load", "yaml.load", "yaml.safe_load", "yaml.full_load")
    reading_files = {
        path
        for path in LIBRARY.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names
    }
    readers = {LIBRARY / "parsing.py", LIBRARY / "config" / "yaml_parsing.py"}
    assert readers <= reading_files
    assert {path for path in reading_files if path.name not in OWN} == readers
