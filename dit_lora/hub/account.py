"""Check who is logged in to the Hub and may write where; say what the Hub or the way to it answers in one line."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError

from dit_lora.errors import DitLoraError
from dit_lora.redact import without_tokens

T = TypeVar("T")

TRIES = 4
_FIRST_WAIT, _LONGEST_WAIT = 2.0, 120.0
_TRANSIENT = frozenset({408, 412, 429, 500, 502, 503, 504})
"""412: somebody else has pushed in between."""
# huggingface_hub raises a RuntimeError for what went wrong in a thread of an upload.
FAILURES = (HTTPError, OSError, RuntimeError, ValueError, KeyError)


class HubError(DitLoraError):
    """The Hub refused something, or it cannot be reached."""


class UnreachableError(HubError):
    """The Hub does not answer, or not with what was asked for; later it may."""


def check_account(repo_id: str, *, private: bool) -> None:
    """Raise `HubError` unless somebody is logged in who may write to a repository of that name.

    With `private`, a repository that exists and is public is refused too. Raises `UnreachableError` where the Hub
    does not answer, which says nothing of the account.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it")
    if get_token() is None:
        raise HubError(
            "no Hugging Face token: log in with `hf auth login` (or set HF_TOKEN), with a token that may write"
        )
    user = asked(lambda: HfApi().whoami(), tries=2)
    name = str(user.get("name"))
    role = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise HubError(
            f"the token of {name} may only read; log in with one that may write: `hf auth login`"
        )
    owner = repo_id.partition("/")[0]
    owners = [name, *(str(one.get("name")) for one in user.get("orgs") or ())]
    # The answer does not list what a fine-grained token may do.
    if role == "write" and owner.lower() not in [one.lower() for one in owners]:
        raise HubError(
            f"{repo_id}: {name} may not write there; OWNER is one of {', '.join(owners)}. For another account: "
            "`hf auth login`"
        )
    if private:
        _require_no_public(repo_id)


def _require_no_public(repo_id: str) -> None:
    api = HfApi()
    try:
        repository = api.model_info(repo_id)
    except RepositoryNotFoundError:
        return
    except FAILURES as error:
        raise in_words(error) from None
    if not repository.private:
        raise HubError(
            f"{api.endpoint}/{repo_id} is there and public, which `private` does not change: make it private in "
            "its settings, push to another name, or say that everybody may see it: --public (hub.private=false)"
        )


def asked(work: Callable[[], T], say: Callable[[str], None] | None = None, tries: int = TRIES) -> T:
    """Return what `work` returns; try again what is transient, after the wait that the Hub asks for or a growing one.

    huggingface_hub itself tries uploads again, but neither a commit nor the requests around it.
    Raises `UnreachableError` after `tries`, or where the Hub asks for a longer wait than two minutes, and
    `HubError` at once for what will not change.
    """
    wait = _FIRST_WAIT
    for attempt in range(1, tries + 1):
        try:
            with _without_addresses():
                return work()
        except FAILURES as error:
            problem = in_words(error)
            retry_after = _retry_after(error)
            pause = wait if retry_after is None else retry_after
            # A RuntimeError is of an upload, which the library has tried six times.
            last = attempt == tries or isinstance(error, RuntimeError)
            if last or not isinstance(problem, UnreachableError):
                raise problem from None
            if pause > _LONGEST_WAIT:
                raise UnreachableError(f"{problem}; it asks to wait {pause:.0f} s") from None
        if say is not None:
            say(f"hub: {problem}; trying again in {pause:.0f} s ({attempt} of {tries - 1})")
        time.sleep(pause)
        wait *= 2
    raise AssertionError("unreachable")


def in_words(error: BaseException) -> HubError:
    """Return what went wrong, without a token; an `UnreachableError` if it may go right later."""
    cause = _cause(error)
    if not isinstance(cause, HfHubHTTPError) or cause.response is None:
        words = _line(str(cause)) or type(cause).__name__
        # An error page in place of JSON is the Hub's trouble, not ours.
        if isinstance(cause, ValueError) and not isinstance(cause, json.JSONDecodeError):
            return HubError(f"the Hub does not take it: {words}")
        if isinstance(cause, KeyError):
            return UnreachableError(f"the Hub's answer has no {words}")
        return UnreachableError(f"the Hub cannot be reached: {words}")
    status = cause.response.status_code
    answer = _line(cause.server_message or "") or cause.response.reason_phrase
    words = {
        401: "the Hub does not know this token (401): log in with `hf auth login`, or correct HF_TOKEN, which comes "
        "first if it is set",
        403: f"this token may not do that (403: {answer}): log in with one that may write there, by `hf auth login`",
        412: "the repository has changed meanwhile (412)",
    }.get(status, f"the Hub answered {status}: {answer}")
    return UnreachableError(words) if status in _TRANSIENT else HubError(words)


def _cause(error: BaseException) -> BaseException:
    """Return the Hub's answer or the broken connection that an error of a library was raised for."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HTTPError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def _line(text: str) -> str:
    """Return the first line, cut short, without a token."""
    return without_tokens(text.strip().partition("\n")[0][:300].rstrip(". "))


def _retry_after(error: BaseException) -> float | None:
    cause = _cause(error)
    if not isinstance(cause, HfHubHTTPError) or cause.response is None:
        return None
    value = cause.response.headers.get("Retry-After", "")
    return float(value) if re.fullmatch(r"\d+", value) else None


@contextmanager
def _without_addresses() -> Iterator[None]:
    """Keep addresses, whose queries sign uploads, out of huggingface_hub's warnings."""
    logger = logging.getLogger("huggingface_hub.utils._http")
    logger.addFilter(_drop_address)
    try:
        yield
    finally:
        logger.removeFilter(_drop_address)


def _drop_address(record: logging.LogRecord) -> bool:
    record.msg, record.args = record.getMessage().partition(" thrown while requesting")[0], ()
    return True
