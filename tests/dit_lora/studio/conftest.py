"""Pages of the studio that take edits: a run's report, and captions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bare_media import write_without_captions
from report_runs import write_run
from starlette.types import ASGIApp
from studio_browser import start_browser

from dit_lora.studio.app import build_app, list_pages
from dit_lora.studio.library import RunLibrary, compute_run_id


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
    app = build_app(list_pages(RunLibrary([root])))
    paths = {
        "run": f"/runs/{compute_run_id(run_dir)}/work/export",
        "captions": f"/data/{compute_run_id(root / 'clips')}/caption",
    }
    return app, paths


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with start_browser() as browser:
        yield browser
