"""Progress on a terminal, and in a pipe or a file."""

import sys

import pytest
from tqdm import tqdm

from dit_lora.environment import progress_bar
from dit_lora.environment.progress_bar import ProgressBar


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar(total=4, desc="training", unit="step", mininterval=0) as bar:
        bar.update(2)
        tqdm.write("a message", file=sys.stderr)
    assert capsys.readouterr().err == "a message\n", "a minute has not passed"
    monkeypatch.setattr(progress_bar, "_LINE_INTERVAL_S", 0.0)
    for leave in (True, False):
        with ProgressBar(total=4, desc="training", unit="step", mininterval=0, leave=leave) as bar:
            bar.set_postfix(loss="0.5", refresh=False)
            bar.update(2)
        output = capsys.readouterr().err
        assert "\r" not in output
        assert output.splitlines()[-1] == "training: 2 of 4 steps, 00:00 elapsed, 00:00 left, loss=0.5"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar(total=2, desc="training", unit="step", mininterval=0) as bar:
        bar.update(2)
    assert "\rtraining: 100%" in capsys.readouterr().err
