"""Keep errors inside the guard from reaching the loop that it watches.

Only this module catches every exception. A loop that runs without the guard must also run with it, so an experiment or
a check may fail, and then has no result.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

_LOG = logging.getLogger("dit_lora")
T = TypeVar("T")
# Messages that were logged: an error in a hook would otherwise repeat at every step.
_reported: set[str] = set()


def contain(
    attempt: Callable[[], T],
    *,
    on_error: Callable[[Exception], None] = lambda error: None,
    passes: tuple[type[BaseException], ...] = (),
) -> T | None:
    """The result of `attempt()`.

    If it raises an `Exception` not in `passes`, calls `on_error(error)` and returns None.
    """
    try:
        return attempt()
    # Errors that the caller has to see, such as the guard's own stop.
    except passes:
        raise
    except Exception as error:
        _LOG.debug("guard: an attempt failed: %r", error, exc_info=error)
        on_error(error)
        return None


def contain_error(
    attempt: Callable[[], T], what: str, *, passes: tuple[type[BaseException], ...] = ()
) -> T | None:
    """Call `attempt`, which should never fail, and log the first error of each kind as a warning."""
    try:
        return attempt()
    except passes:
        raise
    except Exception as error:
        _report(what, error)
        return None


def contained(
    what: str, *, passes: tuple[type[BaseException], ...] = ()
) -> Callable[[Callable[..., T]], Callable[..., T | None]]:
    """Decorator that applies `contain_error` to every call of a method."""

    def decorate(method: Callable[..., T]) -> Callable[..., T | None]:
        @functools.wraps(method)
        def attempt(*args: Any, **kwargs: Any) -> T | None:
            try:
                return method(*args, **kwargs)
            except passes:
                raise
            except Exception as error:
                _report(what, error)
                return None

        return attempt

    return decorate


def _report(what: str, error: Exception) -> None:
    message = f"{what}: {type(error).__name__}: {error}"
    if message not in _reported:
        _reported.add(message)
        _LOG.warning("guard: internal error, the script goes on without this check: %s", message)
        _LOG.debug("guard: traceback", exc_info=error)
