"""`--json`: standard output is one JSON document and nothing else; what libraries print there goes to standard error."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any, TextIO

import typer

_OUT = "dit_lora.json"
"""Where a command's context keeps its standard output."""


def _begin(context: typer.Context, asked: bool) -> bool:
    if asked and not context.resilient_parsing:
        context.meta[_OUT] = context.with_resource(_diverted())
    return asked


JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print JSON.", callback=_begin, is_eager=True)
]


def print_json(context: typer.Context, document: Any) -> None:
    """Print the one document of a command that was asked for JSON."""
    out: TextIO = context.meta[_OUT]
    out.write(json.dumps(document, indent=2) + "\n")
    out.flush()


@contextlib.contextmanager
def _diverted() -> Iterator[TextIO]:
    """Standard output; within it, what anybody else writes there goes to standard error, child processes' too."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            number = out.fileno()
        except io.UnsupportedOperation:  # no file: a test's, or a notebook's
            yield out
            return
        out.flush()
        own = os.dup(number)
        os.dup2(2, number)
        try:
            with os.fdopen(own, "w", encoding="utf-8", closefd=False) as kept:
                yield kept
        finally:
            out.flush()
            os.dup2(own, number)
            os.close(own)


def silence_the_end() -> None:
    """What libraries print as a process ends goes to standard error, for nothing may follow the document."""
    sys.stdout.flush()
    os.dup2(2, 1)
