"""`benchmarks.interrupt`: what it finds wrong with a run that was interrupted."""

from pathlib import Path

import pytest

from benchmarks import interrupt

POLITE = "trap 'echo to continue, add train.resume=auto; exit 130' INT; echo ready; sleep 60 & wait"
RUDE = "trap 'echo Traceback; exit 1' INT; echo ready; sleep 60 & wait"


@pytest.mark.parametrize(
    ("script", "problems"),
    [
        (POLITE, []),
        (RUDE, ["printed a traceback", "ended with exit code 1"]),
        ("trap 'exit 130' INT; echo ready; sleep 60 & wait", ["did not say how to continue"]),
    ],
)
def test_a_run_is_interrupted_and_continued(
    script: str, problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    continued = tmp_path / "continued"
    monkeypatch.setattr(interrupt, "COMMAND", ("sh", "-c", script))
    monkeypatch.setattr(interrupt, "differences", lambda run, reference, steps: ["the adapter differs"])

    def record(args: list[str]) -> None:
        continued.write_text(args[-1])

    trial = interrupt.Trial(record, [], tmp_path, steps=4)
    found, end = trial.interrupt("one", "ready", 0.1)
    assert found == [*problems, "the adapter differs"]
    assert end.startswith("exit code 1")
    assert continued.read_text() == "train.resume=auto"


def test_a_run_that_cannot_be_continued_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(args: list[str]) -> None:
        raise SystemExit(2)

    monkeypatch.setattr(interrupt, "COMMAND", ("sh", "-c", POLITE))
    found, _ = interrupt.Trial(refuse, [], tmp_path, steps=4).interrupt("one", "ready", 0.1)
    assert found == ["continued with exit code 2"]
