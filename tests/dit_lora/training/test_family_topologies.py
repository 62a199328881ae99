"""Families with two kinds of blocks, experts or timesteps per token: two ranks equal one process, within rounding."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import on_ranks
from runs import adapter, lines, same_adapter
from smoke_recipes import REPRESENTATIVES, RUNS, smoke_args
from topologies import Case, Engine, run_all

pytestmark = pytest.mark.slow

ENGINES: tuple[Engine, ...] = ("ddp", "fsdp2")
if importlib.util.find_spec("deepspeed") is not None:
    ENGINES = (*ENGINES, "zero2")
# As in test_topologies.py: rounding shows in single elements where a gradient is near zero.
RATE = 1e-3


# Families with one kind of block and one timestep per sample, which test_topologies.py has.
ALIKE = ("cogvideox", "dit", "latte", "sana", "sana_video", "video_dit")
TRIED = (
    *(name for family, name in REPRESENTATIVES.items() if family not in ALIKE),
    *("wan_i2v", "wan_2.2", "ltx_video", "ltx2_i2v", "ltx2_sound", "ltx2_ic_lora", "ltx2_ic_lora_sound"),
    *("flux_kontext_masked", "flux2_dev_edit", "qwen_image_edit_masked", "qwen_image_edit_plus"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough) for name in TRIED],
)
def test_two_ranks_train_as_one_process(
    name: str,
    tiny_checkpoints: dict[str, Path],
    lora_main: Callable[[list[str]], None],
    shape_clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And resume as they would have gone on, to the last bit."""
    prepare = RUNS[name].prepare
    prepare(monkeypatch)
    common = smoke_args(name, tiny_checkpoints, shape_clips, tmp_path)

    def args(run: str, batch: int, accumulate: int, *more: str) -> tuple[str, ...]:
        return (
            *common,
            "train.steps=3",
            "train.save_every=2",
            f"train.batch_size={batch}",
            f"train.accumulate={accumulate}",
            f"optim.groups.adapter.lr={RATE}",
            "validation.prompts=[]",
            "validation.references=[]",
            "validation.eval_draws=0",
            *more,
            f"run.dir={tmp_path / run}",
        )

    lora_main(list(args("one", 8, 1)))
    cases = [Case(engine, args(engine, 2, 2), prepare=prepare) for engine in ENGINES]
    for engine in ENGINES:
        resume = f"train.resume={tmp_path / engine / 'checkpoints' / 'step_000002'}"
        cases.append(Case(engine, args(f"{engine}_resumed", 2, 2, resume), prepare=prepare))
    shared = Case("ddp", args("shared", 4, 2, "train.context_parallel=2"), prepare=prepare)
    for *results, refused in on_ranks(2, run_all, [*cases, shared], timeout=1200):
        assert [(result.exit_code, result.error) for result in results] == [(0, "")] * len(cases)
        assert "train.context_parallel=2: " in refused.error
        assert refused.error.endswith(" is not supported; CogVideoX is")
    expected, losses = adapter(tmp_path / "one"), lines(tmp_path / "one", "metrics.jsonl")
    for engine in ENGINES:
        for metrics, theirs in zip(lines(tmp_path / engine, "metrics.jsonl"), losses, strict=True):
            assert metrics["loss"] == pytest.approx(theirs["loss"], rel=1e-6), engine
            assert metrics["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-6), engine
        tensors = adapter(tmp_path / engine)
        torch.testing.assert_close(tensors, expected, rtol=0, atol=2e-2 * RATE)
        assert same_adapter(tmp_path / f"{engine}_resumed", tmp_path / engine)
        (last_metrics,) = lines(tmp_path / f"{engine}_resumed", "metrics.jsonl")
        assert last_metrics["step"] == 3
