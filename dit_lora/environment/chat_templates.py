"""Render chat templates of checkpoints in a process of its own, with bounds on time, memory and output.

A chat template is a program of the checkpoint. Jinja's sandbox keeps it from files and attributes, not from loops
and strings without end: `{% for %}` over nested ranges, string multiplication, macros that call each other. Nothing
inside the process can interrupt all of these, so one process per process that renders waits for templates, bounded
by the kernel. It is forked at the first template; a rendering takes less than a millisecond more than in place.
"""

import gc
import json
import os
import resource
import signal
from collections import Counter
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

from jinja2 import TemplateError

from dit_lora.errors import DitLoraError
from dit_lora.parsing import parse_json

MAX_SECONDS = 10.0
"""Time of one rendering; templates of published checkpoints take a millisecond."""
MAX_TIMEOUTS = 3
"""Renderings of one template that may exceed `MAX_SECONDS`; later ones are refused at once."""
MAX_BYTES = 2**29
"""Memory that a rendering may need."""
MAX_OUTPUT_CHARACTERS = 2**24
"""The longest text."""
# What a template can raise: whatever is not among these ends the process, which is an answer too.
_RAISED = (
    *(TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError),
    *(MemoryError, RuntimeError, ImportError, AssertionError, OSError),
)


class ChatTemplateError(DitLoraError, TemplateError):
    """A chat template that cannot be rendered, or not within the bounds."""


class _Renderer:
    """Calls a function of Transformers in a forked process."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._lock = Lock()
        self._owner, self._child = 0, 0
        self._connection: Connection | None = None
        self._num_timeouts: Counter[str | None] = Counter()

    def __call__(self, *args: Any, **options: Any) -> Any:
        template = options.get("chat_template")
        with self._lock:
            # With thousands of samples, waiting for each would take hours.
            if self._num_timeouts[template] >= MAX_TIMEOUTS:
                raise ChatTemplateError(
                    f"the checkpoint's chat template took more than {MAX_SECONDS:g} s "
                    f"{MAX_TIMEOUTS} times and is not rendered again"
                )
            if self._owner != os.getpid():  # this process is itself a fork of the owner
                self._start()
            assert self._connection is not None
            try:
                self._connection.send((args, options))
                if not self._connection.poll(MAX_SECONDS):
                    self._stop()
                    self._num_timeouts[template] += 1
                    raise ChatTemplateError(
                        f"the checkpoint's chat template takes more than {MAX_SECONDS:g} s"
                    )
                answer = parse_json(self._connection.recv_bytes())
            except (EOFError, ConnectionError) as error:
                self._stop()
                raise ChatTemplateError(
                    "the checkpoint's chat template ended the process that rendered it"
                ) from error
        if "error" in answer:
            raise ChatTemplateError(f"the checkpoint's chat template fails: {answer['error']}")
        return tuple(answer["rendered"])

    def _start(self) -> None:
        ours, theirs = Pipe()
        child = os.fork()
        if child == 0:
            try:
                _close_all_but(theirs.fileno())
                self._serve(theirs)
            finally:
                os._exit(0)  # nothing of the parent's is to be flushed or freed here
        theirs.close()
        self._owner, self._child, self._connection = os.getpid(), child, ours

    def _stop(self) -> None:
        if self._connection is None:
            return
        self._connection.close()
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        self._owner, self._child, self._connection = 0, 0, None

    def _serve(self, connection: Connection) -> None:
        """Answer until the other end is closed."""
        gc.disable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _bound_memory()
        while True:
            try:
                args, options = connection.recv()
            except (EOFError, OSError):
                return
            # A process whose owner was killed ends by itself.
            signal.setitimer(signal.ITIMER_REAL, 2 * MAX_SECONDS)
            try:
                rendered = self._function(*args, **options)
                if sum(map(len, rendered[0])) > MAX_OUTPUT_CHARACTERS:
                    raise ValueError(f"it writes more than {MAX_OUTPUT_CHARACTERS:,} characters")
                answer = json.dumps({"rendered": rendered})
            except MemoryError:
                answer = json.dumps({"error": f"it needs more than {MAX_BYTES:,} bytes"})
            except _RAISED as error:
                words = " ".join(str(error)[:400].split())
                answer = json.dumps({"error": words or type(error).__name__})
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(answer.encode())


def _close_all_but(kept: int) -> None:
    """Close every file of the parent but the standard streams: with a file of its own a fork would hold its locks."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, kept)
    os.closerange(kept + 1, most)


def _bound_memory() -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():  # not Linux: the time is bounded only
        return
    held = int(statm.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + MAX_BYTES, hard))


def bound_chat_templates() -> None:
    """Have Transformers render every chat template of this process within the bounds. A second call does nothing."""
    from transformers import processing_utils, tokenization_utils_base

    modules: tuple[Any, ...] = (tokenization_utils_base, processing_utils)
    if not isinstance(tokenization_utils_base.render_jinja_template, _Renderer):
        renderer = _Renderer(tokenization_utils_base.render_jinja_template)
        for module in modules:
            module.render_jinja_template = renderer
