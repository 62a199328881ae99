"""`guard.gradient_every` compares gradients of a run with its loss, and changes nothing of it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from runs import lines, same_adapter

from dit_lora.guard.replay import MicroBatch
from dit_lora.training.recovery import gradient_watch

Main = Callable[[list[str]], None]


def test_a_gradient_that_is_not_the_losss_is_reported_and_the_run_goes_on(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [*smoke, "train.steps=4", "train.batch_size=1", "train.accumulate=2", "lora.dropout=0.2"]
    args += ["guard.preflight=false", "guard.parity_every=0"]
    clean, checked = tmp_path / "clean", tmp_path / "checked"
    lora_main([*args, f"run.dir={clean}"])
    compute_terms, steps = gradient_watch.compute_loss_terms, []

    def compute_other_terms(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """From the second check on, the loss's slope is twice the gradient."""
        steps.append(micro_batches[0].step)
        return compute_terms(micro_batches) * (2 if micro_batches[0].step > 1 else 1)

    monkeypatch.setattr(gradient_watch, "compute_loss_terms", compute_other_terms)
    lora_main([*args, f"run.dir={checked}", "guard.gradient_every=3"])
    assert set(steps) == {1, 3}
    assert same_adapter(clean, checked)
    (event,) = [event for event in lines(checked, "events.jsonl") if event["kind"] == "gradient_check"]
    assert (event["step"], event["action"], event["gradient"]["result"]) == (3, "report", "differs")
    assert event["gradient"]["ratio"] == pytest.approx(2, abs=event["gradient"]["bound"])
    # All layers are wrong: the last one is named, and those before it.
    assert event["verdict"]["module"] == "transformer_blocks.1.attn1.to_out.0"
    assert event["verdict"]["words"].endswith("transformer_blocks.1.attn1.to_out.0 and layers before it")
    assert not [event for event in lines(clean, "events.jsonl") if event["kind"] == "gradient_check"]
