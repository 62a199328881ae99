"""Samples with sound: cached tensors, cache keys, and samples refused before a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from family_cases.subject import CPU
from sound_files import FPS, Tones, write_clip

from dit_lora.commands.audit import audit_folder
from dit_lora.commands.audit_recipe import audit_recipe
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.media.clip_sound import read_sound
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import read_frames
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.ltx2.sound import build_audio_encoder
from dit_lora.planning.subject import MemoryEstimator
from dit_lora.training.session.session import start_run_session
from dit_lora.training.tasks.diffusion.cache_plan import make_cache_plan
from dit_lora.training.tasks.diffusion.precompute import DiffusionTrainingData, precompute

Values = Callable[..., Recipe]


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Three clips of 2 s that differ in rate and channels, with captions."""
    folder = tmp_path / "clips"
    folder.mkdir()
    sounds = (Tones(), Tones(hertz=(300.0, 500.0), rate=48_000), Tones(hertz=(700.0,), rate=22_050))
    for number, tones in enumerate(sounds):
        path = write_clip(folder / f"{number}.mov", tones)
        path.with_suffix(".txt").write_text(f"clip {number}")
    return folder


@pytest.fixture
def recipe_of(tiny_checkpoints: dict[str, Path], clips: Path, tmp_path: Path) -> Values:
    def make(**data: Any) -> Recipe:
        values = {"path": str(clips), "frames": 9, "height": 64, "width": 64, "fps": FPS}
        return parse_recipe(
            {
                "model": {"family": "ltx2", "path": str(tiny_checkpoints["ltx-2"])},
                "data": {**values, "workers": 0, "cache": str(tmp_path / "cache"), "sound": True} | data,
                "optim": {"groups": {"adapter": {"lr": 1e-3}}},
                "train": {"steps": 1},
                "run": {"dir": str(tmp_path / "run")},
            },
            "test",
        )

    return make


def encoded(recipe: Recipe) -> DiffusionTrainingData:
    AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
    with start_run_session(recipe) as session:
        return precompute(session, get_family("ltx2").open(recipe.model, recipe))


def facts(recipe: Recipe) -> list[dict[str, Any]]:
    checkpoint = get_family("ltx2").open(recipe.model, recipe)
    plan = make_cache_plan(recipe, checkpoint.encoders, torch.float32, samples_per_step=1, quiet=True)
    return [dict(entry.video.facts) for entry in plan.planned_samples]


def test_the_cache_holds_the_encoding_of_the_sound_of_a_windows_own_time(recipe_of: Values, clips: Path) -> None:
    """Of both windows of a clip; what an encoder makes of the file's sound by itself is the same, bit for bit."""
    recipe = recipe_of(windows=2, window_stride=0.5)
    checkpoint: Any = get_family("ltx2").open(recipe.model, recipe)
    actual = encoded(recipe).training_set
    assert len(actual.entries) == 6
    encode = build_audio_encoder(checkpoint.path, CPU)
    for number, entry in enumerate(actual.entries):
        (spec,) = {actual.videos.read_first_entry_spec([entry.video_key])["audio_latent_mean"]}
        assert spec == (torch.Size([28, 16]), torch.float32)
        tensors, fault = actual.videos.read(entry.video_key, {})
        assert fault is None
        media, start = MediaFile(clips / f"{number // 2}.mov"), (number % 2) * 0.5
        waveform = read_sound(media, checkpoint.encoders.sound_format, frames=9, fps=FPS, start=start)
        assert torch.equal(tensors["audio_latent_mean"], encode(waveform, 16_000)["audio_latent_mean"])
        size = {"frames": 9, "height": 64, "width": 64, "fps": FPS, "start": start}
        pixels = read_frames(media, **size)
        video = checkpoint.encoders.load_video_encoder(torch.float32, CPU)(pixels)["latent_mean"]
        assert torch.equal(tensors["latent_mean"], video)


def test_sound_changes_the_key_and_its_absence_is_the_key_from_before(recipe_of: Values) -> None:
    with_sound, without_sound = facts(recipe_of()), facts(recipe_of(sound=False))
    for heard, mute in zip(with_sound, without_sound, strict=True):
        added = {name: heard.pop(name) for name in ("sound", "audio_vae", "audio_transform")}
        assert heard == mute
        assert added["sound"]["rate"] == 16_000
        assert added["sound"]["channels"] == 2


def test_what_is_encoded_live_is_what_a_cache_holds(recipe_of: Values) -> None:
    cached, live = (
        encoded(recipe_of()).training_set,
        encoded(recipe_of(precompute=False)).training_set,
    )
    keys = [entry.video_key for entry in cached.entries]
    assert keys == [entry.video_key for entry in live.entries]
    assert live.videos.read_first_entry_spec(keys) == cached.videos.read_first_entry_spec(keys)
    for key in keys:
        ours, theirs = live.videos.read(key, {})[0], cached.videos.read(key, {})[0]
        assert ours.keys() == theirs.keys() == {"latent_mean", "audio_latent_mean"}
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_plan_counts_the_sound(recipe_of: Values) -> None:
    def subject(**data: Any) -> MemoryEstimator:
        recipe = recipe_of(**data)
        family = get_family("ltx2")
        return MemoryEstimator(recipe, family, family.open(recipe.model, recipe), torch.float32, False)

    heard, mute = subject(), subject(sound=False)
    (shape,) = heard.shapes
    added = dict(heard.get_spec(shape))
    assert added.pop("audio_latent_mean") == (torch.Size([28, 16]), torch.float32)
    assert added == mute.get_spec(shape)
    assert heard.video_encoder.weight_bytes > mute.video_encoder.weight_bytes
    assert heard.count_sample_bytes(shape) == mute.count_sample_bytes(shape) + 4 * 28 * 16


def test_clips_without_their_sound_are_refused_in_one_list_before_anything_is_encoded(
    recipe_of: Values, clips: Path, tmp_path: Path
) -> None:
    write_clip(clips / "0.mov")
    write_clip(clips / "1.mov", Tones(seconds=0.4))
    with pytest.raises(DitLoraError) as refused:
        encoded(recipe_of())
    lines = str(refused.value).splitlines()
    assert len(lines) == 3
    assert "0.mov: no_sound: it has no sound, and data.sound" in lines[1]
    assert "1.mov: sound_too_short: its sound ends at 0." in lines[2]
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    encoded_clips = encoded(recipe_of(rejects="skip"))
    assert [entry.id for entry in encoded_clips.training_set.entries] == ["2.mov"]
    assert len(encoded(recipe_of(sound=False)).training_set.entries) == 3


def test_an_audit_of_a_recipe_judges_sound_and_one_of_a_folder_counts_it(recipe_of: Values, clips: Path) -> None:
    write_clip(clips / "0.mov")
    write_clip(clips / "1.mov", Tones(seconds=0.4))
    more = {
        "silent": Tones(loud=0.0),
        "clipped": Tones(loud=4.0),
        "full": Tones(loud=1.0, hertz=(440.0, 440.0)),
    }
    for name, tones in more.items():
        write_clip(clips / f"{name}.mov", tones).with_suffix(".txt").write_text(f"a {name} clip")
    recipe = recipe_of()
    checkpoint = get_family("ltx2").open(recipe.model, recipe)
    samples_by_file = {
        sample.file: sample for sample in audit_recipe(recipe, checkpoint.encoders, progress=False).audited_samples
    }
    codes = {name: {f.code for f in sample.findings if "sound" in f.code} for name, sample in samples_by_file.items()}
    assert codes == {
        "0.mov": {"no_sound"},
        "1.mov": {"sound_too_short"},
        "2.mov": set(),
        "silent.mov": {"sound_silent"},
        "clipped.mov": {"sound_clipped"},
        "full.mov": set(),
    }
    assert [samples_by_file[f"{n}.mov"].verdict for n in (0, 1)] == ["reject", "reject"]
    # What the audit rejected is refused by the run, in its words; without sound, nothing is.
    with pytest.raises(DitLoraError, match=r"0\.mov: no_sound"):
        encoded(recipe)
    mute = recipe_of(sound=False)
    mute_samples = audit_recipe(
        mute, get_family("ltx2").open(mute.model, mute).encoders, progress=False
    ).audited_samples
    assert not [f.code for sample in mute_samples for f in sample.findings if "sound" in f.code]
    assert "sound: 5 of 6 clips have sound" in audit_folder(str(clips), progress=False).notes


@pytest.mark.parametrize("data", [{"fps": None}, {"frames": 1, "fps": None}, {"buckets": {"frames": [1, 9]}}])
def test_sound_of_what_has_no_length_is_refused(recipe_of: Values, data: dict[str, Any]) -> None:
    with pytest.raises(DitLoraError, match=r"sound needs data\.fps, and more than 1 frame"):
        recipe_of(**data)


def test_other_families_refuse_sound(recipe_values: dict[str, Any]) -> None:
    recipe_values["data"]["sound"] = True
    recipe = parse_recipe(recipe_values, "test")
    with pytest.raises(DitLoraError, match=r"data\.sound"):
        get_family("cogvideox").open(recipe.model, recipe)


def test_headers_remembered_by_a_version_that_knew_of_no_sound_are_read_anew(
    recipe_of: Values, tmp_path: Path
) -> None:
    recipe = recipe_of()
    encoded(recipe)
    memo = tmp_path / "cache" / "headers.json"
    stored = json.loads(memo.read_text())
    old = {
        name: [stamp, {key: value for key, value in header.items() if "sound" not in key}]
        for name, (stamp, header) in stored["headers"].items()
    }
    memo.write_text(json.dumps({"version": 1, "headers": old}))
    for path in (tmp_path / "cache" / "videos").rglob("*.safetensors"):
        path.unlink()
    assert len(encoded(recipe).training_set.entries) == 3
