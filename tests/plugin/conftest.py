"""A stop without a folder leaves weights where the loop runs: each test does so in a folder of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dit_lora.guard.plugin import outermost


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    # A guard whose loop has ended in the midst of its first step would look for models in the next test's.
    for listener in list(outermost._listeners):
        outermost.leave(listener)
