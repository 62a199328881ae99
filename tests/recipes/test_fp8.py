"""Runs with `kernels.fp8`: refused by name on a CPU; elsewhere verified at the end, and named for its own faults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_kernels import Armed
from runs import lines

from dit_lora.errors import DitLoraError
from dit_lora.fuse import api
from dit_lora_kernels import lora_linear

Main = Callable[[list[str]], None]
ASKED = ["kernels.fp8=on", "model.dtype=bf16"]


@pytest.fixture
def smoke(smoke: list[str]) -> list[str]:
    """Kernels are compared after the last step, as users' are."""
    return [*smoke, "guard.parity_every=500"]


def test_a_cpu_is_refused_by_name(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match=r"kernels.fp8: fp8 products need a GPU of .* 8\.9"):
        lora_main([*smoke, *ASKED, f"run.dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_a_run_trains_in_it_and_goes_on_without_it_where_it_fails(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its products are a CPU's; from the third step on they give NaN."""
    monkeypatch.setattr(api, "why_no_fp8", lambda: None)
    product, calls = lora_linear.fp8.multiply_fp8, []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(1)
        return product(*args)

    monkeypatch.setattr(lora_linear.fp8, "multiply_fp8", counted)
    args = [*smoke, *ASKED, "train.steps=4", "train.save_every=2", f"run.dir={tmp_path / 'run'}"]
    lora_main(args)
    output = capsys.readouterr().err
    assert "fp8 (8 modules)" in output
    assert len(calls) > 4 * 2 * 8  # steps, forward and backward, layers
    assert lines(tmp_path / "run", "events.jsonl") == []  # neither preflight nor the run's end minds

    armed = Armed(monkeypatch, 2)

    def broken(*args: Any) -> torch.Tensor:
        result = product(*args)
        return result.fill_(torch.nan) if armed.yes else result

    monkeypatch.setattr(lora_linear.fp8, "multiply_fp8", broken)
    lora_main([*args, f"run.dir={tmp_path / 'broken'}"])
    diagnoses = [line["verdict"] for line in lines(tmp_path / "broken", "events.jsonl")]
    assert [(v["cause"], v["switch"]) for v in diagnoses] == [("kernel", "fp8")]
    assert len(lines(tmp_path / "broken", "metrics.jsonl")) == 4
    with pytest.raises(DitLoraError, match=r"kernels\.fp8"):  # another trajectory
        lora_main([*args, "kernels.fp8=off", "train.steps=6", "train.resume=auto"])
