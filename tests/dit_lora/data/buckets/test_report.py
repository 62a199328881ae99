"""What a report makes of a data set's buckets: its numbers, and advice that comes from them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.data.buckets.buckets import choose_bucket, list_buckets
from dit_lora.data.buckets.report import BucketReport, advise_on_references
from dit_lora.data.media.video_header import VideoHeader


def data(**values: Any) -> DataConfig:
    defaults = {"path": "x", "frames": 17, "height": 480, "width": 720, "fps": 8.0, "buckets": {}}
    return DataConfig.model_validate(defaults | values)


def clip(height: int, width: int, seconds: float = 4.0) -> VideoHeader:
    return VideoHeader(fps=24, seconds=seconds, frames=None, height=height, width=width)


def report(sources: list[VideoHeader], given: DataConfig, group: int = 2) -> BucketReport:
    buckets = list_buckets(given, 16, lambda _: None)
    clips = [(f"{number}.mp4", choose_bucket(source, buckets, given)) for number, source in enumerate(sources)]
    return BucketReport.from_clips(clips, buckets, given, group)


TWO = {"aspect_ratios": ["3:2", "2:3"]}


def test_a_report_counts_what_went_where() -> None:
    config = data(buckets={**TWO, "max_upscale": 1.5}, windows=2)
    sources = [clip(480, 720, 5.0), clip(960, 1080, 3.0), clip(720, 470, 3.0), clip(1, 1)]
    bucket_report = report([*sources, clip(480, 720, 0.1)], config)
    wide, tall = bucket_report.rows
    assert (wide.shape, wide.clips, wide.samples) == (VideoShape(17, 480, 720), 2, 3)
    assert (wide.share, wide.mean_crop, wide.worst_crop) == (
        0.75,
        pytest.approx(0.125),
        pytest.approx(0.25),
    )
    assert (tall.clips, tall.samples, tall.upscaled, tall.pixels) == (1, 1, 0, 17 * 480 * 720)
    assert [(name, drop.code) for name, drop in bucket_report.dropped] == [
        ("3.mp4", "upscaled"),
        ("4.mp4", "too_short"),
    ]
    report_values = json.loads(json.dumps(bucket_report.as_dict()))
    assert report_values["buckets"][0]["shape"] == {"frames": 17, "height": 480, "width": 720}
    assert report_values["dropped"][1]["id"] == "4.mp4"
    assert report_values["advice"] == list(bucket_report.advice)
    lines = bucket_report.format_lines()
    assert lines[0].split()[:2] == ["bucket", "clips"]
    assert lines[1].split() == ["17x480x720", "2", "3", "75.0%", "12%", "/", "25%", "0"]
    assert lines[4].startswith("left out (too_short): 4.mp4: too short: it gives at most")
    assert len({len(line) for line in lines[:3]}) == 1


GOOD = [clip(480, 720, 3.0)] * 9 + [clip(720, 480, 3.0)] * 9


def test_a_data_set_that_fits_needs_no_advice() -> None:
    assert report(GOOD, data(buckets=TWO), group=9).advice == ()


@pytest.mark.parametrize(
    ("more", "values", "group", "words"),
    [
        ([], {}, 12, "17x480x720 (9 samples, every 1.3 epochs)"),
        (
            [clip(590, 590, 3.0)],
            {"buckets": {"aspect_ratios": ["3:2", "2:3", "1:1"]}},
            2,
            "17x592x592 (1 sample, every 2.0 epochs)",
        ),
        (
            [],
            {"buckets": {"aspect_ratios": ["3:2", "2:3", "1:1"]}},
            2,
            "unused buckets: 17x592x592",
        ),
        ([clip(240, 360, 3.0)] * 6, {}, 2, "6 of 24 clips (25%) are enlarged, up to 2.0 times"),
        (
            [],
            {"buckets": {"aspect_ratios": ["3:2"]}},
            2,
            "9 of 18 clips (50%) are portrait and no bucket is",
        ),
        (
            [],
            {"buckets": {"aspect_ratios": ["2:3", "1:1"]}},
            2,
            "9 of 18 clips (50%) are landscape and no",
        ),
        ([clip(480, 2000, 3.0)] * 6, {}, 2, "6 of them are about 25:6: add such a ratio"),
        ([clip(480, 720, 30.0)] * 6, {}, 2, "all makes about 102 samples of them instead of 24"),
        ([clip(480, 720, 0.5)] * 9, {}, 2, "9 of 27 clips (33%) are left out: lower data.frames"),
        (
            [clip(240, 360)] * 9,
            {"buckets": {**TWO, "max_upscale": 1.2}},
            2,
            "left out: lower buckets.resol",
        ),
        (
            [clip(240, 3600)] * 9,
            {"buckets": {**TWO, "max_crop": 0.2}},
            2,
            "left out: add buckets.aspect_r",
        ),
    ],
)
def test_advice_comes_from_the_numbers(
    more: list[VideoHeader], values: dict[str, Any], group: int, words: str
) -> None:
    advice = report([*GOOD, *more], data(**{"buckets": TWO, **values}), group).advice
    assert any(words in line for line in advice), advice


@pytest.mark.parametrize(
    "more",
    [
        [clip(240, 360, 3.0)] * 5,
        [clip(480, 2000, 3.0)] * 5,
        [clip(480, 720, 30.0)] * 5,
        [clip(480, 720, 0.5)] * 5,
    ],
    ids=["enlarged", "cropped", "long", "short"],
)
def test_what_few_clips_have_is_in_the_table_and_no_advice(more: list[VideoHeader]) -> None:
    assert report([*GOOD, *more], data(buckets=TWO)).advice == ()


def test_advice_names_some_of_many_buckets() -> None:
    config = data(buckets={"frames": [1, 17], "resolutions": [256, 400, 588]})
    (message,) = [line for line in report(GOOD, config).advice if "unused buckets" in line]
    assert message.count("x") == 2 * 6
    assert "and 34 more" in message


def test_references_of_many_sizes_split_samples_into_rare_shapes() -> None:
    """Only where they do: samples of several buckets with references of one size are the buckets' own matter."""
    wide, tall = VideoShape(1, 64, 96), VideoShape(1, 96, 64)

    def made_from(shape: VideoShape, *heights: int) -> VideoShape:
        return replace(shape, references=tuple(VideoShape(1, height, 96) for height in heights))

    similar_references = [made_from(wide, 64)] * 3 + [made_from(tall, 64)]
    assert advise_on_references(similar_references, 4) == []
    assert advise_on_references([wide] * 3, 4) == []
    mixed_samples = [
        *[made_from(wide, 64)] * 4,
        made_from(wide, 80),
        *[made_from(wide, 80, 96)] * 2,
    ]
    assert advise_on_references(mixed_samples, 1) == []
    (advice,) = advise_on_references(mixed_samples, 4)
    assert advice.startswith(
        "with their references, samples have 3 shapes, and a step takes 4 samples of one; these do not come in every "
        "epoch: 1x64x96 + 1x80x96 (1 sample, every 4.0 epochs), 1x64x96 + 1x80x96 + 1x96x96 "
        "(2 samples, every 2.0 epochs);"
    )
