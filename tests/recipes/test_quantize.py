"""Recipes with `model.quantize`, end to end: train, resume bit for bit, and adapters that fit the stock model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_runs import common as chat_recipe
from chat_runs import write_data
from peft import PeftModel
from runs import lines
from safetensors import safe_open
from safetensors.torch import load_file
from smoke_recipes import RUNS, smoke_args

from dit_lora.adapters.groups import find_base_members
from dit_lora.adapters.lora_mixins import with_lora
from dit_lora.adapters.quantize import count_parameter_bytes, count_quantized_bytes
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.numerics.quantized_linear import Quantization

Main = Callable[[list[str]], None]
# Modules of a width that no config changes, which is most of a tiny model.
FIXED_WIDTH = {"hunyuan_video15": "context_embedder_2"}
# Of some families other tiny checkpoints than their smoke recipes'.
VARIANTS = {"cogvideox": "cogvideox-2b", "sana": "sana-600m", "videochat2": "videochat2-mistral"}
FAMILIES = (
    *("cogvideox", "sana", "flux", "flux2", "krea2", "ltx2_sound", "ltx_video", "qwen_image"),
    *("sd3", "wan", "z_image", "videochat2", "chroma", "ernie_image", "ideogram4", "anima", "kandinsky5"),
    "hunyuan_video15",
)
# Of what those train with other data.
GIVEN_MORE = (
    *("flux_kontext_masked", "flux2_dev_edit", "qwen_image_edit_masked", "qwen_image_edit_plus"),
    *("ltx_video_i2v", "ltx2", "ltx2_i2v", "ltx2_ic_lora", "ltx2_ic_lora_sound"),
)
IN_CI = (("cogvideox", "nf4"), ("videochat2", "int8"))
COMBINATIONS = [
    pytest.param(name, kind, marks=() if (name, kind) in IN_CI else pytest.mark.thorough)
    for name in FAMILIES
    for kind in ("nf4", "int8", "fp8")
]
COMBINATIONS += [pytest.param(name, "nf4", marks=pytest.mark.thorough) for name in GIVEN_MORE]


@pytest.fixture(autouse=True)
def bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")


def recipe(name: str, paths: dict[str, Path], clips: Path, tmp_path: Path) -> list[str]:
    """A smoke recipe of four steps, with checkpointing, sampling and every check before the first step."""
    if name in CHAT_FAMILIES:
        args = chat_recipe(name, paths[VARIANTS[name]], write_data(tmp_path / "data"), tmp_path)
        return [*args, "train.steps=4", "train.save_every=2", "train.checkpointing=full"]
    smoke = RUNS[name]
    # LTX-2's VAE decodes two latents a side or more.
    own_size = smoke.write_data is not None or name.startswith("ltx2")
    sizes = () if own_size else ("data.height=32", "data.width=64")
    return [
        *smoke_args(name, paths, clips, tmp_path, VARIANTS.get(name)),
        *smoke.sampled(smoke.write_pictures(tmp_path), smoke.write_references(tmp_path)),
        *sizes,
        "train.steps=4",
        "train.save_every=2",
        "train.checkpointing=full",
    ]


def trained(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "trainable.safetensors")


def stock_lora(run: Path) -> dict[str, torch.Tensor]:
    """LoRA's matrices in the stock model, its base unquantised, by the library's own loader."""
    chosen = load_recipe(run / "config.yaml").model
    checkpoint, base = get_family(chosen.family).open(chosen), Path(chosen.path)
    if chosen.family in CHAT_FAMILIES:
        model: Any = checkpoint.model_class.from_pretrained(base)
        model = PeftModel.from_pretrained(model, run / "adapter").base_model.model
    else:
        # Of its text encoders and processors nothing is asked.
        pipeline = with_lora(checkpoint.sampler.pipeline(torch.float32, text=False))
        pipeline.load_lora_weights(run / "adapter", adapter_name="default")
        model = pipeline.transformer
    return {name: p.detach() for name, p in model.named_parameters() if ".lora_" in name}


def load_base(recipe: Recipe) -> Any:
    checkpoint = get_family(recipe.model.family).open(recipe.model)
    is_chat = recipe.model.family in CHAT_FAMILIES
    return (checkpoint.load_model if is_chat else checkpoint.denoiser.load_transformer)(torch.float32)


def fixed_bytes(name: str, run: Path) -> int:
    if name not in FIXED_WIDTH:
        return 0
    return count_parameter_bytes(load_base(load_recipe(run / "config.yaml")).get_submodule(FIXED_WIDTH[name]))


def computed_bytes(run: Path, kind: Quantization | None) -> int:
    recipe = load_recipe(run / "config.yaml")
    family, model = get_family(recipe.model.family), load_base(recipe)
    trained = find_base_members(model, recipe.optim.groups, family.group_patterns)
    return count_quantized_bytes(model.to("meta"), kind, trained)


@pytest.mark.parametrize(("name", "kind"), COMBINATIONS)
def test_a_quantised_run_trains_resumes_and_leaves_an_adapter_for_the_stock_model(
    name: str,
    kind: Quantization,
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, dropout of the adapters and all; the base takes as many bytes as were computed from its shapes."""
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    if name in RUNS:
        RUNS[name].prepare(monkeypatch)
    args = [
        *recipe(name, tiny_checkpoints, shape_clips, tmp_path),
        f"model.quantize={kind}",
        "lora.dropout=0.1",
    ]
    lora_main([*args, f"run.dir={uninterrupted}"])
    output = capsys.readouterr().err
    quantized_bytes, unquantized_bytes = (
        computed_bytes(uninterrupted, kind),
        computed_bytes(uninterrupted, None),
    )
    fixed = fixed_bytes(name, uninterrupted)
    assert quantized_bytes - fixed < 0.9 * (unquantized_bytes - fixed)
    assert f"needs {quantized_bytes / 2**20:.4g} MiB instead of {unquantized_bytes / 2**20:.4g}" in " ".join(
        output.split()
    )
    assert "lora_linear: off" not in output
    assert "could not be counted" not in output
    assert not lines(uninterrupted, "events.jsonl")

    lora_main([*args, f"run.dir={parts}", f"train.resume={uninterrupted}/checkpoints/step_000002"])
    assert [line["step"] for line in lines(parts, "metrics.jsonl")] == [3, 4]
    expected, resumed = trained(uninterrupted, 4), trained(parts, 4)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[key], resumed[key]) for key in expected)

    stock = stock_lora(uninterrupted)
    assert stock.keys() == {key for key in expected if ".lora_" in key}
    assert all(torch.equal(stock[key], expected[key]) for key in stock)


def test_a_run_is_not_continued_with_another_quantisation(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    args = [*smoke, "guard.preflight=false", f"run.dir={run}", "train.steps=1"]
    lora_main([*args, "model.quantize=int8"])
    with safe_open(run / "adapter" / "pytorch_lora_weights.safetensors", "pt") as file:
        assert '"quantize": "int8"' in str(file.metadata())
    with pytest.raises(DitLoraError, match=r"model\.quantize: 'int8' in the checkpoint, None in"):
        lora_main([*args, "train.resume=auto"])
