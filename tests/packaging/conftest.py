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
    ignore = shutil.ignore_patterns(*OUTSIDE)

    def ignore_built(folder: str, names: list[str]) -> set[str]:
        # recipes/demo is part of the tree; the demo's own folder is at the root.
        return set(ignore(folder, names)) - ({"demo"} if Path(folder) != ROOT else set())

    shutil.copytree(ROOT, copy, ignore=ignore_built)
    return copy


@pytest.fixture(scope="session")
def dist(checkout: Path) -> Path:
    """As `make build` makes it: the sdist, and the wheel out of it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    environment = launch_environment()
    process = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return checkout / "dist"
