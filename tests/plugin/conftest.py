"""A stop without a folder leaves weights where the loop runs: each test does so in a folder of its own."""

import gc
import logging
from pathlib import Path

import pytest

from dit_lora.guard.attach import outermost_calls


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _with_no_guard_of_another_test() -> None:
    # A guard whose loop has ended in the midst of its first step would look for models in the next test's.
    gc.collect()
    logging.getLogger("dit_lora").setLevel(
        logging.NOTSET
    )  # the fault suite, in this process, hides warnings
    for listener in outermost_calls._present():
        outermost_calls.leave(listener)
