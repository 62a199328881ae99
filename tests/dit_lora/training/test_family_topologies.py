"""Families with blocks of two kinds, experts and timesteps of tokens, over two ranks of each engine: the run of one process, within rounding."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import ROOT, on_ranks
from runs import adapter, lines
from smoke_recipes import SMOKES
from topologies import Case, Engine, run_all

pytestmark = pytest.mark.slow

ENGINES: tuple[Engine, ...] = ("ddp", "fsdp2")
if importlib.util.find_spec("deepspeed") is not None:
    ENGINES = (*ENGINES, "zero2")
# As in test_topologies.py: rounding shows in single elements where a gradient is near zero.
RATE = 1e-3


ALIKE = ("flux", "ltx_video_i2v", "sd3", "qwen_image", "krea2", "wan_i2v", "wan_2.2", "z_image")


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.thorough) for name in ALIKE), "flux2", "wan_5b_i2v"],
)
def test_two_ranks_train_as_one_process(
    name: str,
    tiny_checkpoints: dict[str, Path],
    lora_main: Callable[[list[str]], None],
    shape_clips: Path,
    tmp_path: Path,
) -> None:
    smoke, data = SMOKES[name], shape_clips
    if smoke.write_data is not None:
        data = tmp_path / "data"
        smoke.write_data(data)

    def args(run: str, batch: int, accumulate: int) -> tuple[str, ...]:
        return (
            str(ROOT / "recipes" / "smoke" / f"{name}.yaml"),
            *smoke.overrides,
            f"model.path={tiny_checkpoints[smoke.variant]}",
            f"data.path={data}",
            f"data.cache={tmp_path / 'cache'}",
            "train.steps=3",
            "train.save_every=3",
            f"train.batch_size={batch}",
            f"train.accumulate={accumulate}",
            f"optim.groups.adapter.lr={RATE}",
            "validation.prompts=[]",
            "validation.held_out_draws=0",
            f"run.dir={tmp_path / run}",
        )

    lora_main(list(args("one", 8, 1)))
    cases = [Case(engine, args(engine, 2, 2)) for engine in ENGINES]
    for seen in on_ranks(2, run_all, cases):
        assert [(one.exit_code, one.error) for one in seen] == [(0, "")] * len(cases)
    expected, losses = adapter(tmp_path / "one"), lines(tmp_path / "one", "metrics.jsonl")
    for engine in ENGINES:
        for own, theirs in zip(lines(tmp_path / engine, "metrics.jsonl"), losses, strict=True):
            assert own["loss"] == pytest.approx(theirs["loss"], rel=1e-6), engine
            assert own["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-6), engine
        found = adapter(tmp_path / engine)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 * RATE)
