"""Continued files, frozen adapters, output preservation, a second model for samples: two ranks equal one process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exported import trained
from launching import on_ranks
from runs import adapter, lines
from safetensors.torch import load_file
from topologies import ENGINES_HERE, Case, run_all

from dit_lora.adapters.diffusers_format import ADAPTER_FILE

pytestmark = pytest.mark.slow


@pytest.mark.thorough  # each engine is in test_topologies.py, each kind of file on one process in recipes
def test_every_engine_trains_shows_and_verifies_the_same(
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    lora_main: Callable[[list[str]], None],
    tmp_path: Path,
) -> None:
    base = tiny_checkpoints["cogvideox-5b"]
    start, frozen_adapter = (
        trained("cogvideox", base, tmp_path / name, rank=3, seed=seed, scale=0.05).folder
        for name, seed in (("start", 1), ("under", 2))
    )

    def args(name: str, *more: str) -> tuple[str, ...]:
        return (
            "recipes/smoke/cogvideox.yaml",
            f"model.path={base}",
            f"data.path={shape_clips}",
            f"data.cache={tmp_path / 'cache'}",
            "data.height=32",
            "data.width=48",
            "train.steps=2",
            f"lora={json.dumps({'init': str(start), 'under': [str(frozen_adapter / ADAPTER_FILE)]})}",
            "train.preserve={trigger: red, class_words: painted}",
            "validation.prompts=[x]",
            "validation.inference_steps=1",
            "validation.eval_draws=1",
            f"validation.model={base}",
            *more,
            f"run.dir={tmp_path / name}",
        )

    lora_main([*args("one", "train.batch_size=4")])
    cases = [Case(engine, args(engine, "train.batch_size=2")) for engine in ENGINES_HERE]
    results_by_rank = on_ranks(2, run_all, cases)
    for number, engine in enumerate(ENGINES_HERE):
        assert [(results[number].exit_code, results[number].error) for results in results_by_rank] == [(0, "")] * 2
        run = tmp_path / engine
        single_rank, parts = (lines(folder, "eval_loss.jsonl") for folder in (tmp_path / "one", run))
        assert [row["eval_loss"] for row in parts] == pytest.approx(
            [row["eval_loss"] for row in single_rank], rel=1e-5
        )
        torch.testing.assert_close(adapter(run), adapter(tmp_path / "one"), rtol=0, atol=2e-5)
        # The last save gathers the same adapter.
        saved = load_file(run / "checkpoints" / "step_000002" / ADAPTER_FILE)
        torch.testing.assert_close(saved, adapter(run), rtol=0, atol=0)
        sample_paths = [folder / "samples/step_000000/prompt_00.mp4" for folder in (run, tmp_path / "one")]
        assert sample_paths[0].read_bytes() == sample_paths[1].read_bytes()
        assert (run / "samples" / "step_000002" / "prompt_00.mp4").is_file()
        assert json.loads((run / "verification.json").read_text())["passed"]
