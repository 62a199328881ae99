"""Findings about pairs: likeness, sizes, masks; nothing is reported for sets that place a subject in other scenes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps

from benchmarks.faults.media.encode import encode, moving
from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.data.audit import runner
from dit_lora.data.audit.captions import check_captions
from dit_lora.data.audit.finding import AuditedSample
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.outline import ALIKE, UNLIKE, PictureOutline, compare_outlines, is_same_picture
from dit_lora.data.audit.pairs import summarise_pairs
from dit_lora.data.audit.probe import probe_file
from dit_lora.data.audit.runner import audit_from_stored_measurements, audit_media
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.clips import Clip, LossMask

SIDE = 96


def scene(name: str) -> Image.Image:
    """A drawing with edges of its own: clouds of three colours, posterised."""
    clouds = Image.fromarray(moving(name, frames=1)[0])
    return ImageOps.posterize(clouds.resize((144, SIDE), Image.Resampling.BICUBIC), 2)


def with_disc(image: Image.Image, across: float, down: float) -> Image.Image:
    y, x = np.mgrid[: image.height, : image.width]
    disc_mask = (x - across * image.width) ** 2 + (y - down * image.height) ** 2 < (SIDE / 6) ** 2
    levels = np.where(disc_mask[..., None], np.uint8([250, 240, 30]), np.asarray(image))
    return Image.fromarray(levels)


def drawing(image: Image.Image) -> Image.Image:
    return ImageOps.invert(image.convert("L").filter(ImageFilter.FIND_EDGES)).convert("RGB")


EDITS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "darker": lambda image: image.point(lambda level: level // 3),
    "other colours": lambda image: Image.merge("RGB", image.split()[::-1]),
    "negative": ImageOps.invert,
    "grey": lambda image: image.convert("L").convert("RGB"),
    "drawing": drawing,
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(4)),
    "object": lambda image: with_disc(image, 0.3, 0.6),
    "larger": lambda image: image.resize((288, 192), Image.Resampling.BICUBIC),
}
NAMES = "abcdefghijkl"


def outline(image: Image.Image) -> list[str]:
    return [PictureOutline.from_picture(np.asarray(image)).text]


def saved(folder: Path, name: str, image: Image.Image, **options: Any) -> MediaFile:
    folder.mkdir(exist_ok=True, parents=True)
    image.save(folder / name, **options)
    return MediaFile(folder / name)


def a_clip(name: str, media: MediaFile, *references: MediaFile, **options: Any) -> Clip:
    return Clip(name, media, "make it so", references=references, **options)


def edited(folder: Path, edit: str, names: str = NAMES) -> list[Clip]:
    """Samples of one kind of edit."""
    return [
        a_clip(
            name,
            saved(folder / "after", f"{name}.png", EDITS[edit](scene(name))),
            saved(folder / "before", f"{name}.png", scene(name)),
        )
        for name in names
    ]


def codes(judged: AuditedSample) -> list[str]:
    return [finding.code for finding in judged.findings]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_picture_is_like_it_and_another_picture_is_not(edit: str) -> None:
    before = {name: outline(scene(name)) for name in NAMES}
    own_scores, other_scores = [], []
    for name in NAMES:
        after = outline(EDITS[edit](scene(name)))
        own_scores.append(compare_outlines(after, before[name]))
        other_scores += [compare_outlines(after, before[other_name]) for other_name in NAMES if other_name != name]
    assert min(score or 0 for score in own_scores) > ALIKE
    known_scores = np.array([score for score in other_scores if score is not None])
    assert len(known_scores) > 100
    assert np.median(known_scores) < UNLIKE
    assert np.quantile(known_scores, 0.9) < 2 * ALIKE


def test_faint_pictures_have_no_edges_to_compare() -> None:
    flat = Image.new("RGB", (SIDE, SIDE), (90, 90, 90))
    darker = Image.new("RGB", (SIDE, SIDE), (60, 60, 60))
    assert compare_outlines(outline(flat), outline(darker)) is None
    assert compare_outlines(outline(flat), outline(flat)) == 1
    text = outline(scene("a"))[0]
    assert PictureOutline.from_text(text).text == text


def test_clips_are_compared_frame_by_frame(tmp_path: Path) -> None:
    """A clip may come to its reference's picture late."""
    for name in ("a", "b"):
        encode(tmp_path / f"{name}.mp4", moving(name))
    encode(tmp_path / "dark.mp4", moving("a") // 2)
    facts = {name: probe_file(MediaFile(tmp_path / f"{name}.mp4")).facts["outlines"] for name in ("a", "b", "dark")}
    assert len(facts["a"]) == 4
    assert (compare_outlines(facts["a"], facts["dark"]) or 0) > 0.8
    assert (compare_outlines(facts["a"], facts["b"]) or 0) < ALIKE
    last_frame = [facts["a"][-1]]
    assert compare_outlines(facts["a"], last_frame) == pytest.approx(1)
    assert (compare_outlines(last_frame, facts["a"]) or 0) < 0.99  # the first frame


def test_in_a_set_of_edits_a_pair_of_strangers_stands_out(tmp_path: Path) -> None:
    clips = edited(tmp_path, "negative")
    first_index, second_index = (NAMES.index(name) for name in "dl")
    clips[first_index], clips[second_index] = (
        replace(clips[first_index], references=clips[second_index].references),
        replace(clips[second_index], references=clips[first_index].references),
    )
    samples = audit_media(clips, None)
    assert {sample.file: codes(sample) for sample in samples if sample.findings} == {
        "d": ["reference_unlike"],
        "l": ["reference_unlike"],
    }
    finding = samples[3].findings[0]
    assert finding.verdict == "warn"
    assert finding.message.startswith("its reference has nothing in common with it (likeness ")
    assert summarise_pairs(samples) == []
    assert samples[0].facts["likeness"][0] > 0.8
    assert "outlines" not in samples[0].facts
    assert samples[0].references[0] is not None, "a sound pair is shown too"


def test_sets_of_subjects_have_a_note_and_no_warnings(tmp_path: Path) -> None:
    """The second reference of each is a subject that is seen elsewhere; the first is the scene."""
    clips = edited(tmp_path, "object")
    other_clips = [replace(clip, references=clips[k - 5].references) for k, clip in enumerate(clips)]
    samples = audit_media(other_clips, None)
    assert not any(sample.findings for sample in samples)
    (note,) = summarise_pairs(samples)
    assert note.startswith("In ")
    assert "of 12 pairs, a sample looks like its reference in place" in note
    subject_clips = [
        replace(clip, references=(*clip.references, *other_clip.references))
        for clip, other_clip in zip(clips, other_clips, strict=True)
    ]
    samples = audit_media(subject_clips, None)
    assert not any(sample.findings for sample in samples)
    (note,) = summarise_pairs(samples)
    assert "looks like its reference 2 in place" in note


def test_a_copy_as_reference_is_named_whatever_it_is_stored_as(tmp_path: Path) -> None:
    """A small edit is no copy."""
    image = Image.fromarray(moving("a", frames=1, height=192, width=288)[0])
    image_file = saved(tmp_path, "a.png", image)
    other_files = {
        "bytes": saved(tmp_path, "same.png", image),
        "jpeg": saved(tmp_path, "a.jpg", image, quality=85),
        "twice": saved(tmp_path, "twice.png", image.resize((576, 384))),
        "lighter": saved(tmp_path, "light.png", image.point(lambda level: min(255, level + 12))),
        "object": saved(tmp_path, "object.png", with_disc(image, 0.3, 0.6)),
    }
    clips = [a_clip(name, image_file, other_file) for name, other_file in other_files.items()]
    codes_by_file = {sample.file: codes(sample) for sample in audit_media(clips, None)}
    assert {name for name, sample_codes in codes_by_file.items() if "reference_same" in sample_codes} == {
        "bytes",
        "jpeg",
        "twice",
    }
    a, b = (
        probe_file(file).thumbnail for file in (image_file, saved(tmp_path, "t.png", image.rotate(90, expand=True)))
    )
    assert a is not None
    assert b is not None
    assert is_same_picture(a, a)
    assert not is_same_picture(a, b)


def test_what_is_wrong_with_a_reference_is_said_of_its_sample(tmp_path: Path) -> None:
    image_file = saved(tmp_path, "own.png", scene("a"))
    (tmp_path / "torn.png").write_bytes((tmp_path / "own.png").read_bytes()[:-2000])
    (tmp_path / "words.png").write_text("no picture")
    cases = {
        "torn": (MediaFile(tmp_path / "torn.png"), "reject", "truncated"),
        "words": (MediaFile(tmp_path / "words.png"), "reject", "not_media"),
        "gone": (MediaFile(tmp_path / "gone.png"), "reject", "reference_missing"),
        "tiny": (saved(tmp_path, "tiny.png", scene("a").resize((15, 15))), "reject", "too_small"),
        "black": (saved(tmp_path, "black.png", Image.new("RGB", (96, 96))), "warn", "black"),
        "one": (saved(tmp_path, "one.png", Image.new("RGB", (96, 96), "red")), "warn", "constant"),
        "small": (
            saved(tmp_path, "small.png", scene("a").resize((34, 22))),
            "warn",
            "reference_small",
        ),
    }
    clips = [a_clip(name, image_file, reference) for name, (reference, _, _) in cases.items()]
    sample_by_file = {judged_sample.file: judged_sample for judged_sample in audit_media(clips, None)}
    for name, (media, verdict, code) in cases.items():
        assert (sample_by_file[name].verdict, code in codes(sample_by_file[name])) == (
            verdict,
            True,
        ), name
        message = next(finding.message for finding in sample_by_file[name].findings if finding.code == code)
        assert message.startswith("its reference ")
        assert media.name in message or code == "reference_small"
    assert sample_by_file["small"].findings[0].message == ("its reference has 34 x 22 pixels, and the sample 144 x 96")
    bad_clip = a_clip("both", image_file, image_file, MediaFile(tmp_path / "gone.png"))
    (sample,) = audit_media([bad_clip], None)
    assert (
        sample.findings[0].message
        == "its reference 1 is the same picture, from which the model learns to change nothing"
    )
    assert sample.findings[1].message.startswith(f"its reference 2 {tmp_path}/gone.png: ")


def test_a_reference_that_the_model_enlarges_is_named(tmp_path: Path) -> None:
    clip = a_clip("a", saved(tmp_path, "a.png", scene("a")), saved(tmp_path, "b.png", scene("b")))
    data = DataConfig(path="x", height=96, width=144)

    def judged(height: int, width: int) -> list[str]:
        shape = VideoShape(1, height, width)
        calls: list[tuple[int, int, VideoShape]] = []

        def encoded_in(height: int, width: int, sample: VideoShape) -> VideoShape:
            calls.append((height, width, sample))
            return shape

        (audited,) = audit_media([clip], data, reference_shape=encoded_in)
        assert calls == [(96, 144, VideoShape(1, 96, 144))]
        return [finding.message for finding in audited.findings if finding.code == "reference_upscaled"]

    assert judged(100, 150) == judged(48, 64) == []
    assert judged(192, 288) == [
        "its reference has 144 x 96 pixels, and is encoded in 288 x 192: it is enlarged 2.00 times"
    ]


def test_masks_are_judged_beside_their_pictures(tmp_path: Path) -> None:
    image_file = saved(tmp_path, "own.png", scene("a"))
    clear = scene("b").convert("RGBA")
    clear.putalpha(0)
    part = scene("b").convert("RGBA")
    part.putalpha(Image.linear_gradient("L").resize((144, SIDE)))
    dot = Image.new("L", (144, SIDE))
    dot.putpixel((7, 7), 1)
    grey = Image.linear_gradient("L")
    (tmp_path / "words.png").write_text("no picture")
    masks = {
        "fits": (LossMask(saved(tmp_path, "fits.png", grey.resize((72, 48)))), None),
        "dot": (LossMask(saved(tmp_path, "dot.png", dot)), None),
        "black": (
            LossMask(saved(tmp_path, "black.png", Image.new("L", (144, SIDE)))),
            "mask_black",
        ),
        "square": (LossMask(saved(tmp_path, "square.png", grey)), "mask_shape"),
        "gone": (LossMask(MediaFile(tmp_path / "gone.png")), "mask_missing"),
        "words": (LossMask(MediaFile(tmp_path / "words.png")), "not_media"),
        "video": (LossMask(MediaFile(tmp_path / "video.mp4")), "not_media"),
    }
    encode(tmp_path / "video.mp4", moving("a"))
    clips = [Clip(name, image_file, name, mask=mask) for name, (mask, _) in masks.items()]
    # A picture whose own transparency is its mask is a mask and a picture of the same bytes.
    for name, image in (("clear", clear), ("part", part)):
        media = saved(tmp_path, f"{name}.png", image)
        clips.append(Clip(name, media, name, mask=LossMask(media, alpha=True)))
    twins = ("duplicate_clip", "near_duplicate_clip")
    sample_by_file = {sample.file: sample for sample in audit_media(clips, None)}
    codes_by_file = {
        name: [code for code in codes(item) if code not in twins] for name, item in sample_by_file.items()
    }
    expected: dict[str, list[str]] = {name: [code] if code else [] for name, (_, code) in masks.items()}
    assert codes_by_file == {**expected, "clear": ["constant", "mask_black"], "part": []}
    assert all(sample.verdict == "reject" for name, sample in sample_by_file.items() if codes_by_file[name])
    assert (
        sample_by_file["fits"].facts["learned"]
        == sample_by_file["part"].facts["learned"]
        == pytest.approx(0.5, abs=0.01)
    )
    assert sample_by_file["clear"].findings[1].message == "it is completely transparent: nothing of it is learned"
    assert sample_by_file["square"].findings[0].message.startswith("its mask is 256 x 256 and the picture 144 x 96")
    assert sample_by_file["fits"].mask is not None


def test_masks_of_one_level_and_samples_without_references_are_noted(tmp_path: Path) -> None:
    clips = edited(tmp_path, "grey", "abcd")
    white = LossMask(saved(tmp_path, "white.png", Image.new("L", (144, SIDE), 255)))
    clips = [replace(clip, mask=white) for clip in clips]
    clips[1] = replace(clips[1], references=())
    (none, masked) = summarise_pairs(audit_media(clips, None))
    assert none == "1 of 4 samples have no reference."
    assert masked == "The masks of all 4 samples that have one are white: nothing is masked."
    plain = [Clip(clip.id, clip.media, "x") for clip in clips]
    assert summarise_pairs(audit_media(plain, None)) == []


def no_decoding(jobs: Any, workers: int) -> Any:
    for _, media in jobs:
        raise AssertionError(f"{media} is decoded")
    yield from ()


def test_verdicts_on_pairs_are_remembered_by_all_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clips = edited(tmp_path, "negative", "abcd")
    mask = saved(tmp_path, "mask.png", scene("z").convert("RGBA"))
    clips = [replace(clip, mask=LossMask(mask)) for clip in clips]
    path, digests = tmp_path / "audit.jsonl", Digests(tmp_path / "digests.json")
    first_samples = audit_media(clips, None, memo=AuditMemo(path), digests=digests)
    monkeypatch.setattr(runner, "probe_all", no_decoding)
    assert audit_media(clips, None, memo=AuditMemo(path), digests=digests) == first_samples
    assert audit_from_stored_measurements(clips, None, memo=AuditMemo(path), digests=digests) == first_samples
    # The same files in other roles: what was measured of a picture says nothing of a mask.
    with_alpha = [replace(clips[0], mask=LossMask(mask, alpha=True))]
    assert audit_from_stored_measurements(with_alpha, None, memo=AuditMemo(path), digests=digests) == []
    with pytest.raises(AssertionError, match="alpha=True"):
        audit_media(with_alpha, None, memo=AuditMemo(path), digests=digests)
    # A reference that changed makes its pair unknown, and no other.
    saved(tmp_path / "before", "b.png", scene("changed"))
    remembered_samples = audit_from_stored_measurements(clips, None, memo=AuditMemo(path), digests=digests)
    assert [sample.file for sample in remembered_samples] == ["a", "c", "d"]


def test_edits_of_one_picture_and_in_one_caption_are_no_duplicates(tmp_path: Path) -> None:
    image = scene("a")
    image_file = saved(tmp_path, "own.png", image)
    near_file = saved(tmp_path, "near.jpg", image)
    darker = [saved(tmp_path, f"{k}.png", image.point(lambda level: level // 2)) for k in (1, 2)]
    lighter = saved(tmp_path, "3.png", ImageOps.invert(image))
    clips = [
        a_clip("first", image_file, darker[0]),
        a_clip("near", near_file, lighter),
        a_clip("other", image_file, lighter),
        a_clip("same", image_file, darker[1]),
    ]
    codes_by_file = {sample.file: codes(sample) for sample in audit_media(clips, None)}
    assert codes_by_file == {"first": [], "near": [], "other": [], "same": ["duplicate_clip"]}
    assert check_captions(clips, None, None) == {}
    plain = [Clip(clip.id, clip.media, clip.caption) for clip in clips]
    assert "near_duplicate_clip" in codes(audit_media(plain, None)[1])
    assert check_captions(plain, None, None)
