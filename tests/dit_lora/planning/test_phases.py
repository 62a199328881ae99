"""Phases of a run beside training."""

from pathlib import Path

import pytest
import torch
from launching import ROOT

from dit_lora.config.load import load_recipe
from dit_lora.planning.budget import Launch, MemoryBudget, count
from dit_lora.planning.search import subject_of
from dit_lora.training.tasks.registry import task_of


@pytest.mark.parametrize("quantize", ["null", "int8"])
def test_a_second_checkpoint_for_samples_is_counted_where_it_is_held(
    tiny_checkpoints: dict[str, Path], quantize: str
) -> None:
    base = tiny_checkpoints["cogvideox-5b"]
    common = [f"model.path={base}", "data.path=/nowhere", f"model.quantize={quantize}"]
    common += ["data.width=128", "data.height=128", "validation.prompts=[x]"]

    def budget(*overrides: str) -> MemoryBudget:
        file = ROOT / "recipes" / "smoke" / "cogvideox.yaml"
        recipe = load_recipe(file, [*common, *overrides])
        return count(recipe, subject_of(recipe, gpu=False), Launch(), None)

    without, beside = budget(), budget(f"validation.model={base}")
    subject = subject_of(without.recipe, gpu=False)
    model, _, _ = task_of("cogvideox").load_trainable(
        without.recipe, subject.family, subject.checkpoint, torch.float32
    )
    held = sum(p.nbytes for p in model.parameters())
    assert beside.phases["validation"] - without.phases["validation"] == held
    assert beside.phases["training"] == without.phases["training"]
    assert beside.host["a second transformer"] == without.training.weights
