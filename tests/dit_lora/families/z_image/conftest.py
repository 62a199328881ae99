"""The tiny base, which most tests of the family open."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["z-image"]
