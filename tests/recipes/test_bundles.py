"""Bundles: what `dit-lora replay` needs of a failing micro-batch, and nothing of the machine."""

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT
from runs import lines
from safetensors.torch import load_file, save_file

from dit_lora.commands.replay import replay_bundle
from dit_lora.errors import DitLoraError
from dit_lora.training.recovery import run_recovery

Main = Callable[[list[str]], None]


@pytest.fixture
def bundle(lora_main: Main, poisoned: list[str], tmp_path: Path) -> Path:
    lora_main([*poisoned, f"run.dir={tmp_path / 'run'}", "lora.dropout=0.3"])
    (event,) = lines(tmp_path / "run", "events.jsonl")
    return tmp_path / "run" / event["bundle"]


def test_a_bundle_comes_to_the_recorded_verdict_here_and_elsewhere(
    bundle: Path, bad_clip: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    local_replay = replay_bundle(bundle)
    elsewhere = Path(shutil.copytree(bundle, tmp_path / "mail" / "attached"))
    moved_replay = replay_bundle(elsewhere, model=str(tiny_checkpoints["cogvideox-5b"]))
    for replayed in (local_replay, moved_replay):
        assert replayed.diagnosis is not None
        assert replayed.diagnosis.cause == replayed.recorded_event["verdict"]["cause"] == "data"
        assert replayed.diagnosis.sample_ids == (bad_clip,)
        assert not replayed.notes
    with pytest.raises(DitLoraError, match="cogvideox-5b"):
        replay_bundle(elsewhere)  # its base model is named without its folders


def test_a_bundle_on_another_base_model_says_so(
    bundle: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    changed_base = Path(shutil.copytree(tiny_checkpoints["cogvideox-5b"], tmp_path / "other"))
    (weights,) = (changed_base / "transformer").glob("*.safetensors")
    tensors = load_file(weights)
    next(iter(tensors.values())).add_(1e-3)
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "base model's files differ from those of the run" in replay_bundle(bundle, model=str(changed_base)).notes[0]


def test_a_bundle_holds_no_absolute_path(bundle: Path, tmp_path: Path) -> None:
    roots = [tmp_path, tmp_path.resolve().parents[-2], ROOT, Path.home()]
    for path in bundle.rglob("*"):
        data = path.read_bytes()
        assert not [root for root in roots if f"{root}/".encode() in data], path
    facts = (bundle / "bundle.json").read_text()
    assert not re.search(r'[" =:]/\w', facts)
    assert {path.suffix for path in bundle.iterdir()} == {".json", ".safetensors"}


def test_bundles_are_written_as_far_as_they_are_asked_for(
    lora_main: Main, poisoned: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    lora_main([*poisoned, f"run.dir={run}", "guard.bundles=0"])
    assert not lines(run, "events.jsonl")[0].get("bundle")
    assert not (run / "bundles").exists()


def test_a_bundle_that_cannot_be_written_costs_no_run(
    lora_main: Main,
    poisoned: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_recovery, "write_replay_bundle", full)
    run = tmp_path / "run"
    lora_main([*poisoned, f"run.dir={run}"])
    (event,) = lines(run, "events.jsonl")
    assert (event["action"], event.get("bundle")) == ("quarantine", None)
    assert "No space left on device" in capsys.readouterr().err
