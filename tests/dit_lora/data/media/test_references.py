"""References at their own size, and masks as their sample is scaled: upright, of any mode, and whole."""

import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from dit_lora.config.data import VideoShape
from dit_lora.data.media import opened
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.pictures import find_mask_mismatch
from dit_lora.data.media.references import read_mask, read_reference
from dit_lora.data.media.video import ClipError, read_header, write_video

EXIF_ORIENTATION = 0x0112


def ramp(height: int, width: int) -> np.ndarray:
    """Levels that rise from 0 at the left to 255 at the right; every second row is darker."""
    levels = np.linspace(0, 255, width).round().astype(np.uint8)
    return np.stack([levels if row % 2 else levels // 2 for row in range(height)])


def turned(image: Image.Image, path: Path) -> Path:
    """Write a picture as a camera that was held upright does: stored on its side, with a flag."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6  # shown turned clockwise by a quarter
    image.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    return path


def mask_of(path: Path, *, alpha: bool = False, height: int = 4, width: int = 8) -> torch.Tensor:
    return read_mask(MediaFile(path), alpha=alpha, height=height, width=width)


def test_a_reference_keeps_its_size_and_is_upright(tmp_path: Path) -> None:
    picture = Image.fromarray(np.stack([ramp(20, 30), 255 - ramp(20, 30), ramp(20, 30)], axis=-1))
    expected = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    picture.save(tmp_path / "plain.png")
    files = [tmp_path / "plain.png", turned(picture, tmp_path / "turned.png")]
    shape = VideoShape(1, 64, 64)
    for file in files:
        header = read_header(file)
        assert (header.height, header.width) == (20, 30)
        for clip in (None, shape):
            assert torch.equal(read_reference(MediaFile(file), clip, None), expected)


def test_of_a_video_a_reference_is_the_frame_at_its_samples_start(tmp_path: Path) -> None:
    """A clip's reference has as many frames, scaled to the sample's shape."""
    video = torch.arange(8, dtype=torch.uint8).view(8, 1, 1, 1) * 30
    write_video(tmp_path / "a.mp4", video.expand(8, 32, 48, 3).contiguous(), 8)
    media = MediaFile(tmp_path / "a.mp4")
    first_picture, second_picture = (read_reference(media, None, 8.0, start) for start in (0.0, 0.5))
    assert first_picture.shape == second_picture.shape == (1, 3, 32, 48)
    assert [round(picture.float().mean().item() / 30) for picture in (first_picture, second_picture)] == [
        0,
        4,
    ]
    clip = read_reference(media, VideoShape(3, 16, 24), 4.0, 0.25)
    assert clip.shape == (3, 3, 16, 24)
    assert [round(frame.float().mean().item() / 30) for frame in clip] == [2, 4, 6]
    with pytest.raises(ClipError, match=r"a\.mp4: too short: it has no frame 2\.5 s from its"):
        read_reference(media, None, 8.0, 2.5)
    with pytest.raises(ClipError, match=r"a\.mp4: too short: 9 frames at 8 fps"):
        read_reference(media, VideoShape(9, 16, 24), 8.0)


def test_a_videos_pixels_are_square_in_a_reference(tmp_path: Path) -> None:
    with av.open(tmp_path / "a.mkv", "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "0"})
        stream.width, stream.height, stream.pix_fmt = 32, 48, "yuv444p"
        stream.codec_context.sample_aspect_ratio = Fraction(3, 2)
        frame = av.VideoFrame.from_ndarray(np.full((48, 32, 3), 90, np.uint8), format="rgb24")
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert read_reference(MediaFile(tmp_path / "a.mkv"), None, None).shape == (1, 3, 48, 48)


def test_references_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torn_file, bomb, text_file = (
        tmp_path / "torn.png",
        tmp_path / "bomb.png",
        tmp_path / "words.png",
    )
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    Image.fromarray(noise).save(torn_file)
    torn_file.write_bytes(torn_file.read_bytes()[:2000])
    text_file.write_text("no picture")
    Image.new("RGB", (41, 41)).save(bomb)
    monkeypatch.setattr(opened, "MAX_PIXELS", 1600)
    for file, reason in (
        (torn_file, "truncated"),
        (bomb, "41 x 41"),
        (text_file, "cannot identify"),
    ):
        with pytest.raises(ClipError, match=rf"{file.name}: .*{reason}") as error:
            read_reference(MediaFile(file), None, None)
        assert "\n" not in str(error.value)


def saved(image: Image.Image, path: Path) -> Path:
    image.save(path)
    return path


def grey_masks() -> dict[str, Image.Image]:
    """One mask, black to the left of column 4 and of level 102 (0.4) to the right of it, in every mode."""
    levels = np.zeros((4, 8), np.uint8)
    levels[:, 4:] = 102
    grey = Image.fromarray(levels)
    palette = Image.new("P", (8, 4))
    palette.putpalette([0, 0, 0, 102, 102, 102])
    palette.putdata((levels > 0).astype(np.uint8).ravel().tolist())
    rgba_mask = Image.new("RGBA", (8, 4), (255, 255, 255, 0))  # what nobody painted is black
    rgba_mask.paste((102, 102, 102, 255), (4, 0, 8, 4))
    la_mask = Image.new("LA", (8, 4), (255, 0))
    la_mask.paste((255, 102), (4, 0, 8, 4))
    return {
        "grey.png": grey,
        "colour.png": grey.convert("RGB"),
        "opaque.png": grey.convert("RGBA"),
        "palette.png": palette,
        "painted.png": rgba_mask,
        "half.png": la_mask,
        "16_bits.png": Image.fromarray(levels.astype(np.uint16) * 257),
        "32_bits.tif": Image.fromarray(levels.astype(np.int32) * 257),
        "cmyk.tif": grey.convert("RGB").convert("CMYK"),
    }


@pytest.mark.parametrize("name", grey_masks())
def test_a_mask_is_its_grey_values_in_every_mode(tmp_path: Path, name: str) -> None:
    mask = mask_of(saved(grey_masks()[name], tmp_path / name))
    assert mask.dtype == torch.float32
    expected = torch.zeros(4, 8)
    expected[:, 4:] = 102 / 255
    assert torch.equal(mask, expected)


def test_a_mask_of_two_levels_is_0_and_1(tmp_path: Path) -> None:
    mask_image = Image.fromarray(np.tile(np.arange(8) >= 4, (4, 1)))
    assert mask_image.mode == "1"
    assert mask_of(saved(mask_image, tmp_path / "a.png")).unique().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_transparency_is_a_mask(tmp_path: Path, suffix: str) -> None:
    """What is opaque is learned; a picture without transparency is learned whole."""
    picture = Image.new("RGBA", (8, 4), (9, 200, 40, 0))
    picture.paste((9, 200, 40, 51), (2, 0, 4, 4))
    picture.paste((9, 200, 40, 255), (4, 0, 8, 4))
    mask = mask_of(saved(picture, tmp_path / f"a.{suffix}"), alpha=True)
    assert mask[0].tolist() == pytest.approx([0, 0, 0.2, 0.2, 1, 1, 1, 1])
    for number, mode in enumerate(("RGB", "L", "I;16", "P")):
        file = tmp_path / f"{number}.{suffix}"
        Image.new(mode, (8, 4), 7).save(file)
        assert mask_of(file, alpha=True).unique().tolist() == [1.0]


def test_one_colour_of_a_palette_may_be_transparent(tmp_path: Path) -> None:
    image = Image.new("P", (8, 4), 1)
    image.putpalette([255, 255, 255, 255, 255, 255])
    image.paste(0, (0, 0, 4, 4))
    image.save(tmp_path / "a.png", transparency=0)
    for alpha in (True, False):
        mask = mask_of(tmp_path / "a.png", alpha=alpha)
        assert mask[0].tolist() == [0.0] * 4 + [1.0] * 4


@pytest.mark.parametrize("alpha", [True, False])
def test_a_mask_is_turned_upright_as_its_picture_is(tmp_path: Path, alpha: bool) -> None:
    mask = Image.fromarray(ramp(4, 8) | 1)
    if alpha:
        picture = Image.new("RGBA", (8, 4), "white")
        picture.putalpha(mask)
        mask = picture
    file = turned(mask, tmp_path / "a.png")
    header = read_header(file)
    assert find_mask_mismatch((header.height, header.width), (8, 16)) is None
    expected = torch.from_numpy((ramp(4, 8) | 1).astype(np.float32) / 255)
    assert torch.equal(mask_of(file, alpha=alpha), expected)


def test_a_mask_is_scaled_and_cropped_as_its_sample(tmp_path: Path) -> None:
    """The centre is kept; a mask may be smaller than its picture; what is black beside an edge stays 0."""
    levels = np.zeros((40, 80), np.uint8)
    levels[:, 40:] = 255
    file = saved(Image.fromarray(levels), tmp_path / "a.png")
    mask = mask_of(file, height=20, width=20)
    assert torch.equal(mask, torch.cat([torch.zeros(20, 10), torch.ones(20, 10)], dim=1))
    enlarged = mask_of(file, height=100, width=200)
    assert not enlarged[:, :95].any()
    assert (enlarged[:, 105:] == 1).all()


@pytest.mark.parametrize(
    ("image", "alpha", "why"),
    [
        (Image.new("L", (8, 4)), False, "its mask is black"),
        (Image.new("RGBA", (8, 4), (255, 255, 255, 0)), False, "its mask is black"),
        (Image.new("RGBA", (8, 4), (255, 255, 255, 0)), True, "it is completely transparent"),
        (Image.fromarray(np.eye(4, 32, dtype=np.uint8) * 255), False, "is cropped away"),
    ],
)
def test_a_mask_that_leaves_nothing_is_refused(tmp_path: Path, image: Image.Image, alpha: bool, why: str) -> None:
    with pytest.raises(ClipError, match=rf"a\.png: .*{why}, so nothing of the sample would"):
        mask_of(saved(image, tmp_path / "a.png"), alpha=alpha)


def test_masks_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40), np.uint8)).save(stream, "png")
    (tmp_path / "torn.png").write_bytes(stream.getvalue()[:900])
    (tmp_path / "a.mp4").write_bytes(b"video")
    saved(Image.new("F", (8, 4), 0.5), tmp_path / "float.tif")
    faults = {
        "torn.png": "cannot be read as a mask: .*truncated",
        "a.mp4": "a mask must be a picture",
        "float.tif": "floating-point",
        "gone.png": "No such file",
    }
    for name, reason in faults.items():
        with pytest.raises(ClipError, match=reason) as error:
            mask_of(tmp_path / name)
        assert str(error.value).startswith(f"{tmp_path / name}: ")
        assert "\n" not in str(error.value)


def test_a_mask_has_its_pictures_shape_but_for_rounding() -> None:
    assert find_mask_mismatch((512, 768), (1024, 1536)) is None
    assert find_mask_mismatch((33, 50), (1000, 1500)) is None
    message = find_mask_mismatch((768, 512), (512, 768))
    assert message == "its mask is 512 x 768 and the picture 768 x 512: both must have the same shape"
