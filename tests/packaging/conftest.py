"""A release, built once: what both files here look at."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, launch_environment

OUTSIDE = (
    ".git",
    ".venv",
    "build",
    "dist",
    "demo",
    "runs",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, so that nothing of an earlier build and no other test's is in it."""
    copy = tmp_path_factory.mktemp("release") / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*OUTSIDE))
    return copy


@pytest.fixture(scope="session")
def dist(checkout: Path) -> Path:
    """As `make build` makes it: the sdist, and the wheel out of it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    environment = launch_environment()
    process = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return checkout / "dist"
