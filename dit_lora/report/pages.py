"""Base of all pages: one skeleton, one style, and a policy that lets a page fetch and run nothing of others'."""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.redact import redactor

_EMBEDDED = ("data:image/png;base64,", "data:image/jpeg;base64,", "data:video/mp4;base64,")
_HEADERS = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'"


PICTURE_BYTES = 7 * 2**20
"""Pictures of one page, as base64: with its text it stays below 10 MB."""
_WORDS = 400  # characters of one text


class PagePictures:
    """Makes data URIs of JPEGs, while there is room for them on the page."""

    def __init__(self) -> None:
        self._room = PICTURE_BYTES

    def uri(self, jpeg: bytes | None) -> str:
        """Return the picture's URI, or nothing."""
        text = base64.b64encode(jpeg or b"").decode()
        if not text or len(text) > self._room:
            return ""
        self._room -= len(text)
        return f"data:image/jpeg;base64,{text}"


def clipped(words: str) -> str:
    return words if len(words) <= _WORDS else words[:_WORDS] + "…"


def write_page(path: Path, page: str, *, allow_stream: bool = True) -> Path:
    """Write a page in one rename; raises `DitLoraError` if it cannot be written.

    `allow_stream` is false for a name that the user did not give: a pipe of that name is replaced.
    """
    try:
        write_whole(path, page, allow_stream=allow_stream)
    except OSError as error:
        raise DitLoraError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def render(
    template: str,
    *,
    scripts: Sequence[str] = (),
    sources: str = "img-src data:",
    redact: bool = True,
    **values: Any,
) -> str:
    """Return the page of a template beside this module, escaped throughout, with no token and no absolute path.

    `scripts` names the files whose text runs in it, and `sources` are the policy's further directives. `redact` is
    False for a page that edits files: it must hold what they hold.
    """
    texts = [_read(name) for name in scripts]
    policy = f"{_HEADERS}; {sources}"
    if texts:
        policy += "; script-src " + " ".join(f"'sha256-{_digest(text)}'" for text in texts)
    page = _environment().get_template(template)
    clean = redactor() if redact else str
    return str(page.render(policy=policy, scripts=texts, clean=clean, **values))


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _environment() -> Any:
    import jinja2

    @jinja2.pass_context
    def shown(context: jinja2.runtime.Context, value: Any) -> Any:
        """Return text as others may read it; markup of ours and embedded samples as they are."""
        as_is = not isinstance(value, str) or hasattr(value, "__html__")
        return value if as_is or value.startswith(_EMBEDDED) else context["clean"](value)

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clipped"] = clipped
    return environment


@cache
def _read(name: str) -> str:
    return resources.files("dit_lora.report").joinpath(name).read_text(encoding="utf-8")
