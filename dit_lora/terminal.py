"""Print safely: file names, captions and other people's words cannot move the cursor, set colours or turn text."""

import re
import sys

# Controls, which begin a terminal's commands (ECMA-48), but for line ends and tabs; marks and overrides of the
# direction of writing (Unicode TR9) and of invisible tags; other line ends; halves of UTF-16 pairs.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def printable(text: object) -> str:
    """Return the text with what a terminal would obey written as its escape, as `\x1b`; line ends and tabs stay."""
    return _OBEYED.sub(_escape, str(text))


def one_line(text: object) -> str:
    """Return `printable`, with line ends and tabs escaped too: a file's name cannot look like a line of ours."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def indented(text: object) -> str:
    """Return `printable`, with every line but the first indented: none looks like another message of ours."""
    return re.sub(r"\n(?!  )", "\n  ", printable(text))


def echo(text: object, *, err: bool = False) -> None:
    """Print a line, or several, to standard output or, with `err`, to standard error."""
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{printable(text)}\n")
    stream.flush()


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
