"""Checks who is logged in to the Hub and where they may write, and turns the Hub's errors into one-line messages."""

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
from dit_lora.redact import remove_tokens

T = TypeVar("T")

MAX_TRIES = 4
_FIRST_WAIT, _LONGEST_WAIT = 2.0, 120.0
# Status codes after which the same request may succeed.
_TRANSIENT_STATUSES = frozenset({408, 412, 429, 500, 502, 503, 504})
"""412: somebody else has pushed in the meantime."""
# huggingface_hub raises a RuntimeError for errors in an upload thread.
REQUEST_ERRORS = (HTTPError, OSError, RuntimeError, ValueError, KeyError)


class HubError(DitLoraError):
    """The Hub rejected a request, or cannot be reached."""


class UnreachableError(HubError):
    """The Hub did not answer, or not as expected. A later attempt may succeed."""


def check_account(repo_id: str, *, private: bool) -> None:
    """Check that the logged-in user may write to a repository of this name.

    With `private`, an existing public repository is rejected too.

    Raises:
        HubError: Nobody is logged in, or the account may not write there.
        UnreachableError: The Hub does not answer, so that the account is unknown.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubError("cannot push while HF_HUB_OFFLINE is set; unset it")
    # Only looks for a token; the request below checks whether it is valid.
    if get_token() is None:
        raise HubError(
            "there is no Hugging Face token; log in with `hf auth login` (or set HF_TOKEN), with a token "
            "that can write"
        )
    user = request_with_retries(lambda: HfApi().whoami(), max_tries=2)
    name = str(user.get("name"))
    # `read`, `write` or `fineGrained`; each level of the answer may be missing.
    role = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise HubError(f"the token of {name} can only read; log in with one that can write: `hf auth login`")
    owner = repo_id.partition("/")[0]
    owners = [name, *(str(organization.get("name")) for organization in user.get("orgs") or ())]
    # Only for `write` tokens: the answer does not list the permissions of a fine-grained token.
    if role == "write" and owner.lower() not in [organization.lower() for organization in owners]:
        raise HubError(
            f"{repo_id}: {name} cannot write there; OWNER must be one of {', '.join(owners)}. For another "
            "account: `hf auth login`"
        )
    if private:
        _require_not_public(repo_id)


def _require_not_public(repo_id: str) -> None:
    api = HfApi()
    try:
        repository = api.model_info(repo_id)
    # The push will create it, as private.
    except RepositoryNotFoundError:
        return
    except REQUEST_ERRORS as error:
        raise to_hub_error(error) from None
    if not repository.private:
        raise HubError(
            f"{api.endpoint}/{repo_id} already exists and is public; make it private in its settings, push to "
            "another name, or allow everybody to see it with --public (hub.private=false)"
        )


def request_with_retries(
    request: Callable[[], T], say: Callable[[str], None] | None = None, max_tries: int = MAX_TRIES
) -> T:
    """Call the function `request` and return its result; retry transient errors of the Hub.

    Waits as long as the Hub requests, or a growing time. huggingface_hub itself retries uploads, but neither commits
    nor the requests around them.

    Args:
        request: The request.
        say: Called with a message before each retry.
        max_tries: Maximum number of attempts.

    Raises:
        UnreachableError: All attempts failed, or the Hub requests a wait of more than two minutes.
        HubError: A permanent error. Raised at once.
    """
    wait = _FIRST_WAIT
    for attempt in range(1, max_tries + 1):
        try:
            with _hide_urls():
                return request()
        except REQUEST_ERRORS as error:
            problem = to_hub_error(error)
            retry_after = _read_retry_after(error)
            # The Hub's own request comes first.
            pause = wait if retry_after is None else retry_after
            # A RuntimeError comes from an upload, which the library has already tried six times.
            is_last = attempt == max_tries or isinstance(error, RuntimeError)
            if is_last or not isinstance(problem, UnreachableError):
                raise problem from None
            if pause > _LONGEST_WAIT:
                raise UnreachableError(f"{problem}; retry after {pause:.0f} s") from None
        if say is not None:
            say(f"hub: {problem}; trying again in {pause:.0f} s ({attempt} of {max_tries - 1})")
        time.sleep(pause)
        # Exponential back-off.
        wait *= 2
    raise AssertionError("unreachable")


def to_hub_error(error: BaseException) -> HubError:
    """Turn a Hub exception into a one-line error without tokens.

    It is an `UnreachableError` if a retry may succeed.
    """
    # The library wraps HTTP errors in its own.
    cause = _find_http_error(error)
    if not isinstance(cause, HfHubHTTPError) or cause.response is None:
        message = _shorten_message(str(cause)) or type(cause).__name__
        # An error page instead of JSON is a problem of the Hub, not of the request.
        if isinstance(cause, ValueError) and not isinstance(cause, json.JSONDecodeError):
            return HubError(f"the Hub refuses it: {message}")
        if isinstance(cause, KeyError):
            return UnreachableError(f"the Hub's answer has no {message}")
        return UnreachableError(f"the Hub cannot be reached: {message}")
    # The Hub has answered: its status decides whether a retry makes sense.
    status = cause.response.status_code
    answer = _shorten_message(cause.server_message or "") or cause.response.reason_phrase
    message = {
        401: "the Hub does not know this token (401): log in with `hf auth login`, or correct HF_TOKEN, which comes "
        "first if it is set",
        403: f"this token is not allowed to do that (403: {answer}); log in with one that can write there: `hf "
        "auth login`",
        412: "the repository was changed in the meantime (412)",
    }.get(status, f"the Hub answered {status}: {answer}")
    return UnreachableError(message) if status in _TRANSIENT_STATUSES else HubError(message)


def _find_http_error(error: BaseException) -> BaseException:
    """The HTTP error in the chain of causes of a library's error; the error itself if there is none."""
    # Follow explicit causes first, then the exception that was being handled.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HTTPError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def _shorten_message(text: str) -> str:
    """The first line of an error message, shortened, without tokens."""
    return remove_tokens(text.strip().partition("\n")[0][:300].rstrip(". "))


def _read_retry_after(error: BaseException) -> float | None:
    """Seconds that the Hub asks to wait before a retry; None if it does not say."""
    cause = _find_http_error(error)
    if not isinstance(cause, HfHubHTTPError) or cause.response is None:
        return None
    value = cause.response.headers.get("Retry-After", "")
    # Seconds only; the header may also be a date, which is ignored.
    return float(value) if re.fullmatch(r"\d+", value) else None


@contextmanager
def _hide_urls() -> Iterator[None]:
    """Context that keeps URLs out of huggingface_hub's warnings: their query strings sign uploads."""
    logger = logging.getLogger("huggingface_hub.utils._http")
    logger.addFilter(_drop_url)
    try:
        yield
    finally:
        logger.removeFilter(_drop_url)


def _drop_url(record: logging.LogRecord) -> bool:
    """Logging filter that cuts the URL from a record's message."""
    # The message ends with the URL; `args` are already formatted into it.
    record.msg, record.args = record.getMessage().partition(" thrown while requesting")[0], ()
    return True
