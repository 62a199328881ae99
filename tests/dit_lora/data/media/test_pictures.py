"""Pictures of every format come out as Pillow and viewers show them: size and pixels of one reading, in sRGB."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

from dit_lora.data.audit.probe import probe_file
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.pictures import open_image, read_image_size
from dit_lora.data.media.video import read_frames, read_header, write_video

PROFILES = Path(__file__).parents[3] / "fixtures" / "pictures"
HEIGHT, WIDTH = 24, 36
FORMATS = (
    "png",
    "apng",
    "jpg",
    "jfif",
    "jpe",
    "webp",
    "tif",
    "tiff",
    "gif",
    "bmp",
    "dib",
    "avif",
    "jp2",
    "ppm",
)
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'


def picture(mode: str = "RGB") -> Image.Image:
    """Smooth colours, another in each corner."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    channels = (255 * x / WIDTH, 255 * y / HEIGHT, 255 - 255 * x * y / (WIDTH * HEIGHT))
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8)).convert(mode)


def upright(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def check_as_pillow(path: Path) -> None:
    media, expected = MediaFile(path), upright(path)
    assert is_image(media)
    assert np.array_equal(np.asarray(open_image(media)), expected)
    assert read_image_size(media) == expected.shape[:2]
    header = read_header(path)
    assert (header.height, header.width, header.is_image) == (*expected.shape[:2], True)
    probed = probe_file(media)
    assert probed.faults == ()
    assert (probed.facts["height"], probed.facts["width"]) == expected.shape[:2]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_that_pillow_reads_gives_pillows_pixels(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"a.{format}"
    picture().save(path, format={"apng": "png", "jfif": "jpeg"}.get(format))
    check_as_pillow(path)


@pytest.mark.parametrize("orientation", [2, 5, 6, 8])
@pytest.mark.parametrize("format", ["png", "jpg", "webp", "tif", "lzw.tif", "avif"])
def test_size_and_pixels_are_turned_by_the_same_reading(tmp_path: Path, format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"compression": "tiff_lzw"} if "lzw" in format else {}
    picture().save(tmp_path / f"a.{format}", exif=exif, **options)
    check_as_pillow(tmp_path / f"a.{format}")


@pytest.mark.parametrize("orientation", [3, 6])
def test_an_orientation_in_xmp_turns_size_and_pixels(tmp_path: Path, orientation: int) -> None:
    for name in ("a.jpg", "a.webp"):
        picture().save(tmp_path / name, xmp=XMP % orientation)
        check_as_pillow(tmp_path / name)
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", (XMP % orientation).decode())
    picture().save(tmp_path / "a.png", pnginfo=text)
    check_as_pillow(tmp_path / "a.png")
    # The text moves behind the pixels, where Photoshop does not put it and ImageMagick does.
    data = (tmp_path / "a.png").read_bytes()
    chunk, pixels, end = (data.index(name) - 4 for name in (b"iTXt", b"IDAT", b"IEND"))
    late = data[:chunk] + data[pixels:end] + data[chunk:pixels] + data[end:]
    (tmp_path / "late.png").write_bytes(late)
    check_as_pillow(tmp_path / "late.png")


@pytest.mark.parametrize("name", ["p3.png", "adobe.png"])
def test_a_profile_is_converted_to_srgb(tmp_path: Path, name: str) -> None:
    with Image.open(PROFILES / name) as image:
        unconverted, profile = image.convert("RGB"), image.info["icc_profile"]
    icc_profile = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    expected = ImageCms.profileToProfile(unconverted, icc_profile, ImageCms.createProfile("sRGB"))
    assert expected is not None
    pixels = np.asarray(open_image(MediaFile(PROFILES / name)))
    assert np.array_equal(pixels, np.asarray(expected))
    assert np.abs(pixels.astype(int) - np.asarray(unconverted)).max() > 20
    # The transparent part of the same picture is white, and the rest has the same colours.
    glass = unconverted.copy()
    glass.putalpha(Image.new("L", unconverted.size, 255))
    glass.putpixel((0, 0), (9, 9, 9, 0))
    glass.save(tmp_path / "glass.png", icc_profile=profile)
    opened_pixels = np.asarray(open_image(MediaFile(tmp_path / "glass.png")))
    assert opened_pixels[0, 0].tolist() == [255, 255, 255]
    assert np.array_equal(opened_pixels[1:], pixels[1:])


def test_profiles_that_say_nothing_new_leave_pixels_and_cache_keys_alone(tmp_path: Path) -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    digests = Digests(tmp_path / "memo.json")
    cases = {"none": (picture(), b""), "srgb": (picture(), srgb), "damaged": (picture(), srgb[:99])}
    cases["grey"] = picture("L"), srgb
    for name, (image, profile) in cases.items():
        image.save(tmp_path / f"{name}.png", icc_profile=profile or None)
        media = MediaFile(tmp_path / f"{name}.png")
        assert np.array_equal(np.asarray(open_image(media)), np.asarray(image.convert("RGB")))
        assert digests.hash_pixels(media) == digests.hash_media(media)
    other_media = MediaFile(PROFILES / "p3.png")
    assert digests.hash_pixels(other_media) == f"{digests.hash_media(other_media)}+srgb"
    digests.save()
    remembered = Digests(tmp_path / "memo.json")
    assert remembered.hash_pixels(other_media) == f"{remembered.hash_media(other_media)}+srgb"
    assert remembered.hash_media(other_media) == digests.hash_media(other_media)


def test_content_decides_what_a_file_is(tmp_path: Path) -> None:
    video = np.random.default_rng(0).integers(0, 255, (4, HEIGHT, WIDTH, 3), np.uint8)
    import torch

    write_video(tmp_path / "clip.mp4", torch.from_numpy(video), 8)
    os.rename(tmp_path / "clip.mp4", tmp_path / "clip.jpg")
    picture().save(tmp_path / "still.mp4", "PNG")
    picture().save(tmp_path / "still.unknown", "JPEG")
    for name, is_still in (("clip.jpg", False), ("still.mp4", True), ("still.unknown", True)):
        assert is_image(tmp_path / name) == is_still
        assert read_header(tmp_path / name).is_image == is_still
        assert probe_file(MediaFile(tmp_path / name)).faults == ()
    clip = read_frames(tmp_path / "clip.jpg", frames=4, height=HEIGHT, width=WIDTH, fps=8)
    assert len(clip) == 4
    still = read_frames(tmp_path / "still.mp4", frames=1, height=HEIGHT, width=WIDTH, fps=None)
    assert np.array_equal(still[0].permute(1, 2, 0).numpy(), np.asarray(picture()))


def test_a_gif_that_moves_is_a_video_of_pillows_frames(tmp_path: Path) -> None:
    frames = [picture(), ImageOps.mirror(picture())]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=200)
    assert not is_image(tmp_path / "a.gif")
    first_frame = read_frames(tmp_path / "a.gif", frames=1, height=HEIGHT, width=WIDTH, fps=None)
    assert np.array_equal(first_frame[0].permute(1, 2, 0).numpy(), upright(tmp_path / "a.gif"))
    assert probe_file(MediaFile(tmp_path / "a.gif")).facts["frames"] == 2


def test_heic_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99))
    assert is_image(tmp_path / "a.heic")
    (fault,) = probe_file(MediaFile(tmp_path / "a.heic")).faults
    assert "HEIC" in fault.message
    with pytest.raises(Exception, match="HEIC"):
        read_header(tmp_path / "a.heic")
