"""Phases of a run other than training."""

from pathlib import Path

import pytest
import torch
from exported import trained
from launching import ROOT
from safetensors.torch import load_file

from dit_lora.adapters.diffusers_format import ADAPTER_FILE
from dit_lora.config.load import load_recipe
from dit_lora.planning.budget import LaunchLayout, MemoryBudget, compute_budget
from dit_lora.planning.search import open_estimator
from dit_lora.training.tasks.registry import get_task_of_family


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
        return compute_budget(recipe, open_estimator(recipe, is_gpu=False), LaunchLayout(), None)

    baseline, second_model = budget(), budget(f"validation.model={base}")
    subject = open_estimator(baseline.recipe, is_gpu=False)
    model, _, _ = get_task_of_family("cogvideox").load_trainable(
        baseline.recipe, subject.family, subject.checkpoint, torch.float32
    )
    model_bytes = sum(p.nbytes for p in model.parameters())
    assert second_model.phase_bytes["validation"] - baseline.phase_bytes["validation"] == model_bytes
    assert second_model.phase_bytes["training"] == baseline.phase_bytes["training"]
    assert second_model.host_bytes["a second transformer"] == baseline.training.weights


def test_the_rank_is_the_files_and_a_frozen_adapter_counts_as_frozen(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    base = tiny_checkpoints["cogvideox-5b"]
    start = trained("cogvideox", base, tmp_path / "start", rank=3).folder
    frozen_adapter = trained("cogvideox", base, tmp_path / "under", rank=5, targets=("to_q",)).folder
    common = [f"model.path={base}", "data.path=/nowhere", "data.width=128", "data.height=128"]

    def weights(lora: str) -> tuple[int, int]:
        recipe = load_recipe(ROOT / "recipes" / "smoke" / "cogvideox.yaml", [*common, lora])
        budget = compute_budget(recipe, open_estimator(recipe, is_gpu=False), LaunchLayout(), None)
        return budget.training.weights, budget.training.trained

    frozen_bytes, trainable_bytes = weights("lora={rank: 6}")
    adapter_bytes = sum(t.nbytes for t in load_file(frozen_adapter / ADAPTER_FILE).values())
    file = frozen_adapter / ADAPTER_FILE
    assert weights(f"lora={{init: {start}, under: [{file}]}}") == (
        frozen_bytes + adapter_bytes,
        trainable_bytes // 2,
    )
