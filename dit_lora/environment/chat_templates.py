"""Render the chat templates of checkpoints in a separate process, with limits on time, memory and output.

A chat template is a program that comes with the checkpoint. Jinja's sandbox blocks access to files and attributes, but
not endless loops and strings: `{% for %}` over nested ranges, string multiplication, macros that call each other.
Nothing inside a process can interrupt all of these, so each process that renders has one child process for it, limited
by the kernel. The child is forked at the first template; rendering in it takes less than a millisecond longer than in
the process itself.
"""

import gc
import json
import os
import signal
from collections import Counter
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from jinja2 import TemplateError

from dit_lora.environment.operating_system import CAN_LIMIT_CHILDREN, get_max_open_files, limit_address_space
from dit_lora.errors import DitLoraError
from dit_lora.parsing import parse_json

MAX_SECONDS = 10.0
"""Time limit of one rendering; templates of published checkpoints take a millisecond."""
MAX_TIMEOUTS = 3
"""Number of timeouts per template; after them, renderings of this template fail immediately."""
MAX_BYTES = 2**29
"""Memory limit of a rendering, on top of what the process uses already."""
MAX_OUTPUT_CHARACTERS = 2**24
"""Length limit of the rendered text."""
# Exceptions that a template can raise. Any other ends the child process, which is reported as an error too.
_TEMPLATE_ERRORS = (
    *(TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError),
    *(MemoryError, RuntimeError, ImportError, AssertionError, OSError),
)


class ChatTemplateError(DitLoraError, TemplateError):
    """Raised if a chat template cannot be rendered, or exceeds the limits."""


class _ChatTemplateRenderer:
    """Runs Transformers' function for rendering chat templates in a forked process, to limit its time and memory."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._lock = Lock()
        # Process ids; 0 while there is no child.
        self._owner_pid, self._child_pid = 0, 0
        self._connection: Connection | None = None
        self._num_timeouts: Counter[str | None] = Counter()

    def __call__(self, *args: Any, **options: Any) -> Any:
        template = options.get("chat_template")
        # One request at a time: an answer on the connection belongs to the last request.
        with self._lock:
            # With thousands of samples, waiting for a timeout on each would take hours.
            if self._num_timeouts[template] >= MAX_TIMEOUTS:
                raise ChatTemplateError(
                    f"the checkpoint's chat template took more than {MAX_SECONDS:g} s "
                    f"{MAX_TIMEOUTS} times and is not rendered again"
                )
            # After a fork the child belongs to the parent process: this process needs its own.
            if self._owner_pid != os.getpid():
                self._start_process()
            assert self._connection is not None
            try:
                self._connection.send((args, options))
                if not self._connection.poll(MAX_SECONDS):
                    # The child may be in an endless loop, so it is killed; the next call starts another one.
                    self._stop_process()
                    self._num_timeouts[template] += 1
                    raise ChatTemplateError(f"the checkpoint's chat template takes more than {MAX_SECONDS:g} s")
                # Not `recv`, which would unpickle what the child sends.
                answer = parse_json(self._connection.recv_bytes())
            except (EOFError, ConnectionError) as error:
                self._stop_process()
                raise ChatTemplateError("the checkpoint's chat template ended the process that rendered it") from error
        if "error" in answer:
            raise ChatTemplateError(f"the checkpoint's chat template fails: {answer['error']}")
        return tuple(answer["rendered"])

    def _start_process(self) -> None:
        parent_end, child_end = Pipe()
        child = os.fork()
        if child == 0:
            try:
                # In the child, which has copies of all open files of the parent: open copies would keep its locks.
                # 0 to 2 are the standard streams.
                descriptor, max_files = child_end.fileno(), get_max_open_files()
                os.closerange(3, descriptor)
                os.closerange(descriptor + 1, max_files)
                self._run_render_loop(child_end)
            finally:
                os._exit(0)  # skip atexit handlers and buffers, which belong to the parent
        # The parent's copy: while it is open, the end of the child would not be noticed.
        child_end.close()
        self._owner_pid, self._child_pid, self._connection = os.getpid(), child, parent_end

    def _stop_process(self) -> None:
        if self._connection is None:
            return
        self._connection.close()
        os.kill(self._child_pid, signal.SIGKILL)
        # Collect the exit status, so that no zombie process remains.
        os.waitpid(self._child_pid, 0)
        self._owner_pid, self._child_pid, self._connection = 0, 0, None

    def _run_render_loop(self, connection: Connection) -> None:
        """Render templates in the child process until the parent closes the connection."""
        # A collection would write to memory pages that are shared with the parent, and so copy them.
        gc.disable()
        # Ctrl+C reaches all processes of the terminal; only the parent handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        limit_address_space(MAX_BYTES)
        while True:
            try:
                args, options = connection.recv()
            except (EOFError, OSError):
                return
            # If the parent was killed, nobody stops this process: the alarm ends it.
            signal.setitimer(signal.ITIMER_REAL, 2 * MAX_SECONDS)
            try:
                # A tuple of lists; the first has a text for each conversation.
                rendered = self._function(*args, **options)
                if sum(map(len, rendered[0])) > MAX_OUTPUT_CHARACTERS:
                    raise ValueError(f"it writes more than {MAX_OUTPUT_CHARACTERS:,} characters")
                answer = json.dumps({"rendered": rendered})
            except MemoryError:
                answer = json.dumps({"error": f"it needs more than {MAX_BYTES:,} bytes"})
            except _TEMPLATE_ERRORS as error:
                message = " ".join(str(error)[:400].split())
                answer = json.dumps({"error": message or type(error).__name__})
            # Cancel the alarm: waiting for the next request has no limit.
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(answer.encode())


def limit_chat_template_rendering() -> None:
    """Make Transformers render all chat templates of this process within time and memory limits.

    A second call does nothing. Without forked processes (Windows) there are no limits, only Jinja's sandbox.
    """
    if not CAN_LIMIT_CHILDREN:
        return
    from transformers import processing_utils, tokenization_utils_base

    # Both modules have imported the function by name, so it is replaced in each.
    modules: tuple[Any, ...] = (tokenization_utils_base, processing_utils)
    if not isinstance(tokenization_utils_base.render_jinja_template, _ChatTemplateRenderer):
        renderer = _ChatTemplateRenderer(tokenization_utils_base.render_jinja_template)
        for module in modules:
            module.render_jinja_template = renderer
