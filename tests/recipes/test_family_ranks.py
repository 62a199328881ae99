"""A smoke recipe of each family on two ranks: the same run as on one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import adapter, trajectory
from smoke_recipes import REPRESENTATIVES, RUNS, smoke_args
from topologies import ENGINES_HERE, ENVIRONMENT

from dit_lora.config.load import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
COMMON = ("train.steps=4", "validation.prompts=[]", "validation.eval_draws=0", "guard.preflight=false")


@pytest.mark.parametrize("engine", ENGINES_HERE)
@pytest.mark.parametrize("name", sorted(REPRESENTATIVES.values()))
def test_two_ranks_train_as_one_process_does(
    name: str,
    engine: str,
    launch: Callable[..., Any],
    lora_main: Callable[[list[str]], None],
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RUNS[name].prepare(monkeypatch)
    args = [*smoke_args(name, tiny_checkpoints, shape_clips, tmp_path), *COMMON]
    if load_recipe(args[0], args[1:]).train.mode == "full":
        pytest.skip("it trains all weights")
    one_process, two_ranks = tmp_path / "one", tmp_path / "two"
    lora_main([*args, "train.batch_size=2", f"run.dir={one_process}"])
    result = launch([*args, "train.batch_size=1", f"run.dir={two_ranks}"], ranks=2, env=ENVIRONMENT[engine])
    assert result.returncode == 0, result.stderr
    torch.testing.assert_close(trajectory(two_ranks), trajectory(one_process), rtol=1e-4, atol=0)
    expected = adapter(one_process)
    # Adam divides each element's gradient by its own size: where that is near zero, rounding shows.
    torch.testing.assert_close(adapter(two_ranks), expected, rtol=0, atol=2e-5)
