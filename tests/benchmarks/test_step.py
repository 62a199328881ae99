"""The benchmark of whole steps: tiny models in every setting, with losses that lie on top of each other."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT

SETTINGS = ("example", "compiled blocks", "no checkpointing", "ours")
SIZES = {
    "sana-1.6b": 1_604_462_752,
    "dit-xl2": 749_826_464,
    "cogvideox-2b": 1_693_783_872,
    "cogvideox-5b": 5_570_283_072,
    "wan-1.3b": 1_418_996_800,
    "cogvideox-1.5": 5_570_676_352,
}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.step", *args],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.thorough
def test_every_setting_trains_tiny_models_with_the_same_losses(tmp_path: Path) -> None:
    done = run(
        "--models", "tiny", "--device", "cpu", "--steps", "2", "--out", str(tmp_path)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("step_*.md")
    assert written.read_text() == done.stdout
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "tiny-" in line]
    rows = [row for row in rows if len(row) == 8]
    models = ("tiny-cogvideox", "tiny-sana")
    assert [row[:2] for row in rows] == [[m, s] for m in models for s in SETTINGS]
    for model, setting, seconds, ratio, _, _, ran, difference in rows:
        assert float(seconds.split()[0]) > 0, (model, setting)
        assert float(ratio) > 0
        assert float(difference) < 1e-3, (model, setting)
        if setting != "ours":
            continue
        assert float(difference) > 0, "ours ran the stock code"
        assert "checkpointing none: activations" in ran
        assert "lora_linear" in ran
        assert "ada_norm" in ran


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import step as module

    return module


def test_a_model_that_it_does_not_know_is_refused(
    step: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step.main(["--models", "vast"]) == 2
    assert capsys.readouterr().err.startswith("step: no model is called vast; there are sana")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so(
    step: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("step: there is no CUDA device here")
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_or_fails_says_so_and_the_other_settings_run(
    step: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = step._prepare

    def prepared(model: Any, entry: Any, setting: Any, *rest: Any) -> None:
        if setting.checkpointing == "none":
            raise torch.OutOfMemoryError("no room")
        if setting.compiled:
            raise RuntimeError("no compiler\nhere")
        prepare(model, entry, setting, *rest)

    monkeypatch.setattr(step, "_prepare", prepared)
    monkeypatch.setattr(step, "fuse", lambda *_, **__: None)  # the interpreter would take a minute
    args = ["--models", "tiny-cogvideox", "--device", "cpu", "--steps", "1", "--out", str(tmp_path)]
    assert step.main(args) == 1
    printed = capsys.readouterr()
    assert "| no checkpointing | does not fit | - |" in printed.out
    assert "| compiled blocks | failed: RuntimeError: no compiler | - |" in printed.out
    assert printed.err.endswith(
        "failed: tiny-cogvideox, compiled blocks: RuntimeError: no compiler\n"
    )
    ours = next(line for line in printed.out.splitlines() if "| ours |" in line)
    assert "left out" not in ours
    assert "failed" not in ours


@pytest.mark.parametrize("name", SIZES)
def test_the_real_models_have_their_size_and_take_their_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without weights: shapes alone."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.step_models import MODELS

    class Shapes:
        device = torch.device("meta")

        def normal(self, *size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device="meta")

        def whole(self, _high: int, *size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device="meta")

    model: Any = MODELS[name]
    assert list(MODELS) == list(SIZES)
    with torch.device("meta"):
        transformer = model.kind.from_config(dict(model.config))
    assert sum(p.numel() for p in transformer.parameters()) == SIZES[name]
    given = model.inputs(Shapes())
    out = torch.nn.Module.to(transformer, torch.bfloat16)(**given, return_dict=False)[0]
    assert out.shape[0] == given["hidden_states"].shape[0]
    assert out.shape[-2:] == given["hidden_states"].shape[-2:]
