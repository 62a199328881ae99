"""Print untrusted text to the terminal, without control characters.

File names and captions cannot move the cursor, set colours or reverse text.
"""

import re
import sys

# Control characters, which start terminal commands (ECMA-48), except line ends and tabs; marks and overrides of the
# writing direction (Unicode TR9) and invisible tags; other line ends; halves of UTF-16 pairs.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def make_printable(text: object) -> str:
    r"""Escape control characters in a text, such as `\x1b`, so that it cannot control the terminal.

    Keeps line ends and tabs.
    """
    return _CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def make_one_line(text: object) -> str:
    """Escape control characters, line ends and tabs in a text, so that a name cannot look like a message of ours."""
    return make_printable(text).replace("\n", "\\n").replace("\t", "\\t")


def indent_lines(text: object) -> str:
    """Escape control characters in a text and indent its later lines, so that they cannot look like our messages."""
    # Lines that are indented by two spaces already stay as they are.
    return re.sub(r"\n(?!  )", "\n  ", make_printable(text))


def echo(text: object, *, err: bool = False) -> None:
    """Print one or several lines to standard output, or with `err` to standard error."""
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{make_printable(text)}\n")
    stream.flush()
