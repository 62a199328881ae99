"""Serve a run's report to a browser on this machine, updated as the run proceeds, with byte ranges for videos."""

import json
import re
import secrets
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from urllib.parse import unquote, urlsplit

from dit_lora.errors import DitLoraError
from dit_lora.files import is_inside, open_inside
from dit_lora.report.local_server import LocalServer, PageHandler, serve_until_interrupted
from dit_lora.report.run.files import RunReader
from dit_lora.report.run.page import form_of, render_run
from dit_lora.report.run.samples import TYPES, checkpoint_file

_MOST = 2**12  # maximum bytes of a request
# Samples of prompts, and the small copies of references. Nothing else in the folder is served.
_SAMPLE = re.compile(
    r"samples/(step_[0-9]+/prompt_[0-9]+\.(mp4|png)|references/prompt_[0-9]+_[0-9]+\.(mp4|jpg))"
)


Export = Callable[[Path, str, Path], object]
"""Called with a checkpoint file, an export format and a new folder; an exception gives the reason for a failure."""


class Pages:
    """The page of the folder's current state, rendered once per state; with `export`, steps can be exported
    from it.
    """

    def __init__(self, folder: Path, export: Export | None = None) -> None:
        self.folder = Path(folder)
        self.token = secrets.token_urlsafe() if export else ""
        self._export, self._exporting = export, Lock()
        self._reader = RunReader(self.folder)
        self._lock = Lock()
        self._page, self._of = "", ""

    def fingerprint(self) -> str:
        return self._reader.fingerprint()

    def page(self) -> str:
        """The current page.

        Raises:
            DitLoraError: If the folder is no longer a run.
        """
        with self._lock:
            # Before reading: a change while the page is rendered shows up in the next fingerprint.
            current_fingerprint = self.fingerprint()
            if current_fingerprint != self._of:
                run = self._reader.read()
                self._page = render_run(
                    run, embed=False, live=current_fingerprint, token=self.token
                )
                self._of = current_fingerprint
            return self._page

    def take(self, step: int) -> str:
        """Export a step's checkpoint into the run's folder; returns the relative path.

        Raises:
            DitLoraError: If the step has no checkpoint, or was exported before.
        """
        file, form = checkpoint_file(self.folder, step), form_of(self._reader.read().config)
        if self._export is None or form is None or not is_inside(self.folder, file):
            raise DitLoraError(f"there is no checkpoint of step {step} to export any more")
        export_path = f"exports/step_{step:06d}"
        # A link could redirect the export to a folder outside the run.
        for path in (self.folder / "exports", self.folder / export_path):
            if path.is_symlink():
                raise DitLoraError(f"{path} is a link, through which nothing is written; remove it")
        # One export at a time: each loads the adapter.
        with self._exporting:
            self._export(file, form, self.folder / export_path)
        return export_path


class ReportServer(LocalServer):
    """Serves one run's report."""

    def __init__(self, folder: Path, port: int = 0, export: Export | None = None) -> None:
        pages = Pages(folder, export)
        pages.page()  # raises for a folder that is not a run, before a port is opened
        super().__init__(partial(_Handler, pages), port, pages.token)


def serve(
    folder: Path, port: int, tell: Callable[[str], None], export: Export | None = None
) -> None:
    """Serve until Ctrl-C; `tell` receives the address and the closing message."""
    serve_until_interrupted(ReportServer(folder, port, export), folder, tell)


class _Handler(PageHandler):
    def __init__(self, pages: Pages, *args: object) -> None:
        self.pages = pages
        super().__init__(*args)  # type: ignore[arg-type]

    def show(self) -> None:
        try:
            path = unquote(urlsplit(self.path).path).lstrip("/")
        except ValueError:  # a bracket that does not start an IPv6 address
            self.say(HTTPStatus.BAD_REQUEST, "this is no path")
            return
        if path not in ("", "state"):
            self._sample(path)
            return
        try:
            if path == "state":
                state = {"fingerprint": self.pages.fingerprint()}
                text, kind = json.dumps(state), "application/json"
            else:
                text, kind = self.pages.page(), "text/html; charset=utf-8"
        except (DitLoraError, OSError) as error:
            self.say(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            return
        self.send(text, kind)

    def take(self) -> None:
        values = self.sent("/export", _MOST) if self.pages.token else None
        if values is None:
            if not self.pages.token:
                super().take()
            return
        step = values.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            self.say(HTTPStatus.BAD_REQUEST, "a step is a number")
            return
        try:
            written = self.pages.take(step)
        except (DitLoraError, OSError) as error:
            self.say(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            return
        self.send(json.dumps({"written": written}), "application/json")

    def _sample(self, path: str) -> None:
        """Send a sample file; no other file of the folder is served."""
        root = self.pages.folder
        # Opening the folder itself fails, which gives a 404.
        sample = root / path if _SAMPLE.fullmatch(path) else root
        self.file(partial(open_inside, root, sample), TYPES.get(sample.suffix, ""))
