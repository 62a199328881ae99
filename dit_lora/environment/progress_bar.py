"""Progress of long work, on a terminal and in a pipe."""

import logging
import math
import sys
import time
from typing import Any

from tqdm import tqdm

_LINE_INTERVAL_S = 60.0
"""Seconds between two lines of progress where standard error is not a terminal."""


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


def hide_progress_bars() -> None:
    """Hide the libraries' progress bars for loading, and DeepSpeed's line on its device; other warnings stay."""
    # A filter, because DeepSpeed sets its logger's level itself when something imports it.
    logging.getLogger("DeepSpeed").addFilter(
        lambda record: not record.getMessage().startswith("Setting accelerator to CPU")
    )
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
