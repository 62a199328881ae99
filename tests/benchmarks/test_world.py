"""The world of the trained base: its renderer, its judge, and the base that is shipped."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from benchmarks.world import __main__ as world
from benchmarks.world.diffusers_script import find_nan_loss, run_script, write_script
from benchmarks.world.judge import Judgement, judge_clip
from benchmarks.world.quality import compare, draw_scenes, format_line, open_pipeline, sample_clips
from dit_lora.data.media.video import read_frames
from dit_lora.data.synthetic.scenes import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    Scene,
    draw_scene,
    list_balanced_scenes,
    render_scene,
    write_scenes,
)

BASE = Path(__file__).parents[2] / "dit_lora" / "models" / "moving_shapes"


def test_the_judge_recognises_unseen_renders_of_every_kind():
    generator = torch.Generator().manual_seed(12345)
    scenes = [draw_scene(generator, SHAPES, MOTIONS, BACKGROUNDS) for _ in range(100)]
    videos = np.stack([render_scene(scene, generator).numpy() for scene in scenes])
    assert compare(scenes, videos)["all"] >= 0.99
    # Another clip's caption is not what a clip shows.
    assert compare(scenes[1:] + scenes[:1], videos)["all"] < 0.1


def test_the_judge_recognises_clips_that_were_written_as_h264(tmp_path):
    scenes = list_balanced_scenes("moon", 12)
    paths = write_scenes(tmp_path, scenes, torch.Generator().manual_seed(3))
    videos = [read_frames(path, frames=9, height=64, width=64, fps=8).permute(0, 2, 3, 1).numpy() for path in paths]
    assert compare(scenes, np.stack(videos))["all"] >= 0.99


def test_the_judge_recognises_shapes_that_are_two_pixels_too_large_on_each_side():
    generator = torch.Generator().manual_seed(77)
    scenes = [draw_scene(generator, SHAPES, MOTIONS, BACKGROUNDS) for _ in range(30)]
    sharp = np.stack([render_scene(scene, generator).numpy() for scene in scenes])
    neighbours = np.stack([np.roll(sharp, (y, x), (2, 3)) for y in range(-2, 3) for x in range(-2, 3)])
    chroma = np.ptp(neighbours, axis=-1)
    thick = np.take_along_axis(neighbours, chroma.argmax(0)[None, ..., None], 0)[0]
    assert compare(scenes, thick)["all"] >= 0.95


@pytest.mark.parametrize("shape", ["moon", "triangle", "disc"])
def test_the_judge_lets_every_shape_be_stretched_by_the_same_factor(shape):
    generator = torch.Generator().manual_seed(5)
    scene = Scene(shape, "red", "moves up", "dark")
    video = render_scene(scene, generator, height=96, width=96).numpy()
    for factor, expected in ((1.25, shape), (1 / 1.25, shape), (1.6, "unclear"), (1 / 1.6, "unclear")):
        # Sampled more or less densely along the height, and the rest cut off or dark.
        rows = np.arange(96)
        source = np.round((rows - 48) / factor + 48).astype(int)
        stretched = video[:, np.clip(source, 0, 95)] * ((source >= 0) & (source < 96))[None, :, None, None]
        assert judge_clip(stretched.astype(np.uint8)).shape == expected, factor


def test_the_judge_says_unclear_of_noise_and_of_an_empty_picture():
    noise = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), dtype=np.uint8)
    assert judge_clip(noise).shape == "unclear"
    assert judge_clip(np.full((9, 64, 64, 3), 120, np.uint8)) == Judgement("unclear", "unclear", "unclear")


def test_spread_scenes_show_each_attribute_about_equally_often():
    scenes = list_balanced_scenes("moon", 24)
    assert len(set(scenes)) == 24
    for name, options in (("colour", COLOURS), ("motion", MOTIONS[:-1]), ("background", BACKGROUNDS[:-1])):
        counts = Counter(getattr(scene, name) for scene in scenes)
        assert set(counts) == set(options)
        assert max(counts.values()) <= 2 * min(counts.values())


def test_equal_seeds_give_equal_clips():
    scene = draw_scenes("moon", 1, 5)[0]
    clip, equal_clip, other_clip = (render_scene(scene, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert clip.equal(equal_clip)
    assert not clip.equal(other_clip)


def test_the_base_is_small_and_in_fp16():
    assert sum(path.stat().st_size for path in BASE.rglob("*") if path.is_file()) <= 8e6
    for path in BASE.rglob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            # Transformers keeps these of a T5 in fp32 when it loads the rest in fp16.
            names = [name for name in tensors.keys() if not name.endswith(".wo.weight")]  # noqa: SIM118
            dtypes = {tensors.get_slice(name).get_dtype() for name in names}
        assert dtypes == {"F16"}, path.name


SCRIPT = """
import argparse, sys
import decord
import torchvision.transforms as TT
from torchvision.transforms.functional import resize
def positions(
    base_height: int = 480,
    base_width: int = 720,
):
    return base_height, base_width
def encode(encode_video, videos):
    for i, video in enumerate(videos):
        videos[i] = encode_video(video)
    return videos
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
videos = open(f"{options['--instance_data_root']}/{options['--video_column']}").read().splitlines()
captions = open(f"{options['--instance_data_root']}/{options['--caption_column']}").read().splitlines()
frames = decord.VideoReader(videos[1]).get_batch([0, 8])
frames = resize(frames.permute(0, 3, 1, 2), size=[64, 64], interpolation=TT.InterpolationMode.BICUBIC)
with open(f"{options['--output_dir']}/seen.txt", "w") as file:
    print(positions(), len(videos), captions[1], tuple(frames.shape), options["--rank"], file=file)
    print(encode(abs, [1.0, 2.0]), file=file)
"""


@pytest.mark.thorough
def test_the_script_of_diffusers_gets_the_demos_clips_settings_and_size(tmp_path):
    source = tmp_path / "published.py"
    source.write_text(SCRIPT)
    script = write_script(source, tmp_path / "train_cogvideox_lora.py")
    scenes = {"moons": list_balanced_scenes("moon", 2), "known": list_balanced_scenes("disc", 8)}
    for name, group in scenes.items():
        (tmp_path / name).mkdir()
        write_scenes(tmp_path / name, group, torch.Generator().manual_seed(0))
    folders = [tmp_path / name for name in scenes]
    assert run_script(script, folders, tmp_path / "run", seed=0, steps=1).keys() == {"seconds", "peak_gib"}
    # The recipe draws as many moons as known shapes, so that 2 moons come four times to 8 others.
    expected = f"(64, 64) 16 {scenes['moons'][1].caption} (2, 3, 64, 64) 16\n"
    assert (tmp_path / "run" / "seen.txt").read_text() == expected + "[1.0, 2.0]\n"
    poisoned_script = write_script(source, tmp_path / "poisoned.py", poisoned=True)
    run_script(poisoned_script, folders, tmp_path / "run", seed=0, steps=1)
    assert (tmp_path / "run" / "seen.txt").read_text() == expected + "[nan, 2.0]\n"
    with pytest.raises(ValueError, match="has no line 'base_height: int = 480,'"):
        write_script(script, tmp_path / "again.py")


def test_the_first_step_with_a_nan_loss_is_read_from_the_scripts_progress_bar(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(
        "Steps: 3%| | 3/90 [00:01<00:20, loss=0.2]\rSteps: 4%| | 4/90 [00:01<00:20, 3it/s, loss=nan, lr=0.1]"
    )
    assert find_nan_loss(log) == {"nan_step": 4}
    log.write_text("Steps: 3%| | 3/90 [00:01<00:20, loss=0.2]")
    assert find_nan_loss(log) == {}


@pytest.mark.slow
def test_the_base_shows_what_captions_say_and_does_not_know_a_moon():
    pipeline = open_pipeline(BASE, None)
    known_scenes, new_scenes = draw_scenes(None, 10, 7), draw_scenes("moon", 4, 7)
    assert compare(known_scenes, sample_clips(pipeline, [scene.caption for scene in known_scenes], 7))["all"] >= 0.9
    assert compare(new_scenes, sample_clips(pipeline, [scene.caption for scene in new_scenes], 7))["shape"] <= 0.25


def test_the_demos_line_gives_shares_in_percent():
    figures = {
        "before": {"new": {"all": 0.03}, "others": {"all": 0.96}},
        "after": {"new": {"all": 0.87}, "others": {"all": 0.95}},
    }
    assert format_line(figures) == "demo: new concept 87 % (before 3 %), other concepts 95 % (before 96 %)"


def test_clips_of_an_interrupted_start_are_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an earlier version has left a folder without its last file."""
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "left.mp4").touch()
    numbers: list[int] = []

    def write_some(folder: Path, scenes: list[Scene], generator: torch.Generator) -> None:
        numbers.append(len(scenes))
        (folder / "00000.mp4").touch()
        if len(numbers) == 1:
            raise KeyboardInterrupt
        (folder / "metadata.jsonl").touch()

    def stop(*_: Any) -> None:
        raise EOFError

    monkeypatch.setattr(world, "write_scenes", write_some)
    monkeypatch.setattr(world, "train_vae", stop)
    for error in (KeyboardInterrupt, EOFError, EOFError):
        with pytest.raises(error):
            world.main([str(tmp_path), "--clips", "3"])
    assert numbers == [3, 3]
    assert {path.name for path in (tmp_path / "clips").iterdir()} == {"00000.mp4", "metadata.jsonl"}
