"""How long the loop waited for data: said once while it trains, and at its end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import lines

from dit_lora.data.loading.encoded import EncodedClips
from dit_lora.training import journal

Main = Callable[[list[str]], None]


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    read = EncodedClips.read

    def slow(clips: EncodedClips, *rest: Any) -> Any:
        time.sleep(seconds)
        return read(clips, *rest)

    monkeypatch.setattr(EncodedClips, "read", slow)


def test_a_slow_loader_is_told_once_and_in_the_summary(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(journal, "WINDOW", 4)
    monkeypatch.setattr(journal, "STARVED", 0.02)  # on a busy machine everything else is slow too
    slowed(monkeypatch, 0.05)
    lora_main([*smoke, "train.steps=7", "guard.preflight=false", f"run.dir={tmp_path / 'run'}"])
    output = capsys.readouterr().err
    assert output.count("the last 4 steps waited for data for") == 1
    assert "warning: step 4: " in output
    assert "raise data.workers (0) or data.prefetch, or put data.cache on a local disk" in output
    steps = lines(tmp_path / "run", "metrics.jsonl")
    assert all(0.1 < step["data_seconds"] < step["seconds"] for step in steps)  # of two samples


@pytest.mark.parametrize(("waited", "told_at"), [(0.19, None), (0.21, 50)])
def test_it_is_told_when_fifty_steps_waited_for_more_than_a_fifth(
    tmp_path: Path, waited: float, told_at: int | None
) -> None:
    run_journal = journal.Journal(tmp_path, start_step=0)
    line = {"data_seconds": 2 * waited, "seconds": 2.0}
    messages = {step: run_journal.check_dataloader_bottleneck(line, num_workers=2) for step in range(1, 120)}
    assert [step for step, message in messages.items() if message] == ([told_at] if told_at else [])
    if told_at:
        assert "waited for data for 21% of their time: raise data.workers (2)" in str(messages[told_at])


def test_a_slow_start_is_forgotten(tmp_path: Path) -> None:
    """Workers start in the first step."""
    run_journal = journal.Journal(tmp_path, start_step=0)
    slow, quick = ({"data_seconds": wait, "seconds": 2.0} for wait in (1.9, 0.1))
    lines_ = [slow] * 5 + [quick] * 200
    assert not any(run_journal.check_dataloader_bottleneck(line, num_workers=2) for line in lines_)
