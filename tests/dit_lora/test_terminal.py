"""What is printed cannot steer a terminal, whoever named the file."""

import ast
import json
from pathlib import Path

import pytest

from dit_lora import terminal
from dit_lora.errors import DitLoraError, format_list, print_error
from dit_lora.terminal import echo, make_one_line, make_printable

LIBRARY = Path(terminal.__file__).parent
EVIL = {
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "colour": "\x1b[8mhidden\x1b[0m",
    "eight-bit": "\x9b2J\x9d0;x\x9c",
    "back": "bad\b\b\bok\rok",
    "bidi": "a\u202egpj.exe\u2066x\u2069\u200f\u061c",
    "tags": "a\U000e0041\u2028b",
    "surrogate": "half \ud83d",
    "del": "\x7f\x00",
}


def is_tame(text: str) -> bool:
    return all(char in "\n\t" or char.isprintable() for char in text)


@pytest.mark.parametrize("evil", EVIL.values(), ids=EVIL)
def test_what_a_terminal_obeys_is_written_out(evil: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_tame(evil)
    assert is_tame(make_printable(evil))
    assert make_printable(make_printable(evil)) == make_printable(evil)
    echo(f"clip {evil}.mp4")
    echo(evil, err=True)
    error = DitLoraError(format_list(f"cannot read {evil}", [f"{evil}: missing", "b.mp4: missing"]))
    print_error(error)
    output = capsys.readouterr()
    assert is_tame(output.out)
    assert is_tame(output.err)
    assert output.err.count("\n") == 4
    assert json.loads(make_printable(json.dumps({"a": evil}, indent=2))) == {"a": evil}


def test_text_of_every_script_stays_as_it_is() -> None:
    text = "Füchse, 狐, ثعلب, 🦊\n\tहिन्दी, क्‍ष, 👨‍👩‍👧, e\u0301"
    assert make_printable(text) == text
    assert make_one_line("a\nok\tb") == "a\\nok\\tb"


def test_an_error_cannot_look_like_two(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(DitLoraError(format_list("refused: a\nerror: b\r\nwarning: c", ["d\nerror: e"])))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: refused: a",
        "  error: b\\r",
        "  warning: c",
        "  - d",
        "  error: e",
    ]


def test_everything_that_is_printed_is_printable() -> None:
    """By the calls of the library: each writes a literal, or what `make_printable` gave."""
    writers = (
        "sys.stdout.write",
        "sys.stderr.write",
        "tqdm.write",
        "typer.echo",
        "click.echo",
        "print",
    )
    unprintable = []
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in writers:
                continue
            argument = ast.unparse(node.args[0]) if node.args else "''"
            literal = bool(node.args) and isinstance(node.args[0], ast.Constant)
            if not (literal or "make_printable(" in argument or "indent_lines(" in argument):
                unprintable.append(f"{path.relative_to(LIBRARY)}:{node.lineno}: {argument}")
    assert not unprintable
