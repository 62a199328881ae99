"""Every kind of adapter in whole runs: it trains, resumes bit for bit, verifies, and its own library loads it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_runs import common, write_data
from peft.utils import get_peft_model_state_dict
from runs import lines
from safetensors.torch import load_file
from smoke_recipes import SMOKES, smoke_args

from dit_lora.commands.verify import verify_adapter
from dit_lora.config.load import load_recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

Main = Callable[[list[str]], None]
STARTS = {
    "pissa": ["lora.init=pissa", "lora.rank=4", "lora.alpha=6"],
    "olora": ["lora.init=olora", "lora.rank=4", "lora.rslora=true"],
    "eva": ["lora.init=eva", "lora.rank=4", "lora.alpha=6"],
}
KINDS = {
    "lora": [
        "lora.rslora=true",
        "lora.rank_pattern={'(to_q|q_proj)': 3}",
        "lora.alpha_pattern={'(to_k|k_proj)': 5}",
    ],
    "dora": ["lora.rank=4", "lora.alpha=6"],
    "lokr": ["lora.rank=2", "lora.alpha=3", "lora.factor=4"],
    "loha": ["lora.rank=3", "lora.alpha=5"],
    "oft": ["lora.rank=null", "lora.alpha=null", "lora.block_size=4"],
}
DIFFUSION = ("cogvideox", "sana", "flux2", "wan")
IN_CI = (
    ("cogvideox", "dora"),
    ("cogvideox", "pissa"),
    ("flux2", "lokr"),
    ("sana", "oft"),
    ("wan", "loha"),
)
"""One row of each kind; the others repeat them."""


def words_of(kind: str) -> list[str]:
    return STARTS[kind] if kind in STARTS else [f"lora.kind={kind}", *KINDS[kind]]


@pytest.fixture
def arguments(
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], list[str]]:
    """The smoke recipe of a family, quick and with nothing shown."""

    def args(name: str) -> list[str]:
        if name == "videochat2":
            data = tmp_path / "chat"
            write_data(data)
            return common(name, tiny_checkpoints["videochat2-mistral"], data, tmp_path)
        SMOKES[name].prepare(monkeypatch)
        return [
            *smoke_args(name, tiny_checkpoints, shape_clips, tmp_path),
            "validation.prompts=[]",
            "validation.eval_draws=0",
        ]

    return args


def trained(run: Path) -> dict[str, torch.Tensor]:
    """What its last checkpoint holds, the optimizer's state too."""
    checkpoint = max((run / "checkpoints").glob("step_*"))
    return load_file(checkpoint / "trainable.safetensors") | load_file(checkpoint / "optimizer.safetensors")


def resumed(main: Main, args: list[str], folder: Path) -> Path:
    """Train four steps at once, and two and two; return the first run, once both ended with the same bits."""
    uninterrupted, parts = folder / "whole", folder / "parts"
    args = [*args, "train.save_every=2"]
    main([*args, "train.steps=4", f"run.dir={uninterrupted}"])
    # The run above compares kernels before its first step and after its last.
    args += ["guard.preflight=false", "guard.parity_every=0"]
    main([*args, "train.steps=2", f"run.dir={parts}"])
    main([*args, "train.steps=4", f"run.dir={parts}", "train.resume=auto"])
    ours, theirs = trained(uninterrupted), trained(parts)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert not lines(uninterrupted, "events.jsonl")
    return uninterrupted


def rows() -> list[Any]:
    return [
        pytest.param(name, kind, marks=[] if (name, kind) in IN_CI else pytest.mark.thorough)
        for name in (*DIFFUSION, "videochat2")
        for kind in (*KINDS, *STARTS)
    ]


@pytest.mark.parametrize(("name", "kind"), rows())
def test_it_trains_resumes_bit_for_bit_and_is_loaded_as_trained(
    lora_main: Main, arguments: Callable[[str], list[str]], tmp_path: Path, name: str, kind: str
) -> None:
    run = resumed(lora_main, [*arguments(name), *words_of(kind)], tmp_path)
    # By its own library, from disk, over the base from disk.
    verification = verify_adapter(run)
    assert verification.passed, "\n".join(verification.format_lines())
    assert "as trained" in verification.checks["output"].message
    assert len(verification.modules) > 0
    assert all(0 < module.norm < torch.inf for module in verification.modules)


REFUSED = {("dora", "int8"), ("dora", "fp8"), ("dora", "nf4"), ("lokr", "nf4"), ("loha", "nf4")}
"""PEFT's layers of these compute with the weight itself, or with its shape."""
TOGETHER = {
    "averages, dropped captions, accumulation": [
        "train.ema=0.5",
        "data.caption_dropout=0.5",
        "train.accumulate=2",
    ],
    "bf16": ["model.dtype=bf16"],
    "checkpointing": ["train.checkpointing=full"],
    "selective checkpointing": ["train.checkpointing=selective"],
    "group offload": ["train.offload=group", "train.checkpointing=full"],
    "kernels": ["kernels.ada_norm=on"],
    "compiled": ["train.compile=true"],
    "preserve": ["train.preserve={trigger: red, class_words: painted}"],
    "int8": ["model.quantize=int8"],
    "nf4": ["model.quantize=nf4"],
    "fp8": ["model.quantize=fp8"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("further", TOGETHER)
@pytest.mark.parametrize("kind", [*KINDS, *STARTS])
def test_it_goes_with_what_a_run_may_have(
    lora_main: Main, arguments: Callable[[str], list[str]], tmp_path: Path, kind: str, further: str
) -> None:
    args = [*arguments("cogvideox"), *words_of(kind), *TOGETHER[further]]
    if (kind, further) in REFUSED:
        with pytest.raises(DitLoraError, match=f"quantised to {further}"):
            lora_main([*args, "train.steps=2", f"run.dir={tmp_path / 'run'}"])
        return
    run = resumed(lora_main, args, tmp_path)
    verification = verify_adapter(run)
    assert verification.passed, "\n".join(verification.format_lines())


@pytest.mark.parametrize("name", ["flux2", pytest.param("z_image", marks=pytest.mark.thorough)])
def test_these_pipelines_take_lokr_by_load_lora_weights(
    lora_main: Main, arguments: Callable[[str], list[str]], tmp_path: Path, name: str
) -> None:
    lora_main([*arguments(name), *words_of("lokr"), "train.steps=1", f"run.dir={tmp_path / 'run'}"])
    recipe = load_recipe(tmp_path / "run" / "config.yaml")
    pipeline = get_family(recipe.model.family).open(recipe.model).sampler.pipeline(torch.float32)
    pipeline.load_lora_weights(tmp_path / "run" / "adapter")
    stored = load_file(tmp_path / "run" / "adapter" / "pytorch_lora_weights.safetensors")
    state = get_peft_model_state_dict(pipeline.transformer, adapter_name="default_0")
    assert {f"transformer.{key}" for key in state} == stored.keys()
    assert all(torch.equal(tensor, stored[f"transformer.{key}"]) for key, tensor in state.items())
