"""`dit-lora check` trains a few steps in a temporary folder, names what differs, and writes one page."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from launching import ROOT, started
from safetensors.torch import save_file
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.commands import check as commands
from dit_lora.commands.check import CheckReport, check_recipe
from dit_lora.errors import DitLoraError

SMOKE = str(ROOT / "recipes" / "smoke" / "cogvideox.yaml")


@pytest.mark.slow
def test_a_sound_machine_passes_and_nothing_is_left_but_the_page(
    smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "run_script", lambda arguments, num_ranks: started(arguments, num_ranks).wait())
    temporary, page = tmp_path / "temporary", tmp_path / "page.html"
    temporary.mkdir()
    monkeypatch.setattr(commands, "TemporaryDirectory", _within(temporary))
    recipe, *overrides = smoke
    run_dir = f"run.dir={tmp_path / 'runs' / 'mine'}"
    arguments = ["check", recipe, *overrides, run_dir, "train.batch_size=1", "train.resume=auto"]
    result = CliRunner().invoke(app, [*arguments, "--html", str(page)], catch_exceptions=False)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.stdout
    assert [line.split("  ")[0] for line in lines[:-1]] == ["passed"] * 5
    assert "gradient against loss: the gradient agrees with the loss: slope / gradient is 1.000" in result.stdout
    assert "tensors of step 4 are equal" in result.stdout
    assert lines[-1] == f"wrote {page}"
    text = page.read_text()
    assert "nothing differs" in text
    assert "lora_linear" in text
    assert str(tmp_path) not in text
    assert not [*temporary.iterdir()]
    assert not (tmp_path / "runs").exists()


def _within(folder: Path) -> Callable[..., Any]:
    make = commands.TemporaryDirectory
    return lambda **options: make(dir=folder, **options)


@dataclass
class FakeRuns:
    """Writes what runs leave in their folders, by the name of the run."""

    codes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    events: Sequence[dict[str, Any]] = ()
    log: str = "kernels: none\nguard: step 1: the gradient agrees with the loss: 1.0000 +- 0.0001\n"
    names: list[str] = field(default_factory=list)

    def run(self, arguments: Sequence[str], num_ranks: int) -> CompletedProcess[str]:
        folder = Path(arguments[-1].removeprefix("run.dir="))
        self.names.append(folder.name)
        assert num_ranks == 1 + (folder.name == "ranks")
        if error := self.errors.get(folder.name):
            return CompletedProcess("", 1, "", f"  reading\rerror: {error}\n")
        for step in (2, 4):
            (folder / "checkpoints" / f"step_00000{step}").mkdir(parents=True)
        state = {"a": torch.ones(2), "b": torch.tensor(self.weights.get(folder.name, 0.0))}
        save_file(state, folder / "checkpoints" / "step_000004" / "x.safetensors")
        loss = self.losses.get(folder.name, 0.5)
        metrics = [{"step": step, "loss": loss, "grad_norm": 1.0} for step in range(1, 5)]
        for name, records in {"metrics.jsonl": metrics, "events.jsonl": self.events}.items():
            (folder / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
        (folder / "environment.json").write_text(json.dumps({"precision": "float32: a CPU", "devices": []}))
        return CompletedProcess("", self.codes.get(folder.name, 0), "", self.log)


def make_event(kind: str, words: str, **evidence: Any) -> dict[str, Any]:
    return {"step": 1, "kind": kind, "verdict": {"words": words, "evidence": evidence}}


@pytest.fixture
def check_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CheckReport]:
    monkeypatch.chdir(tmp_path)
    for folder in ("tiny/cogvideox-2b", "clips"):
        Path(folder).mkdir(parents=True)

    def check(runs: FakeRuns, *overrides: str, num_gpus: int = 0) -> CheckReport:
        monkeypatch.setattr(commands, "run_script", runs.run)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        return check_recipe(SMOKE, overrides, lambda _line: None)

    return check


def outcomes(report: CheckReport) -> dict[str, str]:
    return {result.name.split()[0]: result.outcome for result in report.results}


ALL_PASSED = dict.fromkeys(("training", "kernels", "gradient", "resume,", "two"), "passed")


@pytest.mark.parametrize(
    ("runs", "name", "outcome", "words"),
    [
        (FakeRuns(), "two", "passed", "differ by 0 at most (rounding)"),
        (FakeRuns(events=[make_event("preflight", "rope differs")]), "kernels", "differs", "rope differs"),
        (FakeRuns(events=[make_event("gradient_check", "off", result="differs")]), "gradient", "differs", "off"),
        (
            FakeRuns(events=[make_event("gradient_check", "noise", result="cannot tell")]),
            "gradient",
            "cannot tell",
            "noise",
        ),
        (FakeRuns(log="gradients are not checked with fp8"), "gradient", "not run", "not checked with fp8"),
        (FakeRuns(weights={"resumed": 1.0, "resumed_again": 1.0}), "resume,", "differs", "1 of 2 tensors"),
        (FakeRuns(weights={"resumed": 1.0, "resumed_again": 2.0}), "resume,", "cannot tell", "two equal runs"),
        (FakeRuns(losses={"ranks": 0.51}), "two", "differs", "loss of step 1"),
        (FakeRuns(errors={"ranks": "no\n  port"}), "two", "differs", "no port"),
        (FakeRuns(codes={"first": 3}, log="error: NaN"), "training", "differs", "NaN"),
    ],
)
def test_each_difference_is_named(
    check_with: Callable[..., CheckReport], runs: FakeRuns, name: str, outcome: str, words: str
) -> None:
    report = check_with(runs)
    (result,) = [result for result in report.results if result.name.startswith(name)]
    assert result.outcome == outcome
    assert words in result.message
    assert report.passed == (outcome != "differs")
    # Nothing else differs; a run that fails is not compared further.
    expected = ALL_PASSED | {name: outcome}
    if name == "training":
        expected = {"training": "differs", "kernels": "passed", "gradient": "cannot tell"}
    assert outcomes(report) == expected
    assert f"{outcome:<11}  {result.name}: {result.message}" in report.format_text()
    assert report.to_dict()["passed"] == report.passed


def test_two_ranks_need_devices_and_equal_dropout(check_with: Callable[..., CheckReport]) -> None:
    runs = FakeRuns()
    assert outcomes(check_with(runs, num_gpus=1)) == ALL_PASSED | {"two": "not run"}
    assert runs.names == ["first", "resumed"]
    report = check_with(runs, "lora.dropout=0.1")
    assert "add lora.dropout=0" in report.results[-1].message


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["train.step=3"], "", "train.step: unknown key"),
        (["data.path=gone"], "", "data.path: the folder gone does not exist"),
        (["model.part=both"], "", "one expert at a time"),
        ([], "no clip has a caption", "no clip has a caption"),
    ],
)
def test_a_recipe_that_cannot_train_is_one_error(
    check_with: Callable[..., CheckReport], overrides: list[str], error: str, message: str
) -> None:
    with pytest.raises(DitLoraError) as refused:
        check_with(FakeRuns(errors={"first": error}), *overrides)
    assert message in str(refused.value)
