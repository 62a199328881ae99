"""Base of all pages: one layout, one style, and a content policy that allows no external content or scripts."""

import base64
import hashlib
import time
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from dit_lora.errors import DitLoraError
from dit_lora.files import write_atomically
from dit_lora.redact import make_redactor

T = TypeVar("T")
# Beginnings of embedded media, whose base64 must not be changed by redaction.
_DATA_URI_PREFIXES = ("data:image/png;base64,", "data:image/jpeg;base64,", "data:video/mp4;base64,")
# Nothing may be loaded or submitted except what a page's `sources` adds.
_CONTENT_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'"

MAX_PICTURE_BYTES = 7 * 2**20
"""Maximum bytes of base64 pictures on one page, which keeps the page below 10 MB."""
_MAX_TEXT_LENGTH = 400  # maximum characters of one text


class PagePictures:
    """Makes data URIs of JPEGs for a page, while there is space on it."""

    def __init__(self) -> None:
        self._bytes_left = MAX_PICTURE_BYTES

    def make_uri(self, jpeg: bytes | None) -> str:
        """Data URI of a picture; an empty string without a picture or without space for it on the page."""
        # Base64 length counts, because that is what the page contains.
        uri = make_jpeg_uri(jpeg) if jpeg else ""
        if len(uri) > self._bytes_left:
            return ""
        self._bytes_left -= len(uri)
        return uri


def make_jpeg_uri(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def choose_evenly(items: Sequence[T], count: int) -> list[T]:
    """Choose at most `count` items, evenly spaced from the first to the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / max(1, count - 1))] for index in range(count)]


def truncate_text(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_LENGTH else text[:_MAX_TEXT_LENGTH] + "…"


def write_page(path: Path, page: str, *, allow_stream: bool = True) -> Path:
    """Write an HTML page atomically.

    `allow_stream` is False for a path that the user did not give: a pipe at that path is replaced.

    Raises:
        DitLoraError: If the file cannot be written.
    """
    try:
        write_atomically(path, page, allow_stream=allow_stream)
    except OSError as error:
        raise DitLoraError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def render_page(
    template: str, *, scripts: Sequence[str] = (), sources: str = "img-src data:", redact: bool = True, **values: Any
) -> str:
    """Render a template of this package, with all values escaped, and tokens and absolute paths redacted.

    Args:
        template: File name of the template.
        scripts: Names of the script files that the page embeds and may run.
        sources: Additional directives of the content security policy.
        redact: False for a page that edits files, which must contain their exact text.
        values: The template's variables.
    """
    texts = [_read_resource(name) for name in scripts]
    policy = f"{_CONTENT_POLICY}; {sources}"
    # Only these scripts may run: the policy lists their hashes.
    if texts:
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        policy += "; script-src " + " ".join(f"'sha256-{digest}'" for digest in digests)
    page = _get_environment().get_template(template)
    clean = make_redactor() if redact else str
    return str(page.render(policy=policy, scripts=texts, clean=clean, **values))


def load_templates(prefix: str) -> None:
    """Compile the templates whose names start with a prefix, so that the first pages need not wait for it."""
    for file in resources.files("dit_lora.report").iterdir():
        if file.name.startswith(prefix) and file.name.endswith(".html"):
            _get_environment().get_template(file.name)


@cache
def _get_environment() -> Any:
    import jinja2

    @jinja2.pass_context
    def redact_value(context: jinja2.runtime.Context, value: Any) -> Any:
        """Redact tokens and absolute paths in text; markup of the templates and embedded media stay unchanged."""
        as_is = not isinstance(value, str) or hasattr(value, "__html__")
        return value if as_is or value.startswith(_DATA_URI_PREFIXES) else context["clean"](value)

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_resource),
        autoescape=True,
        finalize=redact_value,
        # A misspelt variable is an error and not an empty string.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clipped"] = truncate_text
    environment.filters["local_time"] = lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    return environment


@cache
def _read_resource(name: str) -> str:
    return resources.files("dit_lora.report").joinpath(name).read_text(encoding="utf-8")
