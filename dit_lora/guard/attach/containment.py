"""Keep errors inside the guard from reaching the loop that it watches.

Only this module catches every exception. A loop that runs without the guard must also run with it, so an experiment or
a check may fail, and then has no result.
"""

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_LOG = logging.getLogger("dit_lora")
T = TypeVar("T")
# Messages that were logged: an error in a hook would otherwise repeat at every step.
_logged_messages: set[str] = set()


def try_call(
    attempt: Callable[[], T],
    *,
    on_error: Callable[[Exception], None] = lambda error: None,
    reraised: tuple[type[BaseException], ...] = (),
) -> T | None:
    """Call `attempt` and return its result.

    If it raises an `Exception` not in `reraised`, call `on_error(error)` and return None.
    """
    try:
        return attempt()
    # Errors that the caller has to see, such as the guard's own stop.
    except reraised:
        raise
    except Exception as error:
        _LOG.debug("guard: an attempt failed: %r", error, exc_info=error)
        on_error(error)
        return None


def try_or_warn(
    attempt: Callable[[], T], activity: str, *, reraised: tuple[type[BaseException], ...] = ()
) -> T | None:
    """Call `attempt` and return its result.

    If it raises, log the first error of each kind as a warning and return None.
    """
    return try_call(attempt, on_error=partial(_warn_about_error, activity), reraised=reraised)


def warn_on_error(
    activity: str, *, reraised: tuple[type[BaseException], ...] = ()
) -> Callable[[Callable[..., T]], Callable[..., T | None]]:
    """Decorator for methods: an exception is logged as a warning instead of raised, as with `try_or_warn`."""

    def decorate(method: Callable[..., T]) -> Callable[..., T | None]:
        @functools.wraps(method)
        def attempt(*args: Any, **kwargs: Any) -> T | None:
            return try_or_warn(partial(method, *args, **kwargs), activity, reraised=reraised)

        return attempt

    return decorate


def _warn_about_error(activity: str, error: Exception) -> None:
    message = f"{activity}: {type(error).__name__}: {error}"
    if message not in _logged_messages:
        _logged_messages.add(message)
        _LOG.warning("guard: internal error, the script goes on without this check: %s", message)
        _LOG.debug("guard: traceback", exc_info=error)
