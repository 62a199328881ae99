"""Fixtures for tests of the guard in other people's loops, which share a process and its state."""

import gc
import logging
from pathlib import Path

import pytest

from dit_lora.guard.attach.calls import outermost_calls
from dit_lora.guard.attach.loop_events import EVENTS
from dit_lora.guard.attach.samples.loaded_batches import LoadedBatches


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A stop without a folder leaves weights where the loop runs.
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _with_no_guard_of_another_test() -> None:
    # A guard whose loop has ended in the midst of its first step would look for models in the next test's.
    gc.collect()
    # The fault suite hides warnings in this process.
    logging.getLogger("dit_lora").setLevel(logging.NOTSET)
    for listener in outermost_calls._list_listeners():
        outermost_calls.remove_listener(listener)
    # The process remembers the batches of all loops, those of another test too.
    vars(EVENTS.batches).update(vars(LoadedBatches()))
