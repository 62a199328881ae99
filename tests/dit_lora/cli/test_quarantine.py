"""`dit-lora quarantine`: what a run leaves out is shown, and taken back by name."""

import json
import os
from pathlib import Path

from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.data.loading.quarantine import Quarantine, QuarantineRecord
from dit_lora.errors import DitLoraError
from dit_lora.training.session.run_lock import RunLock


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["quarantine", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def fill(folder: Path) -> Path:
    evidence = {"control": "c.mp4", "replays": {"failed": 3, "of": 3}}
    records = [
        QuarantineRecord("a.mp4", 0, None, 4, "data", "it fails whatever is switched off", evidence=evidence),
        QuarantineRecord("b.mp4", 1, 1, 9, "inputs", "only with this noise"),
    ]
    Quarantine(folder / "quarantine.jsonl", records).save()
    return folder


def test_it_shows_who_is_out_how_long_and_why(tmp_path: Path) -> None:
    output = invoke(fill(tmp_path))
    assert "a.mp4: from epoch 0 on, since step 4\n  data: it fails whatever" in output
    assert 'replays: {"failed": 3, "of": 3}' in output
    assert "b.mp4: from epoch 1 to epoch 1, since step 9" in output
    assert [row["sample_id"] for row in json.loads(invoke(tmp_path, "--json"))["left_out"]] == [
        "a.mp4",
        "b.mp4",
    ]


def test_it_releases_by_name_and_says_so(tmp_path: Path) -> None:
    output = invoke(fill(tmp_path), "--release", "a.mp4")
    assert output.startswith("released a.mp4: train.resume=auto trains on it again\n")
    assert "a.mp4" not in invoke(tmp_path)
    assert invoke(tmp_path, "--release", "b.mp4").endswith("leaves no sample out\n")


def test_a_name_that_is_not_out_and_a_folder_that_is_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for arguments, message in (
        ([tmp_path / "other"], "other is not a run: it has no config.yaml"),
        (
            [fill(tmp_path), "--release", "z.mp4"],
            "has no entry for z.mp4; its entries are: a.mp4, b.mp4",
        ),
        ([tmp_path / "none"], "is not a folder"),
    ):
        result = CliRunner().invoke(app, ["quarantine", *map(str, arguments)])
        assert isinstance(result.exception, DitLoraError)
        assert message in str(result.exception)


def test_nothing_is_released_under_a_run_that_goes_on(tmp_path: Path) -> None:
    lock = RunLock(fill(tmp_path))
    lock.acquire()
    result = CliRunner().invoke(app, ["quarantine", str(tmp_path), "--release", "a.mp4"])
    lock.release()
    assert isinstance(result.exception, DitLoraError)
    assert f"is in use by process {os.getpid()} on" in str(result.exception)
    assert len(Quarantine.load(tmp_path / "quarantine.jsonl").records) == 2
