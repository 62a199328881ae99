"""Every smoke recipe, end to end: trains, resumes bit for bit, samples, and its result loads where it belongs."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from family_cases.subject import TAKES
from fuse_checks import by
from launching import ROOT
from runs import lines, poison, require_short_log
from safetensors.torch import load_file
from smoke_recipes import OTHERS, RUNS, SMOKES, smoke_args

from dit_lora.commands.replay import replay_bundle
from dit_lora.commands.sample import SampleRequest, write_samples
from dit_lora.config.catalog import find_recipe, list_recipe_names
from dit_lora.config.load import load_recipe
from dit_lora.data.media.video import read_header
from dit_lora.errors import DitLoraError
from dit_lora.families import DIFFUSION_FAMILIES

Main = Callable[[list[str]], None]


def test_every_smoke_recipe_is_tried_here() -> None:
    names = [name for name in list_recipe_names() if name.startswith("smoke/")]
    recipes = {name.removeprefix("smoke/"): load_recipe(find_recipe(name)) for name in names}
    # Those of chat models are in test_chat.py.
    assert set(SMOKES) == {n for n, r in recipes.items() if r.model.family in DIFFUSION_FAMILIES}


# What they train is tried by another recipe here, or by the families' contract.
ALIKE = (
    *("cogvideox_1.5", "cogvideox_i2v", "sana_video", "dit_scratch", "video_dit_lora"),
    "flux_kontext",
    *("chroma", "flux", "flux2", "hunyuan_video15", "kandinsky5", "qwen_image21", "sd3"),
    *("ernie_image", "krea2", "latte", "qwen_image", "z_image"),
    *("wan_i2v", "wan_flf2v", "wan_2.2", "wan_2.2_i2v", "wan_5b", "wan_5b_i2v"),
    *("ltx_video_i2v", "ltx2", "ltx2_2.5", "ltx2_i2v", "ltx2_i2v_sound", "ltx2_ic_lora"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name in (*ALIKE, *OTHERS) else ()) for name in RUNS],
)
def test_a_smoke_recipe_trains_resumes_and_samples(
    name: str,
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """3 and 2 resumed steps equal 5, bit for bit, caption dropout, fused ops and all. The log is short."""
    RUNS[name].prepare(monkeypatch)
    with by("reference", monkeypatch):
        trains_resumes_and_samples(name, lora_main, tiny_checkpoints, shape_clips, tmp_path, capsys)


def trains_resumes_and_samples(
    name: str,
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    smoke = RUNS[name]
    images, references = smoke.write_pictures(tmp_path), smoke.write_references(tmp_path)
    args = smoke_args(name, tiny_checkpoints, shape_clips, tmp_path)
    recipe = load_recipe(args[0], args[1:])
    ops = TAKES[smoke.variant] - ({"lora_linear"} if recipe.train.mode == "full" else set())
    common = [
        *args,
        *(f"kernels.{op}=on" for op in sorted(ops)),
        "kernels.finite_norm=on",
        *smoke.sampled(images, references),
    ]
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    capsys.readouterr()
    lora_main([*common, f"run.dir={uninterrupted}", "train.steps=5"])
    require_short_log(capsys.readouterr().err, uninterrupted)
    # The run above compares kernels before its first step and after its last.
    common += ["guard.preflight=false", "guard.parity_every=0"]
    lora_main([*common, f"run.dir={parts}", "train.steps=3"])
    lora_main([*common, f"run.dir={parts}", "train.steps=5", "train.resume=auto"])

    assert state(parts) == state(uninterrupted)
    samples = sorted(path.parent.name for path in (parts / "samples").rglob("prompt_00.*"))
    assert samples == ["step_000000", "step_000003", "step_000005"]
    reference_names = [path.stem for path in (parts / "samples" / "references").glob("*")]
    assert sorted(reference_names) == [f"prompt_00_{number + 1}" for number in range(len(references))]
    trained = load_recipe(uninterrupted / "config.yaml").train
    result = uninterrupted / ("adapter" if trained.mode == "lora" else "model")
    assert any(load_file(path) for path in result.rglob("*.safetensors"))
    image_kwargs = {field.removesuffix("s"): image for field, image in images.items()}
    request = SampleRequest(uninterrupted, (smoke.prompt,), inference_steps=2, references=references, **image_kwargs)
    (sample,) = write_samples(request)
    assert sample.stat().st_size > 0
    assert read_header(sample).has_sound == recipe.data.sound
    validation_samples = list((parts / "samples").rglob("prompt_00.*"))
    assert {read_header(path).has_sound for path in validation_samples} == {recipe.data.sound}
    if trained.mode == "full":
        with pytest.raises(DitLoraError, match="--model does not apply"):
            write_samples(replace(request, model="elsewhere"))


def state(run: Path) -> dict[str, bytes]:
    """Weights and optimizer of the last checkpoint."""
    folder = run / "checkpoints" / "step_000005"
    return {n: (folder / n).read_bytes() for n in ("trainable.safetensors", "optimizer.safetensors")}


@pytest.mark.parametrize("name", ["dit", "video_dit"])
def test_a_bundle_of_a_model_with_classes_is_replayed_without_the_data(
    name: str, lora_main: Main, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """New classes and all: their rows are in the bundle, and their names."""
    smoke, data, run = SMOKES[name], tmp_path / "data", tmp_path / "run"
    assert smoke.write_data is not None
    smoke.write_data(data)
    common = [
        str(ROOT / "recipes" / "smoke" / f"{name}.yaml"),
        f"model.path={tiny_checkpoints[smoke.variant]}",
        f"data.path={data}",
        f"data.cache={tmp_path / 'cache'}",
        "validation.prompts=[]",
    ]
    lora_main([*common, f"run.dir={tmp_path / 'fill'}", "train.steps=1"])
    bad = next(path.relative_to(data).as_posix() for path in sorted(data.rglob("*.*")))
    poison(tmp_path / "cache", bad)
    lora_main([*common, f"run.dir={run}", "train.steps=4", "data.flip=false"])
    (event,) = lines(run, "events.jsonl")
    assert event["sample_ids"] == [bad]
    elsewhere = Path(shutil.copytree(run / event["bundle"], tmp_path / "elsewhere"))
    shutil.rmtree(data)
    replayed = replay_bundle(elsewhere, model=str(tiny_checkpoints[smoke.variant]))
    assert replayed.diagnosis is not None
    assert (replayed.diagnosis.cause, replayed.diagnosis.sample_ids) == ("data", (bad,))
