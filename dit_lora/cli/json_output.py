"""`--json`: standard output is exactly one JSON document. What libraries print there goes to standard error."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TextIO

import typer

from dit_lora.errors import CheckFailedError

_OUTPUT_KEY = "dit_lora.json"
"""Key under which a command's context keeps its standard output."""


def _divert_if_requested(context: typer.Context, is_requested: bool) -> bool:
    if is_requested and not context.resilient_parsing:
        # Eager: it takes effect before any other option's callback can print.
        context.meta[_OUTPUT_KEY] = context.with_resource(_divert_stdout())
    return is_requested


JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON.", callback=_divert_if_requested, is_eager=True)
]


def write_command_result(
    context: typer.Context, as_json: bool, record: Any, print_text: Callable[[], object], *, passed: bool = True
) -> None:
    """Print a command's result, as one JSON document or with `print_text`. Exits with code 1 if it did not pass."""
    if as_json:
        stream: TextIO = context.meta[_OUTPUT_KEY]
        stream.write(json.dumps(record, indent=2) + "\n")
        stream.flush()
    else:
        print_text()
    if not passed:
        raise typer.Exit(CheckFailedError.exit_code)


@contextlib.contextmanager
def _divert_stdout() -> Iterator[TextIO]:
    """Context that yields standard output.

    Inside it, all other output, also of child processes, goes to standard error.
    """
    # The stream that the document is written to.
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            number = stdout.fileno()
        except io.UnsupportedOperation:  # no file: a test's, or a notebook's
            yield stdout
            return
        stdout.flush()
        # Child processes write to the descriptor, whatever Python's `sys.stdout` is.
        copied = os.dup(number)
        # From here on the descriptor of standard output leads to standard error.
        os.dup2(2, number)
        try:
            with os.fdopen(copied, "w", encoding="utf-8", closefd=False) as document:
                yield document
        finally:
            stdout.flush()
            # Undo the redirection of the descriptor.
            os.dup2(copied, number)
            os.close(copied)


def divert_exit_output() -> None:
    """Redirect what libraries print at exit to standard error, because nothing may follow the JSON document."""
    sys.stdout.flush()
    # 1 and 2 are the descriptors of standard output and standard error.
    os.dup2(2, 1)
