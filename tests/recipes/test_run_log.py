"""What a normal run prints outside of a terminal: a short log, written as it happens, that ends with commands."""

from collections.abc import Callable
from pathlib import Path

import pytest
from runs import require_short_log

OPTIONS = ["train.steps=8", "train.save_every=4", "validation.every=4", "validation.eval_draws=1"]


def test_the_log_of_a_normal_run(
    lora_main: Callable[[list[str]], None], smoke: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    prompts = ["validation.prompts=[a red circle]", "validation.inference_steps=2"]
    lora_main([*smoke, *OPTIONS, *prompts, f"run.dir={run}"])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\r" not in captured.err
    lines = require_short_log(captured.err, run)
    assert "triton" not in captured.err.lower()
    told = [line.partition(" 0.")[0].partition(" 1.")[0] for line in lines if line.startswith("step ")]
    # A checkpoint is written in another thread, so its line may come after the next loss.
    assert sorted(told) == [
        *(f"step {step}: eval loss" for step in (0, 4)),
        "step 4: saved runs/demo/checkpoints/step_000004",
        *(f"step {step}: eval loss" for step in (8,)),
    ]
    assert "% since step 0)" in next(line for line in lines if line.startswith("step 8: eval loss"))
    assert lines[-6].startswith("after the last step ")
    assert lines[-6].endswith(" s, with fewer checks in a short run: see the report")
    assert [line.partition(":")[0] for line in lines[-5:-3]] == ["adapter", "verified"]
    assert lines[-3:] == [
        "next: dit-lora sample runs/demo --prompt '...'",
        "      dit-lora report runs/demo --serve  # or open its report.html",
        "      dit-lora push runs/demo OWNER/NAME",
    ]
