"""The audit's page shows what was found, stays small, and trusts nothing it was given."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from html_page import Page
from PIL import Image

from dit_lora.config.data import VideoShape
from dit_lora.data.audit.encoded import check_encoded
from dit_lora.data.audit.finding import AuditedSample, Finding
from dit_lora.data.audit.summary import compute_totals
from dit_lora.data.buckets.buckets import DroppedClip
from dit_lora.data.buckets.report import BucketReport, BucketRow
from dit_lora.errors import DitLoraError
from dit_lora.report.audit.page import MAX_CARDS, write_audit_page

HOSTILE = '<script>alert("x")</script> & a cat'
BLACK = Finding("black", "all 9 frames are black", "reject", "remove it")
CUT = Finding("hard_cut", "a cut at 2 s", "warn", "split the clip")
LOW = Finding("fps_low", "6 fps", "warn", "use faster clips")


def jpeg(level: int = 90, size: tuple[int, int] = (96, 16)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, (level, 40, 200)).save(stream, "JPEG")
    return stream.getvalue()


def write(folder: Path, audited_samples: list[AuditedSample], **more: Any) -> Page:
    path = folder / "audit.html"
    page_values = {"title": "kittens", "totals": compute_totals(audited_samples), **more}
    assert write_audit_page(path, audited_samples, **page_values) == path
    return Page(path)


@pytest.fixture
def audited_samples() -> list[AuditedSample]:
    facts = {"width": 720, "height": 480, "fps": 24, "seconds": 2.04, "caption_tokens": 31}
    return [
        AuditedSample("good.mp4", (), facts, jpeg(1)),
        AuditedSample("warned.mp4", (CUT, LOW), facts, jpeg(2)),
        AuditedSample("bad.mp4", (CUT, BLACK), facts, jpeg(3)),
        AuditedSample("broken.mp4", (Finding("unreadable", "no moov atom", "reject", "fetch it again"),)),
    ]


def test_the_page_loads_nothing_and_runs_its_own_scripts_alone(
    tmp_path: Path, audited_samples: list[AuditedSample]
) -> None:
    page = write(tmp_path, audited_samples)
    addresses = [
        value or ""
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "href", "srcset", "poster", "action", "data")
    ]
    assert len(addresses) > 3
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert len(page.all("script")) == 2, "the filters and the viewer"
    assert "@import" not in page.source
    assert "url(" not in page.source
    policy = [tag["content"] for tag in page.all("meta") if "http-equiv" in tag]
    assert policy[0] is not None
    assert policy[0].startswith("default-src 'none'")
    assert policy[0].count("'sha256-") == 2


def test_everything_from_the_data_is_escaped(tmp_path: Path) -> None:
    finding = Finding("black", HOSTILE, "reject", HOSTILE)
    warning = Finding("latent_outlier", HOSTILE, "warn", HOSTILE)
    copy = Finding("duplicate_clip", f"the same bytes as {HOSTILE}", "warn", HOSTILE)
    facts = {"codec": HOSTILE, "width": HOSTILE, "fps": HOSTILE}
    report = BucketReport((), ((HOSTILE, DroppedClip("cropped", HOSTILE)),), (HOSTILE,)).as_dict()
    _, encoded = check_encoded([(HOSTILE, {HOSTILE: torch.ones(2, 3)})])
    page = write(
        tmp_path,
        [
            AuditedSample(HOSTILE, (finding,), facts, jpeg()),
            AuditedSample("b\udcff" + HOSTILE, (warning, copy), facts, jpeg()),
        ],
        title=HOSTILE,
        buckets=report,
        encoded=encoded,
        notes=[HOSTILE],
    )
    assert page.source.count("<script") == 2, "ours"
    assert page.text.count(HOSTILE) >= 12
    assert "b\\udcff" in page.text, "a name that is not UTF-8 is shown all the same"


def test_rejects_come_first_and_their_worst_finding_first(
    tmp_path: Path, audited_samples: list[AuditedSample]
) -> None:
    page = write(tmp_path, audited_samples)
    sheet = page.section("Samples")
    names = re.findall(r"bad\.mp4|broken\.mp4|warned\.mp4|good\.mp4", sheet)
    assert names == ["bad.mp4", "broken.mp4", "warned.mp4", "good.mp4"]
    finding = "black hard_cut all 9 frames are black remove it a cut at 2 s"
    assert f"bad.mp4 720 x 480, 24 fps, 2.04 s {finding}" in sheet
    assert "no picture broken.mp4 unreadable no moov atom fetch it again" in sheet
    assert all("open" not in details for details in page.all("details")), "collapsed"
    numbers = re.findall(r'class="value">([\d,]+)', page.source)
    assert numbers == ["4", "1", "1", "2"]


def test_samples_carry_what_the_filters_compare(tmp_path: Path, audited_samples: list[AuditedSample]) -> None:
    page = write(tmp_path, audited_samples)
    cards = [(card["data-level"], card["data-codes"], card["data-name"]) for card in page.all("article")]
    assert cards == [
        ("reject", "black hard_cut", "bad.mp4"),
        ("reject", "unreadable", "broken.mp4"),
        ("warn", "hard_cut fps_low", "warned.mp4"),
        ("ok", "", "good.mp4"),
    ]
    sheet = page.section("Samples")
    assert "Severity all reject warn ok" in " ".join(sheet.split())
    assert "Finding all black unreadable hard_cut fps_low" in sheet
    assert [link["data-code"] for link in page.all("a")] == ["black", "unreadable", "hard_cut", "fps_low"]


def test_pictures_are_those_of_the_samples(tmp_path: Path, audited_samples: list[AuditedSample]) -> None:
    page = write(tmp_path, audited_samples)
    sources = {str(image["alt"]): str(image["src"]) for image in page.all("img")}
    assert set(sources) == {"frames of bad.mp4", "frames of warned.mp4", "frames of good.mp4"}
    for position, file in ((0, "good.mp4"), (1, "warned.mp4"), (2, "bad.mp4")):
        kind, _, data = sources[f"frames of {file}"].partition(",")
        assert kind == "data:image/jpeg;base64"
        assert base64.b64decode(data) == audited_samples[position].thumbnail


def decoded(uri: str | None) -> np.ndarray:
    """The levels of an embedded picture."""
    data = base64.b64decode(str(uri).partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int16)


def test_references_are_beside_their_sample_in_order(tmp_path: Path) -> None:
    finding = Finding("reference_unlike", "nothing in common", "warn", "look")
    samples = [
        AuditedSample("two.png", (finding,), {}, jpeg(200), (jpeg(50), None)),
        AuditedSample("one.png", (), {}, jpeg(201), (jpeg(51),)),
        AuditedSample("none.png", (), {}, jpeg(202)),
    ]
    page = write(tmp_path, samples)
    images = [(str(image["alt"]), decoded(image["src"])[0, 0, 0]) for image in page.all("img")]
    assert [(alt, round(int(level) / 50)) for alt, level in images] == [
        ("reference 1 of two.png", 1),
        ("frames of two.png", 4),
        ("reference 1 of one.png", 1),
        ("frames of one.png", 4),
        ("frames of none.png", 4),
    ]
    assert "reference 1 no picture reference 2 sample two.png" in page.section("Samples")
    assert "reference sample one.png" in page.section("Samples")
    assert "the mask excludes" not in page.text


def test_what_a_mask_leaves_out_is_tinted_in_every_frame(tmp_path: Path) -> None:
    levels = np.zeros((16, 24), np.uint8)
    levels[:, 12:] = 255
    stream = io.BytesIO()
    Image.fromarray(levels).save(stream, "JPEG", quality=95)
    facts = {"seconds": 2.0}
    samples = [AuditedSample("a.mp4", (), facts, jpeg(200, (96, 16)), (), stream.getvalue())]
    page = write(tmp_path, samples)
    (image,) = page.all("img")
    images = decoded(image["src"])
    plain = decoded("," + base64.b64encode(jpeg(200, (96, 16))).decode())
    differs = np.abs(images - plain).max(-1).mean(0)
    # Four frames of 24 columns, of which the second half of each is learned.
    for frame in range(4):
        assert (differs[24 * frame + 2 : 24 * frame + 10] > 40).all()
        assert (differs[24 * frame + 14 : 24 * frame + 22] < 12).all()
    assert "A tint covers what the mask excludes." in page.section("Samples")
    # Of a picture, a mask of another shape is drawn once.
    samples = [AuditedSample("a.png", (), {}, jpeg(200, (96, 16)), (), stream.getvalue())]
    (image,) = write(tmp_path, samples).all("img")
    differs = np.abs(decoded(image["src"]) - plain).max(-1).mean(0)
    assert (differs[2:44] > 40).all()
    assert (differs[52:] < 12).all()


def test_of_many_pairs_some_are_shown_from_first_to_last(tmp_path: Path) -> None:
    samples = [AuditedSample(f"{n:03d}.png", (), {}, jpeg(), (jpeg(),)) for n in range(500)]
    samples += [AuditedSample(f"{n}.png", (), {}, jpeg()) for n in range(1000, 2000)]
    page = write(tmp_path, samples)
    names = [str(card["data-name"]) for card in page.all("article")]
    assert len(names) == len(set(names)) == MAX_CARDS
    assert (names[0], names[-1]) == ("000.png", "499.png"), "pairs before the others"
    assert "1,300 more samples (ok) are not shown" in page.text
    names = [str(card["data-name"]) for card in write(tmp_path, samples[400:]).all("article")]
    assert (names[0], names[99], names[100], names[-1]) == ("400.png", "499.png", "1000.png", "1999.png")


def test_codes_are_counted_and_lead_to_their_samples(tmp_path: Path, audited_samples: list[AuditedSample]) -> None:
    page = write(tmp_path, audited_samples)
    assert page.section("Findings") == (
        "Code Severity Samples What to do black reject 1 remove it unreadable reject 1 fetch it again "
        "hard_cut warn 2 split the clip fps_low warn 1 use faster clips"
    )
    targets = {tag.get("id") for _, tag in page.tags}
    for link in page.all("a"):
        assert str(link["href"])[1:] in targets


def test_thousands_of_samples_stay_a_small_page_that_says_what_it_leaves_out(
    tmp_path: Path,
) -> None:
    """Every code is shown, however many samples the others have."""
    big = jpeg(size=(1600, 1600)) + bytes(120_000)  # 160 kB of base64
    rare_finding = Finding("truncated", "cut off", "reject")
    finding = Finding("caption_long", "word " * 2000, "warn")
    samples = [AuditedSample(f"{n}.mp4", (BLACK,), {}, big) for n in range(3000)]
    samples += [AuditedSample("rare.mp4", (rare_finding,), {}, big)]
    samples += [AuditedSample(f"w{n}.mp4", (finding, LOW), {}, big) for n in range(3000)]
    samples += [AuditedSample(f"l{n}.mp4", (LOW,)) for n in range(10)]
    page = write(tmp_path, samples)
    assert len(page.source) < 10_000_000
    assert len(page.text) < 200_000, "long words are cut"
    assert len(page.all("article")) == MAX_CARDS
    assert 20 < len(page.all("img")) < MAX_CARDS
    assert {"rare.mp4", "l9.mp4"} <= {card["data-name"] for card in page.all("article")}
    rejects = sum(card["data-level"] == "reject" for card in page.all("article"))
    assert f"{3001 - rejects:,} more samples (reject) are not shown" in page.section("Samples")


def test_a_set_without_a_finding_says_so(tmp_path: Path) -> None:
    page = write(tmp_path, [AuditedSample("a.mp4")])
    assert "every sample is ready" in page.text
    assert "Finding all" not in page.text, "no filter without a finding"
    assert page.all("svg") == []
    write(tmp_path, [])


def test_what_was_measured_is_drawn_and_nothing_else(tmp_path: Path) -> None:
    samples = [
        AuditedSample(
            f"{n}.mp4",
            (),
            {
                "seconds": 0.1 * n,
                "fps": (24, 25, 30)[n % 3],
                "width": 1280 if n % 4 else 480,
                "height": 720,
                "caption_tokens": float("nan"),
            },
        )
        for n in range(1, 101)
    ]
    page = write(tmp_path, samples)
    made_of = page.section("Statistics")
    assert "24 33 33% 25 34 34% 30 33 33%" in made_of
    assert "1280x720 75 75% 480x720 25 25%" in made_of
    assert "2:3 25 25% 16:9 75 75%" in made_of
    assert "Caption length" not in made_of
    counts = [int(count) for count in re.findall(r'title="[^"]* seconds: (\d+)"', page.source)]
    assert sum(counts) == 100
    assert len(counts) > 10


def test_a_few_far_values_do_not_squeeze_a_histogram(tmp_path: Path) -> None:
    samples = [AuditedSample(f"{n}", (), {"seconds": 2 + 0.03 * n}) for n in range(200)]
    samples.append(AuditedSample("long", (), {"seconds": 3600.0}))
    page = write(tmp_path, samples)
    bins = re.findall(r'title="([^"]*) seconds: (\d+)"', page.source)
    assert len(bins) > 10
    assert sum(int(count) for _, count in bins) == 201
    assert bins[-1][0].endswith("and more")


def test_copies_are_grouped_with_what_they_are_copies_of(tmp_path: Path) -> None:
    def copy(file: str, of: str, code: str = "duplicate_clip") -> AuditedSample:
        return AuditedSample(file, (Finding(code, f"the same bytes as {of}", "warn"),))

    samples = [
        AuditedSample("my clips/a b.mp4"),
        copy("c.mp4", "my clips/a b.mp4"),
        copy("d.mp4", "c.mp4", "near_duplicate_clip"),
        AuditedSample("x.mp4"),
        copy("y.mp4", "x.mp4"),
        copy("lost.mp4", "somewhere else"),
    ]
    lines = write(tmp_path, samples).section("Duplicates")
    assert "the copies of one clip. my clips/a b.mp4, c.mp4, d.mp4 x.mp4, y.mp4" in lines


def test_buckets_are_shown_with_their_advice(tmp_path: Path, audited_samples: list[AuditedSample]) -> None:
    row = BucketRow(VideoShape(49, 480, 720), 812, 1624, 0.8, 0.124, 0.31, 4, 1)
    dropped_clips = tuple((f"d{n}.mp4", DroppedClip("too_short", "12 frames")) for n in range(60))
    report = BucketReport((row,), dropped_clips, ("more ratios would help",)).as_dict()
    buckets = write(tmp_path, audited_samples, buckets=report).section("Buckets")
    assert buckets.startswith("more ratios would help")
    assert "49 720 x 480 812 1,624 80.0% 12% 31% 4" in buckets
    assert "Left out 60 clips d0.mp4 too_short 12 frames" in buckets
    assert "10 more clips are in the JSON file" in buckets


def test_channels_of_latents_are_drawn_and_outliers_named(tmp_path: Path) -> None:
    outlier = Finding("latent_outlier", "latent_mean: its mean is 9", "warn")
    _, encoded = check_encoded(
        [
            ("a.mp4", {"latent_mean": torch.tensor([[[-3.0, 5.0]], [[0.5, 0.5]]])}),
            ("b.mp4", {"prompt_embeds": torch.ones(2, 4096)}),
        ]
    )
    page = write(tmp_path, [AuditedSample("a.mp4", (outlier,))], encoded=encoded)
    part = page.section("Latents and embeddings")
    assert "warn a.mp4 latent_mean: its mean is 9" in part
    assert "latent_mean 1 samples, 2 channels; largest magnitude 5.000 in a.mp4" in part
    assert "prompt_embeds 1 samples, 4,096 channels" in part
    titles = [tag["title"] for tag in page.all("div") if "channel" in (tag.get("title") or "")]
    assert len(titles) == 2, "thousands of channels are not drawn"
    assert titles[0] == "channel 0: mean 1.000, standard deviation 4.000"


def test_notes_are_shown(tmp_path: Path, audited_samples: list[AuditedSample]) -> None:
    assert "2 classes have no sample" in write(tmp_path, audited_samples, notes=["2 classes have no sample"]).text


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, audited_samples: list[AuditedSample]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DitLoraError, match=r"cannot write .*audit\.html"):
        write(tmp_path / "file", audited_samples)
