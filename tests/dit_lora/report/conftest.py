"""A run's folder."""

from pathlib import Path

import pytest
from report_runs import write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "kitten-run")
