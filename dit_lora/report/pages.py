"""What all pages share: one skeleton, one style, and a policy that lets a page fetch and run nothing of others'."""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from dit_lora.redact import redactor

_EMBEDDED = ("data:image/png;base64,", "data:image/jpeg;base64,", "data:video/mp4;base64,")
_HEADERS = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'"


def render(
    template: str,
    *,
    scripts: Sequence[str] = (),
    sources: str = "img-src data:",
    **values: Any,
) -> str:
    """Return the page of a template beside this module, escaped throughout, with no token and no absolute path.

    `scripts` names the files whose text runs in it, and `sources` are the policy's further directives.
    """
    texts = [_read(name) for name in scripts]
    policy = f"{_HEADERS}; {sources}"
    if texts:
        policy += "; script-src " + " ".join(f"'sha256-{_digest(text)}'" for text in texts)
    page = _environment().get_template(template)
    return str(page.render(policy=policy, scripts=texts, clean=redactor(), **values))


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _environment() -> Any:
    import jinja2

    @jinja2.pass_context
    def shown(context: jinja2.runtime.Context, value: Any) -> Any:
        """Text as others may read it; markup of ours and embedded samples as they are."""
        as_is = not isinstance(value, str) or hasattr(value, "__html__")
        return value if as_is or value.startswith(_EMBEDDED) else context["clean"](value)

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _read(name: str) -> str:
    return resources.files("dit_lora.report").joinpath(name).read_text(encoding="utf-8")
