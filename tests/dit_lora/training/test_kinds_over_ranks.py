"""Every kind of adapter over ranks as on one process, by every engine."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import on_ranks
from safetensors.torch import load_file
from topologies import ENGINES_HERE, Case, run_all

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
KINDS = {
    "dora": ["lora.rank=4"],
    "lokr": ["lora.rank=4", "lora.factor=4"],
    "loha": ["lora.rank=4"],
    "oft": ["lora.rank=null", "lora.alpha=null", "lora.block_size=4"],
    "lora": ["lora.rank=4", "lora.init=pissa"],
}


def adapter(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / "adapter").glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("kind", [*KINDS, "eva"])
def test_every_engine_trains_and_verifies_the_same(
    kind: str,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    lora_main: Callable[[list[str]], None],
    tmp_path: Path,
) -> None:
    def args(name: str, *more: str) -> tuple[str, ...]:
        return (
            "recipes/smoke/cogvideox.yaml",
            f"model.path={tiny_checkpoints['cogvideox-5b']}",
            f"data.path={shape_clips}",
            f"data.cache={tmp_path / 'cache'}",
            "data.height=32",
            "data.width=48",
            "train.steps=3",
            *(["lora.init=eva"] if kind == "eva" else [f"lora.kind={kind}", *KINDS[kind]]),
            "validation.prompts=[]",
            "validation.eval_draws=1",
            *more,
            f"run.dir={tmp_path / name}",
        )

    lora_main([*args("one", "train.batch_size=4")])
    # EVA runs the whole model, which no rank of FSDP2 has.
    engines = [engine_name for engine_name in ENGINES_HERE if (kind, engine_name) != ("eva", "fsdp2")]
    cases = [Case(engine, args(engine, "train.batch_size=2")) for engine in engines]
    results_by_rank = on_ranks(2, run_all, cases)
    expected = adapter(tmp_path / "one")
    for number, engine in enumerate(engines):
        assert [(results[number].exit_code, results[number].error) for results in results_by_rank] == [(0, "")] * 2
        torch.testing.assert_close(adapter(tmp_path / engine), expected, rtol=0, atol=2e-5)
        record = json.loads((tmp_path / engine / "verification.json").read_text())
        assert record["passed"], record
