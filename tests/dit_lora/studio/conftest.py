"""Pages of the studio that take edits: a run's report, and captions."""

from pathlib import Path

import pytest
from bare_media import write_without_captions
from report_runs import write_run
from starlette.types import ASGIApp

from dit_lora.report.captions.edits import CaptionEdits
from dit_lora.report.captions.page import TextRules
from dit_lora.studio.app import build_app
from dit_lora.studio.caption_pages import CaptionPages
from dit_lora.studio.library import RunLibrary, compute_run_id
from dit_lora.studio.run_pages import RunPages


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "kitten run")


@pytest.fixture
def run_path(run_dir: Path) -> str:
    return f"/runs/{compute_run_id(run_dir)}/"


@pytest.fixture(scope="session")
def both_pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[ASGIApp, dict[str, str]]:
    """An app with a run and captions that tests leave as they are, and the addresses to which its pages write."""
    root = tmp_path_factory.mktemp("both")
    write_without_captions(root / "clips", clips=1, stills=1)
    run_dir = write_run(root / "run")
    runs, captions = RunPages(RunLibrary([run_dir])), CaptionPages(CaptionEdits(root / "clips", TextRules()))
    app = build_app([*runs.list_routes(), *captions.list_routes()])
    return app, {"run": f"/runs/{compute_run_id(run_dir)}/export", "captions": "/captions/caption"}
