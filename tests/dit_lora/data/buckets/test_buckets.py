"""Which shapes a recipe has, and which of them a clip goes to."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.data.buckets.buckets import (
    TOLERANCE,
    BucketPlacement,
    DroppedClip,
    choose_bucket,
    list_buckets,
    make_window_id,
)
from dit_lora.data.media.video import ClipError, read_frames, read_header, write_video
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.errors import DitLoraError


def data(**values: Any) -> DataConfig:
    defaults = {"path": "x", "frames": 17, "height": 480, "width": 720, "fps": 8.0, "buckets": {}}
    return DataConfig.model_validate(defaults | values)


def shapes(given: DataConfig, step: int = 16) -> tuple[VideoShape, ...]:
    return list_buckets(given, step, lambda _: None)


def clip(height: int, width: int, seconds: float | None = 4.0, fps: float | None = 24) -> VideoHeader:
    return VideoHeader(fps=fps, seconds=seconds, frames=None, height=height, width=width)


def image(height: int, width: int) -> VideoHeader:
    return VideoHeader(fps=None, seconds=None, frames=1, height=height, width=width, is_image=True)


def placed(source: VideoHeader, given: DataConfig) -> BucketPlacement:
    placement = choose_bucket(source, shapes(given), given)
    assert isinstance(placement, BucketPlacement), placement
    return placement


def dropped(source: VideoHeader, given: DataConfig) -> DroppedClip:
    placement = choose_bucket(source, shapes(given), given)
    assert isinstance(placement, DroppedClip), placement
    return placement


def test_without_buckets_there_is_the_one_shape() -> None:
    assert shapes(data(buckets=None)) == (VideoShape(17, 480, 720),)


def test_the_default_buckets_of_a_recipe() -> None:
    sizes = [(shape.height, shape.width) for shape in shapes(data())]
    landscape = [(448, 784), (480, 720), (512, 672)]
    assert sizes == [*landscape, (592, 592), (672, 512), (720, 480), (784, 448)]


@pytest.mark.parametrize("step", [8, 16, 32, 64])
@pytest.mark.parametrize("sides", [(256, 256), (480, 720), (768, 1360), (1024, 1024)])
def test_sides_are_multiples_and_no_other_near_ones_are_better(step: int, sides: tuple[int, int]) -> None:
    """Against all pairs of multiples there are."""
    height, width = sides
    budget = height * width
    ratios = ("21:9", "16:9", "1:1", "2:3")
    for ratio in ratios:
        config = data(height=height, width=width, buckets={"aspect_ratios": [ratio]})
        (shape,) = shapes(config, step)
        wide, high = map(int, ratio.split(":"))

        def error(high_: int, wide_: int, aspect: float = wide / high) -> float:
            area = abs(math.log(high_ * wide_ / budget))
            return math.hypot(area, math.log(wide_ / high_ / aspect))

        pairs = [
            (h, w)
            for h in range(step, 2 * height + width, step)
            for w in range(step, 2 * height + width, step)
            if h * w <= budget * (1 + TOLERANCE)
        ]
        best = min(error(h, w) for h, w in pairs)
        is_own = {shape.height, shape.width} == {height, width}
        assert error(shape.height, shape.width) == pytest.approx(best) or is_own
        assert shape.height % step == 0 or is_own
        assert shape.height * shape.width <= budget * (1 + TOLERANCE)


def test_datas_own_shape_stands_for_its_ratio_upright_and_on_its_side() -> None:
    bucket_shapes = shapes(data(height=480, width=832))
    assert VideoShape(17, 480, 832) in bucket_shapes
    assert VideoShape(17, 832, 480) in bucket_shapes
    assert not {VideoShape(17, 480, 848), VideoShape(17, 848, 480)} & {*bucket_shapes}


def test_every_ratio_resolution_and_length_within_the_budget() -> None:
    buckets = {"aspect_ratios": ["1:1"], "resolutions": [256, 512, 1024], "frames": [1, 9, 17]}
    bucket_shapes = shapes(data(height=512, width=512, buckets=buckets))
    expected = [(1, 256), (1, 512), (1, 1024), (9, 256), (9, 512), (17, 256), (17, 512)]
    assert [(shape.frames, shape.height) for shape in bucket_shapes] == expected
    assert all(shape.height == shape.width for shape in bucket_shapes)


def test_nothing_within_the_budget_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(DitLoraError, match=r"budget of 17x480x720; lower data\.buckets\.resolut"):
        shapes(data(buckets={"resolutions": [640]}), step=64)  # though 576x576 has room


def test_ratios_that_round_to_one_shape_are_one_bucket() -> None:
    config = data(height=128, width=128)
    assert len(shapes(config, 64)) < len(shapes(config, 16)) == 7
    assert len({*shapes(config, 64)}) == len(shapes(config, 64))


def test_shapes_that_cannot_be_trained_are_left_out_and_said() -> None:
    messages: list[str] = []

    def fits(shape: VideoShape) -> str | None:
        return "9 frames do not divide" if shape.frames == 9 else None

    config = data(buckets={"frames": [9, 17], "aspect_ratios": ["3:2", "1:1"]})
    bucket_shapes = list_buckets(config, 16, fits, messages.append)
    assert bucket_shapes == (VideoShape(17, 480, 720), VideoShape(17, 592, 592))
    (message,) = messages
    assert "left out" in message
    assert "9x480x720: 9 frames do not divide" in message
    assert "17x" not in message
    with pytest.raises(DitLoraError) as error:
        list_buckets(config, 16, lambda shape: f"no {shape.frames}")
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 4
    assert lines[0] == "  - 9x480x720: no 9"


MANY_FRAMES = {"frames": [1, 9, 17, 33], "aspect_ratios": ["3:2"]}


@pytest.mark.parametrize(
    ("seconds", "frames"),
    [(10.0, 33), (4.03, 33), (4.01, 17), (2.13, 17), (2.0, 9), (0.9, 1), (0.04, 1), (None, 33)],
)
def test_a_clip_goes_to_the_most_frames_that_it_surely_has(seconds: float | None, frames: int) -> None:
    config = data(frames=33, buckets=MANY_FRAMES)
    assert placed(clip(480, 720, seconds), config).shape == VideoShape(frames, 480, 720)


def test_an_image_goes_to_one_frame_or_nowhere() -> None:
    config = data(frames=33, buckets=MANY_FRAMES)
    assert placed(image(480, 720), config).shape == VideoShape(1, 480, 720)
    drop = dropped(image(480, 720), data())
    assert drop.code == "too_short"
    assert "an image is one frame, and the smallest bucket needs 17" in drop.words


def test_a_clip_that_no_bucket_is_short_enough_for_is_dropped() -> None:
    drop = dropped(clip(480, 720, seconds=0.9), data(buckets={"frames": [9, 17]}))
    assert drop.code == "too_short"
    assert "at most 8 frames at 8 fps, and the smallest bucket needs 9" in drop.words


def test_a_file_may_leave_its_last_frame_out_of_its_length() -> None:
    """17 frames at 8 fps are 2.125 s; one that says 2 s may have them, and one of 1.9 s not."""
    config = data(buckets=None)
    assert placed(clip(480, 720, 16 / 8, fps=8), config).shape.frames == 17
    assert dropped(clip(480, 720, 15 / 8, fps=8), config).code == "too_short"
    two_lengths = data(buckets={"frames": [9, 17]})
    assert placed(clip(480, 720, 16 / 8, fps=8), two_lengths).shape.frames == 9


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ((1080, 1920), (448, 784)),
        ((1920, 1080), (784, 448)),
        ((480, 720), (480, 720)),
        ((1000, 1000), (592, 592)),
        ((300, 4000), (448, 784)),
        ((600, 800), (512, 672)),
    ],
)
def test_a_clip_goes_to_the_shape_that_crops_least(sides: tuple[int, int], expected: tuple[int, int]) -> None:
    placement = placed(clip(*sides), data())
    assert (placement.shape.height, placement.shape.width) == expected


@pytest.mark.parametrize(
    ("side", "expected"), [(2000, 512), (512, 512), (505, 512), (490, 256), (256, 256), (90, 128)]
)
def test_a_clip_goes_to_the_highest_resolution_that_does_not_enlarge_it(side: int, expected: int) -> None:
    buckets = {"resolutions": [128, 256, 512]}
    placement = placed(clip(side, side), data(height=512, width=512, buckets=buckets))
    assert (placement.shape.height, placement.shape.width) == (expected, expected)
    assert placement.upscale == pytest.approx(max(1, expected / side))
    wide = placed(clip(side, 16 * side // 9), data(height=512, width=512, buckets=buckets))
    assert wide.shape.width / wide.shape.height > 1.6


def test_crop_and_enlargement_are_those_of_the_picture() -> None:
    config = data(buckets=None)
    exact = placed(clip(960, 1440), config)
    assert (exact.crop, exact.upscale) == (0.0, 1.0)
    tall = placed(clip(1080, 720), config)  # 480 of 1080 rows stay
    assert (tall.crop, tall.upscale) == (pytest.approx(1 - 480 / 1080), 1.0)
    small = placed(clip(240, 480), config)  # twice as high, and 120 of 480 columns go
    assert (small.crop, small.upscale) == (pytest.approx(0.25), 2.0)


def test_limits_hold_with_buckets_and_say_what_was_asked() -> None:
    strict = data(buckets={"max_crop": 0.2, "max_upscale": 1.5})
    cropped = dropped(clip(500, 2000), strict)
    assert cropped.code == "cropped"
    assert "448x784 would lose 56% of its picture of 2000x500" in cropped.words
    assert "max_crop is 0.2" in cropped.words
    upscaled = dropped(clip(240, 360), strict)
    assert upscaled.code == "upscaled"
    assert "480x720 would enlarge its picture of 360x240 2.00 times" in upscaled.words
    for source in (clip(500, 2000), clip(240, 360)):
        assert isinstance(choose_bucket(source, shapes(data()), data()), BucketPlacement)


def test_a_limit_turns_a_clip_to_a_shape_that_it_allows() -> None:
    """The square needs no enlargement but crops; the limit leaves the wide one."""
    buckets = {"resolutions": [256, 512], "aspect_ratios": ["2:1", "1:1"]}
    config = data(height=512, width=512, buckets=buckets)
    only = [VideoShape(17, 512, 512), VideoShape(17, 176, 368)]
    placement = choose_bucket(clip(520, 1040), only, config)
    tight = choose_bucket(
        clip(520, 1040),
        only,
        data(**{**config.model_dump(), "buckets": {**buckets, "max_crop": 0.1}}),
    )
    assert isinstance(placement, BucketPlacement)
    assert isinstance(tight, BucketPlacement)
    assert (placement.shape, tight.shape) == (only[0], only[1])


@pytest.mark.parametrize(
    ("windows", "stride", "expected"),
    [
        (1, None, [0]),
        (2, None, [0, 2.125]),
        ("all", None, [0, 2.125, 4.25, 6.375]),
        ("all", 3.0, [0, 3, 6]),
        (9, 1.0, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_windows_are_whole_and_one_after_the_other(windows: Any, stride: float | None, expected: list[float]) -> None:
    """Of 9.2 s, windows of 17 frames at 8 fps."""
    config = data(windows=windows, window_stride=stride)
    assert placed(clip(480, 720, seconds=9.2), config).starts == tuple(expected)


def test_what_does_not_say_its_length_has_one_window() -> None:
    config = data(windows="all", buckets={"frames": [1, 17]})
    for source in (image(480, 720), clip(480, 720, None), clip(480, 720, 60.0, fps=None)):
        assert placed(source, config).starts == (0.0,)


def test_a_window_is_named_by_its_second() -> None:
    names = [make_window_id("a.mp4", start) for start in (0.0, 2.125, 3.0, 12345.678, 17 / 24)]
    assert names == ["a.mp4", "a.mp4@2.125s", "a.mp4@3s", "a.mp4@12345.678s", "a.mp4@0.708s"]


@pytest.fixture
def decodes(tmp_path: Path) -> Callable[..., bool]:
    """Writes a clip of `count` frames at 10 fps; whether that many frames at 5 fps can be read from it."""

    def read(count: int, frames: int, start: float = 0.0) -> bool:
        path = tmp_path / f"{count}.mp4"
        if not path.exists():
            write_video(path, torch.randint(0, 255, (count, 32, 48, 3), dtype=torch.uint8), fps=10)
        try:
            read_frames(path, frames=frames, height=32, width=48, fps=5, start=start)
        except ClipError:
            return False
        return True

    return read


@pytest.mark.parametrize("count", [4, 9, 20, 21])
def test_a_clip_is_decoded_to_just_the_frames_that_it_was_placed_for(
    tmp_path: Path, decodes: Callable[..., bool], count: int
) -> None:
    bucket_values = {"frames": [*range(1, 15)], "aspect_ratios": ["3:2"]}
    config = data(height=32, width=48, frames=14, fps=5, buckets=bucket_values)
    assert decodes(count, 1)
    frames = placed(read_header(tmp_path / f"{count}.mp4"), config).shape.frames
    assert decodes(count, frames)
    assert not decodes(count, frames + 1)


@pytest.mark.parametrize("count", [12, 13, 29])
def test_all_windows_can_be_decoded_and_no_further_one(
    tmp_path: Path, decodes: Callable[..., bool], count: int
) -> None:
    config = data(height=32, width=48, frames=3, fps=5, buckets=None, windows="all")
    assert decodes(count, 1)
    starts = placed(read_header(tmp_path / f"{count}.mp4"), config).starts
    assert all(decodes(count, 3, start) for start in starts)
    assert not decodes(count, 3, starts[-1] + 3 / 5)
