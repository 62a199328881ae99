"""Print to the terminal: untrusted text without control characters, and progress.

File names and captions cannot move the cursor, set colours or reverse text.
"""

import math
import re
import sys
import time
from typing import Any

from tqdm import tqdm

_LINE_INTERVAL_S = 60.0
"""Seconds between two lines of progress where standard error is no terminal."""

# Control characters, which start terminal commands (ECMA-48), except line ends and tabs; marks and overrides of the
# writing direction (Unicode TR9) and invisible tags; other line ends; halves of UTF-16 pairs.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def make_printable(text: object) -> str:
    r"""The text with characters that control a terminal as escapes, such as `\x1b`; line ends and tabs stay."""
    return _CONTROL_CHARACTERS.sub(_escape, str(text))


def make_one_line(text: object) -> str:
    """`make_printable` text with line ends and tabs escaped too, so that a name cannot look like a message of ours."""
    return make_printable(text).replace("\n", "\\n").replace("\t", "\\t")


def indent_lines(text: object) -> str:
    """`make_printable` text with later lines indented, so that none looks like another message of ours."""
    # Lines that are indented by two spaces already stay as they are.
    return re.sub(r"\n(?!  )", "\n  ", make_printable(text))


def echo(text: object, *, err: bool = False) -> None:
    """Print one or several lines to standard output, or with `err` to standard error."""
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{make_printable(text)}\n")
    stream.flush()


class ProgressBar(tqdm):
    """A progress bar on standard error. In a pipe or a file it writes a plain line a minute, without carriage returns.

    Takes the arguments of `tqdm`.
    """

    def __init__(self, iterable: Any = None, **options: Any) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._next_line_s = time.monotonic() + _LINE_INTERVAL_S
        super().__init__(iterable, file=sys.stderr, dynamic_ncols=True, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self._is_terminal:
            super().display(msg, pos)
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + _LINE_INTERVAL_S
            elapsed_s, num_done = self.format_dict["elapsed"], self.n - self.initial
            parts = [f"{self.desc}: {self.n}{f' of {self.total}' if self.total else ''} {self.unit}s"]
            parts.append(f"{self.format_interval(elapsed_s)} elapsed")
            # Without a total or a first item there is nothing to extrapolate from.
            if self.total and num_done > 0:
                parts.append(f"{self.format_interval(elapsed_s * (self.total - self.n) / num_done)} left")
            # Values such as the loss.
            parts += [str(self.postfix)] if self.postfix else []
            self.fp.write(f"{', '.join(parts)}\n")

    def clear(self, nolock: bool = False) -> None:
        # `tqdm.write` clears the bars before it writes.
        if self._is_terminal:
            super().clear(nolock)

    def close(self) -> None:
        if not self._is_terminal:
            # tqdm then believes that it has shown nothing yet, and erases nothing.
            self.delay = math.inf
        super().close()


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
