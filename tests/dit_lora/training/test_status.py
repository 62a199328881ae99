"""The folder says how a run ended, and what it trains on, however long the lists."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dit_lora.data.loading.training_set import TrainingData
from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.training.status import record_run_status, write_data_record


def session(folder: Path, *, is_main: bool = True) -> Any:
    return SimpleNamespace(dir=folder, is_main=is_main)


def status(folder: Path) -> Any:
    return json.loads((folder / "status.json").read_text())


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, "finished"),
        (NonFiniteError("NaN", {}), "stopped"),
        (InterruptedRunError("asked", 130), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(143), "interrupted"),
        (DitLoraError("disk"), "failed"),
        (ZeroDivisionError(), "failed"),
    ],
)
def test_the_last_word_is_how_the_run_ended(tmp_path: Path, error: BaseException | None, state: str) -> None:
    def body() -> None:
        with record_run_status(session(tmp_path), "/home/me/secret/kitten.yaml"):
            assert status(tmp_path) == {"state": "running", "recipe": "kitten.yaml"}
            if error is not None:
                raise error

    if error is None:
        body()
    else:
        with pytest.raises(type(error)):
            body()
    assert status(tmp_path)["state"] == state


def test_only_the_main_process_writes_and_a_full_disk_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with record_run_status(session(tmp_path, is_main=False), "a.yaml"):
        pass
    none: Any = SimpleNamespace(entries=[])
    write_data_record(session(tmp_path, is_main=False), TrainingData(none, "", ""))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "status.json").mkdir()
    with record_run_status(session(tmp_path), "a.yaml"):
        pass


def test_the_data_record_lists_at_most_500_rejects_and_counts_all(tmp_path: Path) -> None:
    rejected = {f"{i}.mp4": "too short" for i in range(900)}
    dropped = [{"id": str(i)} for i in range(900)]
    report: Any = SimpleNamespace(as_dict=lambda: {"buckets": [], "dropped": list(dropped), "advice": []})
    clips: Any = SimpleNamespace(entries=[1, 2, 3])
    write_data_record(session(tmp_path), TrainingData(clips, "", "", rejected, report))
    record = json.loads((tmp_path / "data.json").read_text())
    assert (record["samples"], record["rejected_count"]) == (3, 900)
    assert len(record["rejected"]) == len(record["buckets"]["dropped"]) == 500


def test_the_last_word_is_true_though_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the room of the first, whichever is longer."""

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    def body() -> None:
        with record_run_status(session(tmp_path), "kitten.yaml"):
            size.append((tmp_path / "status.json").stat().st_size)
            monkeypatch.setattr("dit_lora.training.status.write_atomically", full)
            raise InterruptedRunError("asked", 130)

    size: list[int] = []
    with pytest.raises(InterruptedRunError):
        body()
    assert status(tmp_path) == {"state": "interrupted", "recipe": "kitten.yaml"}
    assert (tmp_path / "status.json").stat().st_size == size[0]
