"""Judgement of a file from what was measured of it, for a given recipe or in general.

Levels are 0 to 255.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.data.audit.container import is_other_kind
from dit_lora.data.audit.finding import Finding
from dit_lora.data.audit.image_probe import odd_mode
from dit_lora.data.audit.measure import SIDE, PictureMeasures
from dit_lora.data.audit.probe import ProbedFile
from dit_lora.data.audit.sound import judge_sound
from dit_lora.data.buckets.buckets import Dropped, Placed, buckets_of, place
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, suffix
from dit_lora.data.media.video_header import VideoHeader

if TYPE_CHECKING:
    import torch

# The brightest level of a black clip, but for 1 pixel in 2,000: limited-range black read as full range is 16.
_BLACK_MOST = 32
# One colour, encoded by x264 at crf 1 to 45, comes back within 1 level; noise of 2 levels each way as 5 at crf 18.
_CONSTANT_LEVELS = 2
# Standard deviation of a picture's levels; the faintest of seven real clips has 43, noise of 4 levels each way 1.6.
_FAINT_CONTRAST = 4.0
# Levels between the darkest and the brightest, in luma and in each colour; the narrowest of seven real clips has 198.
_NARROW_RANGE = 96
_FROZEN_SECONDS = 1.0
_FROZEN_SHARE = 0.5
# Fewer may be two frames that are shown long.
_FROZEN_FRAMES = 3
# Most models' sides are multiples of 16 pixels.
_SIDE_STEP = 16
# One token, in pixels, of an 8x VAE and a 2x2 patch.
_SMALLEST = 16
_MOST_CROPPED = 0.25
MOST_ENLARGED = 1.05
"""Factor up to which nothing is said: players and cameras round sizes to multiples of 16."""
# Re-encoders leave aspects such as 639:640.
_SQUARE = 0.02
_COUNT_SLACK, _DURATION_SLACK = 0.02, 0.05
# 23.976 stands for 24.
_FPS_SLACK = 0.05
# Share of the intervals; a dropped frame now and then is usual.
_IRREGULAR_SHARE = 0.02

ReferenceShape = Callable[[int, int, VideoShape], VideoShape]
"""Returns the shape that a model is given of a reference of that height and width, for a sample of that shape."""


@dataclass(frozen=True)
class Requirements:
    """Requirements of a recipe for every sample."""

    data: DataConfig
    shapes: tuple[VideoShape, ...]
    reference_shape: ReferenceShape | None = None

    @classmethod
    def of(
        cls,
        data: DataConfig,
        shapes: Sequence[VideoShape] = (),
        reference_shape: ReferenceShape | None = None,
    ) -> "Requirements":
        """Return a recipe's requirements; `shapes` are those that its model can train, by default all buckets."""
        buckets = tuple(shapes) or buckets_of(data, _SIDE_STEP, lambda _: None)
        return cls(data, buckets, reference_shape)

    @property
    def frames(self) -> int:
        """The smallest number of frames that is enough."""
        return min(shape.frames for shape in self.shapes)


def judge(media: Media, probed: ProbedFile, wanted: Requirements | None) -> list[Finding]:
    """Return everything wrong with a file; without `wanted`, in general."""
    facts = probed.facts
    findings = [*probed.faults, *_name(media, facts)]
    # A file that could not be decoded has no pictures to judge.
    if probed.faults or "frames" not in facts:
        return findings
    small = _too_small(facts)
    if small:
        return [*findings, small]
    if is_image(media):
        findings += _image_format(facts)
    else:
        findings += [*_video_format(facts), *_header(facts), *_timing(facts)]
    findings += _pictures(facts, facts.get("seconds"))
    if wanted is None and not is_image(media) and facts["frames"] == 1:
        message = "it is a video of one frame, in which nothing moves"
        findings.append(_warn("too_short", message, "give it as an image, or remove it"))
    if wanted is not None:
        findings += [*_length(media, facts, wanted), *_shape(facts, wanted)]
        if wanted.data.sound and wanted.data.fps is not None:
            findings += judge_sound(facts, wanted.frames, wanted.data.fps)
    return findings


def judge_frames(frames: "torch.Tensor") -> list[Finding]:
    """Return what is wrong with the pictures of a decoded sample, uint8 (F, 3, H, W), by the same measures.

    An image is one frame. Nothing is known of the file or of times.
    """
    from torch.nn.functional import adaptive_avg_pool2d

    pictures = PictureMeasures()
    for frame in frames:
        small = adaptive_avg_pool2d(frame.float(), SIDE).round().byte()
        pictures.add(small.permute(1, 2, 0).numpy())
    # Levels of a few frames, at every other pixel, are enough for the contrast and the range.
    for frame in frames[:: max(1, len(frames) // 4)]:
        red, green, blue = frame[:, ::2, ::2].float()
        luma = 0.299 * red + 0.587 * green + 0.114 * blue
        pictures.add_levels(luma.round().byte().numpy())
    return list(_pictures(pictures.facts(range(len(frames) + 1)), None))


def _name(media: Media, facts: Mapping[str, Any]) -> Iterator[Finding]:
    end, content = suffix(media), facts.get("content")
    if content is None and "frames" in facts:
        message = f"its content is {facts['container'].split(',')[0]}, and its name ends in {end}"
        yield _warn("wrong_extension", message, "rename it, or convert it")
    elif content is not None and is_other_kind(end, content):
        message = f"its content is {content}, and its name ends in {end}"
        yield _warn("wrong_extension", message, f"rename it to {content}")


def _too_small(facts: Mapping[str, Any]) -> Finding | None:
    height, width = shown_size(facts)
    if min(height, width) >= _SMALLEST:
        return None
    message = f"{width:g} x {height:g} pixels; no side may be below {_SMALLEST}"
    return Finding("too_small", message, "reject", "remove it")


def _image_format(facts: Mapping[str, Any]) -> Iterator[Finding]:
    odd = odd_mode(facts["pixel_format"], facts["bits"])
    if odd:
        yield _warn("odd_pixel_format", f"{odd}, converted to RGB of 8 bits", "check its colours")
    if facts["alpha"]:
        yield _warn("alpha", "its transparent parts become white", "put it before a background")
    if facts["orientation"] not in (0, 1):
        message = f"turned as its EXIF orientation {facts['orientation']} says"
        yield _warn("rotated", message, "check that it is upright")
    if facts["pictures"] > 1:
        message = f"it holds {facts['pictures']} pictures, of which the first is used"
        yield _warn("frame_count", message, "convert it to a video to train on all of them")


def _video_format(facts: Mapping[str, Any]) -> Iterator[Finding]:
    name = facts["pixel_format"]
    changes = ["mirrors it"] if facts["mirrored"] else []
    if facts["rotation"]:
        changes.append(f"turns it by {facts['rotation']} degrees")
    if changes:
        message = f"a flag {' and '.join(changes)}"
        yield _warn("rotated", message, "check that it is upright")
    if facts["bits"] > 8:
        message = f"{facts['bits']} bits ({name}) are read as 8"
        yield _warn("ten_bit", message, "none, unless its gradients show bands")
    if facts["hdr"]:
        message = f"{facts['hdr']} colours are read as those of BT.709, dull or wrong"
        yield _warn("hdr", message, "map its tones to SDR: ffmpeg -vf zscale=t=linear,tonemap,...")
    if facts["alpha"]:
        yield _warn("alpha", "its transparency is dropped", "put it before a background")
    odd = [
        ("a palette", facts["palette"]),
        ("chroma in full resolution", facts["full_chroma"]),
        # JPEG has no other range.
        ("full-range levels", facts["full_range"] and facts["codec"] != "mjpeg"),
    ]
    named = ", ".join(message for message, is_so in odd if is_so)
    if named:
        yield _warn("odd_pixel_format", f"{name}: {named}", "check its colours")
    if facts["interlaced"]:
        message = "two fields a frame: what moves looks like a comb"
        yield _warn("interlaced", message, "ffmpeg -i IN -vf bwdif=send_frame OUT")
    if abs(facts["pixel_aspect"] - 1) > _SQUARE:
        message = (
            f"its pixels are {facts['pixel_aspect']:.3g} times as wide as high; it is stretched"
        )
        yield _warn("non_square_pixels", message, "none, if a player shows it in the same shape")
    if facts["streams"] > 1:
        message = f"{facts['streams']} video streams, of which the first is used"
        yield _warn("several_streams", message, "ffmpeg -i IN -map 0:v:0 -c copy OUT")


def _header(facts: Mapping[str, Any]) -> Iterator[Finding]:
    count, stated = facts["frames"], facts["header_frames"]
    if stated and abs(stated - count) > max(1, _COUNT_SLACK * stated):
        message = f"its header counts {stated} frames, and {count} come out"
        yield _warn("frame_count", message, "ffmpeg -i IN OUT writes a new header")
    seconds, stated = facts["seconds"], facts["header_seconds"]
    # Matroska counts from 0, whenever the first frame is shown.
    off = (
        min(abs(stated - seconds), abs(stated - facts["header_start"] - seconds)) if stated else 0.0
    )
    if off > max(2.5 / facts["fps"], _DURATION_SLACK * seconds):
        message = f"its header says {stated:.2f} s, and its frames last {seconds:.2f} s"
        yield _warn("duration", message, "ffmpeg -i IN OUT writes a new header")


def _timing(facts: Mapping[str, Any]) -> Iterator[Finding]:
    remedy = "none: frames are chosen by their time; ffmpeg -i IN -r FPS OUT makes them even"
    if facts["backwards"]:
        message = f"its time stamps run backwards {facts['backwards']} times"
        yield _warn("variable_frame_rate", message, "encode it anew")
    elif facts["irregular"] > _IRREGULAR_SHARE:
        low, high = facts["shortest_interval"], facts["longest_interval"]
        message = (
            f"{facts['irregular']:.0%} of its frames last longer or shorter than is usual in it: "
            f"from {1000 * low:.0f} to {1000 * high:.0f} ms"
        )
        yield _warn("variable_frame_rate", message, remedy)


def _pictures(facts: Mapping[str, Any], seconds: float | None) -> Iterator[Finding]:
    """Yield findings about what the pictures show; without `seconds`, times are counted in frames."""
    unit = "frames" if seconds is None else "s"
    # Contrast, colour and motion of black pictures say nothing, so one finding is enough.
    if facts["black_share"] == 1 and facts["luma_max"] <= _BLACK_MOST:
        yield Finding("black", "every picture is black", "reject", "remove it")
        return
    if facts["levels"] <= _CONSTANT_LEVELS >= facts["luma_max"] - facts["luma_min"]:
        message = f"one colour in every pixel (luma {facts['luma_mean']:.0f})"
        yield Finding("constant", message, "reject", "remove it")
        return
    if facts["black"]:
        start, length = facts["black"][0]
        message = (
            f"{facts['black_share']:.0%} of it is black, first from {start:g} for {length:g} {unit}"
        )
        yield _warn("black_frames", message, "cut them off")
    if facts["contrast"] < _FAINT_CONTRAST:
        message = f"hardly anything is to be seen: the levels deviate by {facts['contrast']:.1f}"
        yield _warn("near_constant", message, "remove it, unless it is meant")
    low, high = facts["luma_min"], facts["luma_max"]
    if max(high - low, facts["levels"]) < _NARROW_RANGE:
        message = f"its luma goes from {low} to {high} of 0 to 255, and no colour further"
        yield _warn("low_range", message, "stretch its levels, unless it is meant")
    yield from _motion(facts, seconds, unit)


def _motion(facts: Mapping[str, Any], seconds: float | None, unit: str) -> Iterator[Finding]:
    still = facts["still"]
    long = seconds is not None and still["seconds"] >= _FROZEN_SECONDS - 1e-3
    most = still["share"] >= _FROZEN_SHARE
    if still["frames"] >= _FROZEN_FRAMES and (long or most):
        message = (
            f"one picture stands still from {still['start']:g} for {still['seconds']:g} {unit}"
        )
        yield _warn("frozen", message, "cut it off, or train on it as an image")
    cuts = facts["cuts"]
    if cuts:
        shown = ", ".join(f"{cut:g}" for cut in cuts[:5]) + (" ..." if len(cuts) > 5 else "")
        message = f"it cuts to another shot at {shown} {unit}"
        yield _warn("hard_cut", message, "split it there, and caption each part")


def _length(media: Media, facts: Mapping[str, Any], wanted: Requirements) -> Iterator[Finding]:
    """Yield findings about the length, counted as training does: each frame serves the times that it is nearest to."""
    fps = wanted.data.fps or 1.0
    if is_image(media):
        gives = 1
    else:
        end = facts["last_at"] + facts["last_interval"] / 2
        # The same count as `decode.Wanted.until`, from the frames' own times.
        gives = math.floor(end * fps + 1e-6) + 1
    if gives < wanted.frames:
        message = f"{wanted.frames} frames at {fps:g} fps are asked for, and it gives {gives}"
        remedy = "lower data.frames, raise data.fps or remove it"
        yield Finding("too_short", message, "reject", remedy)
    if not is_image(media) and wanted.frames > 1 and facts["fps"] < (1 - _FPS_SLACK) * fps:
        message = f"{facts['fps']:g} frames a second for data.fps {fps:g}: frames repeat"
        yield _warn("fps_low", message, f"lower data.fps to {facts['fps']:g}, or remove it")


def _shape(facts: Mapping[str, Any], wanted: Requirements) -> Iterator[Finding]:
    """Yield findings about the bucket that the clip goes to."""
    height, width = shown_size(facts)
    placed = placed_in(facts, wanted)
    if isinstance(placed, Dropped):
        # A clip that is too short is judged by its frames, in `_length`.
        if placed.code != "too_short":
            yield _warn(placed.code, f"it is left out: {placed.words}", "add a bucket of its shape")
        return
    size = f"{width:g} x {height:g} for {placed.shape.width} x {placed.shape.height} pixels"
    if placed.upscale > MOST_ENLARGED:
        message = f"{size}: it is enlarged {placed.upscale:.2f} times"
        yield _warn("upscaled", message, "lower data.height and data.width, or remove it")
    if placed.crop > _MOST_CROPPED:
        message = f"{size}: {placed.crop:.0%} of the picture is cropped away"
        yield _warn("cropped", message, "add a bucket of its shape, or remove it")


def placed_in(facts: Mapping[str, Any], wanted: Requirements) -> Placed | Dropped:
    """Return the bucket that a clip goes to."""
    height, width = shown_size(facts)
    header = VideoHeader(
        fps=facts.get("fps"),
        seconds=facts.get("seconds"),
        frames=facts["frames"],
        height=round(height),
        width=round(width),
        is_image="seconds" not in facts,
    )
    return place(header, wanted.shapes, wanted.data)


def shown_size(facts: Mapping[str, Any]) -> tuple[float, float]:
    """Return height and width in square pixels, upright."""
    height, width = facts["height"], facts["width"] * facts.get("pixel_aspect", 1.0)
    if facts.get("rotation", 0) % 180:
        height, width = width, height
    return round(height, 1), round(width, 1)


def _warn(code: str, message: str, remedy: str) -> Finding:
    return Finding(code, message, "warn", remedy)
