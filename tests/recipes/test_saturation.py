"""A run of a checkpoint trained in fp16, whose attention goes beyond what fp16 holds."""

from collections.abc import Callable
from pathlib import Path

import pytest
from family_cases.sana import saturating
from launching import ROOT

from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.errors import DitLoraError

Main = Callable[[list[str]], None]


def test_a_saturating_sana_trains_and_says_so_and_without_its_limit_is_refused(
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = saturating(tiny_checkpoints["sana-fp16"], tmp_path / "saturating")
    write_shapes(tmp_path / "images", clips=3, frames=1, height=64, width=96, fps=1)
    recipe = [
        str(ROOT / "recipes" / "smoke" / "sana.yaml"),
        f"model.path={path}",
        f"data.path={tmp_path / 'images'}",
        "train.steps=2",
        "validation.prompts=[]",
    ]
    lora_main([*recipe, f"run.dir={tmp_path / 'run'}"])
    output = capsys.readouterr().err
    assert "saturation: attention is clamped at +-65504 as in the checkpoint's fp16 training" in output
    assert "warning:" not in output

    keep = "dit_lora.families.sana.checkpoint.keep_linear_attention_fp32"
    monkeypatch.setattr(keep, lambda transformer, should_saturate: None)
    with pytest.raises((DitLoraError, SystemExit)) as refused:
        lora_main([*recipe, f"run.dir={tmp_path / 'other'}"])
    captured = capsys.readouterr()
    assert "beyond fp16's 65504" in f"{refused.value} {captured.out} {captured.err}"
