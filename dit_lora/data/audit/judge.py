"""Findings about a file from its measurements, for a given recipe or in general.

Levels are 0 to 255.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.data.audit.container import is_different_format
from dit_lora.data.audit.finding import Finding, make_warning
from dit_lora.data.audit.image_probe import describe_unusual_image_mode
from dit_lora.data.audit.measure import SMALL_SIDE, PictureMeasures
from dit_lora.data.audit.probe import ProbedFile
from dit_lora.data.audit.sound import check_sound
from dit_lora.data.buckets.buckets import BucketPlacement, DroppedClip, choose_bucket, list_buckets
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, get_suffix
from dit_lora.data.media.video_header import VideoHeader

if TYPE_CHECKING:
    import torch

# Maximum level of a black clip, ignoring 1 pixel in 2,000: limited-range black that is read as full range is 16.
_MAX_BLACK_LEVEL = 32
# A single colour encoded by x264 at crf 1 to 45 stays within 1 level; noise of +-2 levels spans 5 at crf 18.
_MAX_CONSTANT_RANGE = 2
# Standard deviation of a picture's levels; the lowest of seven real clips is 43, noise of +-4 levels has 1.6.
_MIN_CONTRAST = 4.0
# Range from the darkest to the brightest level, in luma and in each colour; the smallest of seven real clips is 198.
_MIN_RANGE = 96
_MIN_FROZEN_S = 1.0
_MIN_FROZEN_SHARE = 0.5
# Fewer frames may just be two that are shown for a long time.
_MIN_FROZEN_FRAMES = 3
# Most models' sides are multiples of 16 pixels.
_SIDE_STEP = 16
# Size of one token in pixels, for an 8x VAE and 2x2 patches.
_MIN_SIDE = 16
_MAX_CROP = 0.25
MAX_UPSCALE = 1.05
"""Enlargement factor up to which nothing is reported: cameras and editors round sizes to multiples of 16."""
# Re-encoding leaves pixel aspect ratios such as 639:640.
_ASPECT_TOLERANCE = 0.02
_COUNT_SLACK, _DURATION_SLACK = 0.02, 0.05
# 23.976 fps counts as 24.
_FPS_TOLERANCE = 0.05
# Share of irregular intervals that is accepted; an occasional dropped frame is normal.
_MAX_IRREGULAR_SHARE = 0.02

ReferenceShape = Callable[[int, int, VideoShape], VideoShape]
"""Function of a reference's height and width and the sample's shape; returns the shape in which it is encoded."""


@dataclass(frozen=True)
class SampleRequirements:
    """What a recipe requires of every sample."""

    data: DataConfig
    shapes: tuple[VideoShape, ...]
    reference_shape: ReferenceShape | None = None

    @classmethod
    def from_config(
        cls, data: DataConfig, shapes: Sequence[VideoShape] = (), reference_shape: ReferenceShape | None = None
    ) -> "SampleRequirements":
        """Build the audit's requirements from a recipe.

        `shapes` are those that its model can train; by default all buckets.
        """
        # Without the shapes of a model, every shape on a grid of 16 pixels counts as trainable.
        buckets = tuple(shapes) or list_buckets(data, _SIDE_STEP, lambda _: None)
        return cls(data, buckets, reference_shape)

    @property
    def min_frames(self) -> int:
        """Smallest number of frames of any shape that the recipe allows."""
        return min(shape.frames for shape in self.shapes)


def collect_media_findings(
    media: Media, probed_file: ProbedFile, requirements: SampleRequirements | None
) -> list[Finding]:
    """Collect all findings about a media file; without `requirements`, only those that hold for any recipe."""
    facts = probed_file.facts
    findings = [*probed_file.faults, *_check_name(media, facts)]
    # A file that could not be decoded has no measurements of pictures.
    if probed_file.faults or "frames" not in facts:
        return findings
    height, width = display_size(facts)
    # Below one token nothing else matters: the other checks would only add noise.
    if min(height, width) < _MIN_SIDE:
        message = f"{width:g} x {height:g} pixels; no side may be below {_MIN_SIDE}"
        return [*findings, Finding("too_small", message, "reject", "remove it")]
    if is_image(media):
        findings += _check_image_format(facts)
    else:
        findings += [*_check_video_format(facts), *_check_header(facts), *_check_timing(facts)]
    findings += _check_pictures(facts, facts.get("seconds"))
    if requirements is None and not is_image(media) and facts["frames"] == 1:
        message = "it is a video with one frame"
        findings.append(make_warning("too_short", message, "convert it to an image, or remove it"))
    if requirements is not None:
        findings += [*_check_length(media, facts, requirements), *_check_shape(facts, requirements)]
        if requirements.data.sound and requirements.data.fps is not None:
            findings += check_sound(facts, requirements.min_frames, requirements.data.fps)
    return findings


def collect_frame_findings(frames: "torch.Tensor") -> list[Finding]:
    """Collect all findings about a decoded sample's pictures, uint8 (F, 3, H, W), with the same measures as for files.

    Pictures that are all black or of one colour are rejected; the other findings are warnings. An image is one frame.
    The file and the times are unknown here.
    """
    from torch.nn.functional import adaptive_avg_pool2d

    pictures = PictureMeasures()
    for frame in frames:
        small = adaptive_avg_pool2d(frame.float(), SMALL_SIDE).round().byte()
        # (3, 48, 48) to (48, 48, 3), as the measures expect.
        pictures.add(small.permute(1, 2, 0).numpy())
    # Four frames at half resolution are enough to measure contrast and range.
    for frame in frames[:: max(1, len(frames) // 4)]:
        red, green, blue = frame[:, ::2, ::2].float()
        # ITU-R BT.601, the same weights as Pillow's mode L.
        luma = 0.299 * red + 0.587 * green + 0.114 * blue
        pictures.add_luma_levels(luma.round().byte().numpy())
    return list(_check_pictures(pictures.compute_measurements(range(len(frames) + 1)), None))


def _check_name(media: Media, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if the suffix of a file's name does not match its content."""
    end, content = get_suffix(media), facts.get("content")
    # The file could be decoded, although its first bytes are of no format that is listed here.
    if content is None and "frames" in facts:
        message = f"its content is {facts['container'].split(',')[0]}, and its name ends in {end}"
        yield make_warning("wrong_extension", message, "rename it, or convert it")
    elif content is not None and is_different_format(end, content):
        message = f"its content is {content}, and its name ends in {end}"
        yield make_warning("wrong_extension", message, f"rename it to {content}")


def _check_image_format(facts: Mapping[str, Any]) -> Iterator[Finding]:
    oddity = describe_unusual_image_mode(facts["pixel_format"], facts["bits"])
    if oddity:
        yield make_warning("odd_pixel_format", f"{oddity}, converted to RGB of 8 bits", "check its colours")
    if facts["alpha"]:
        yield make_warning("alpha", "transparent parts become white", "add a background")
    # 1 is upright; 0 is not defined by EXIF but occurs, and changes nothing.
    if facts["orientation"] not in (0, 1):
        message = f"turned as its EXIF orientation {facts['orientation']} says"
        yield make_warning("rotated", message, "check that it is upright")
    if facts["pictures"] > 1:
        message = f"it holds {facts['pictures']} pictures, and only the first is used"
        yield make_warning("frame_count", message, "convert it to a video to train on all of them")


def _check_video_format(facts: Mapping[str, Any]) -> Iterator[Finding]:
    name = facts["pixel_format"]
    changes = ["mirrors it"] if facts["mirrored"] else []
    if facts["rotation"]:
        changes.append(f"turns it by {facts['rotation']} degrees")
    if changes:
        yield make_warning("rotated", f"a flag {' and '.join(changes)}", "check that it is upright")
    if facts["bits"] > 8:
        message = f"{facts['bits']} bits ({name}) are read as 8"
        yield make_warning("ten_bit", message, "none, unless its gradients show bands")
    if facts["hdr"]:
        message = f"{facts['hdr']} colours are read as BT.709, so they are dull or wrong"
        yield make_warning("hdr", message, "convert it to SDR: ffmpeg -vf zscale=t=linear,tonemap,...")
    if facts["alpha"]:
        yield make_warning("alpha", "its transparency is dropped", "add a background")
    oddities = [
        ("a palette", facts["palette"]),
        ("chroma in full resolution", facts["full_chroma"]),
        # Motion JPEG is always full range.
        ("full-range levels", facts["full_range"] and facts["codec"] != "mjpeg"),
    ]
    description = ", ".join(message for message, is_so in oddities if is_so)
    if description:
        yield make_warning("odd_pixel_format", f"{name}: {description}", "check its colours")
    if facts["interlaced"]:
        message = "it is interlaced, so moving parts look like a comb"
        yield make_warning("interlaced", message, "ffmpeg -i IN -vf bwdif=send_frame OUT")
    if abs(facts["pixel_aspect"] - 1) > _ASPECT_TOLERANCE:
        message = f"its pixels are {facts['pixel_aspect']:.3g} times as wide as high; it is stretched"
        yield make_warning("non_square_pixels", message, "none, if a player shows it in the same shape")
    if facts["streams"] > 1:
        message = f"{facts['streams']} video streams, and only the first is used"
        yield make_warning("several_streams", message, "ffmpeg -i IN -map 0:v:0 -c copy OUT")


def _check_header(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings where a video's header disagrees with its decoded frames."""
    count, header_value = facts["frames"], facts["header_frames"]
    if header_value and abs(header_value - count) > max(1, _COUNT_SLACK * header_value):
        message = f"its header counts {header_value} frames, and {count} come out"
        yield make_warning("frame_count", message, "ffmpeg -i IN OUT writes a new header")
    seconds, header_value = facts["seconds"], facts["header_seconds"]
    # Matroska counts the duration from 0, even if the first frame is shown later.
    deviation = (
        min(abs(header_value - seconds), abs(header_value - facts["header_start"] - seconds)) if header_value else 0.0
    )
    if deviation > max(2.5 / facts["fps"], _DURATION_SLACK * seconds):
        message = f"its header says {header_value:.2f} s, and its frames last {seconds:.2f} s"
        yield make_warning("duration", message, "ffmpeg -i IN OUT writes a new header")


def _check_timing(facts: Mapping[str, Any]) -> Iterator[Finding]:
    # Time stamps that run backwards make the frame rate meaningless, so it is not checked then.
    if facts["backwards"]:
        message = f"its time stamps run backwards {facts['backwards']} times"
        yield make_warning("variable_frame_rate", message, "encode it anew")
    elif facts["irregular"] > _MAX_IRREGULAR_SHARE:
        low, high = facts["shortest_interval"], facts["longest_interval"]
        share, interval = f"{facts['irregular']:.0%}", f"{1000 * low:.0f} to {1000 * high:.0f} ms"
        message = f"{share} of its frames last longer or shorter than is usual in it: from {interval}"
        remedy = "none: frames are chosen by their time; ffmpeg -i IN -r FPS OUT makes them even"
        yield make_warning("variable_frame_rate", message, remedy)


def _check_pictures(facts: Mapping[str, Any], seconds: float | None) -> Iterator[Finding]:
    """Yield findings about what a clip's pictures show, such as black or still stretches.

    Without `seconds` (None), times are counted in frames.
    """
    unit = "frames" if seconds is None else "s"
    # For black pictures, contrast, colour and motion mean nothing, so one finding is enough.
    if facts["black_share"] == 1 and facts["luma_max"] <= _MAX_BLACK_LEVEL:
        yield Finding("black", "every picture is black", "reject", "remove it")
        return
    if facts["levels"] <= _MAX_CONSTANT_RANGE >= facts["luma_max"] - facts["luma_min"]:
        yield Finding("constant", f"one colour in every pixel (luma {facts['luma_mean']:.0f})", "reject", "remove it")
        return
    if facts["black"]:
        start, length = facts["black"][0]
        message = f"{facts['black_share']:.0%} of it is black, starting with {start:g} for {length:g} {unit}"
        yield make_warning("black_frames", message, "cut them off")
    if facts["contrast"] < _MIN_CONTRAST:
        message = f"almost nothing is visible: its levels deviate by {facts['contrast']:.1f}"
        yield make_warning("near_constant", message, "remove it, unless it is intended")
    low, high = facts["luma_min"], facts["luma_max"]
    if max(high - low, facts["levels"]) < _MIN_RANGE:
        message = f"its luma goes from {low} to {high} of 0 to 255, and no colour further"
        yield make_warning("low_range", message, "stretch its levels, unless it is intended")
    yield from _check_motion(facts, seconds, unit)


def _check_motion(facts: Mapping[str, Any], seconds: float | None, unit: str) -> Iterator[Finding]:
    still = facts["still"]
    # The small tolerance keeps a standstill of exactly one second from being missed through rounding.
    is_long = seconds is not None and still["seconds"] >= _MIN_FROZEN_S - 1e-3
    is_mostly_still = still["share"] >= _MIN_FROZEN_SHARE
    if still["frames"] >= _MIN_FROZEN_FRAMES and (is_long or is_mostly_still):
        message = f"the picture stands still from {still['start']:g} for {still['seconds']:g} {unit}"
        yield make_warning("frozen", message, "cut it off, or train on it as an image")
    cuts = facts["cuts"]
    if cuts:
        positions = ", ".join(f"{cut:g}" for cut in cuts[:5]) + (" ..." if len(cuts) > 5 else "")
        message = f"it cuts to another shot at {positions} {unit}"
        yield make_warning("hard_cut", message, "split it there, and caption each part")


def _check_length(media: Media, facts: Mapping[str, Any], requirements: SampleRequirements) -> Iterator[Finding]:
    """Yield findings about a clip's length, counted as in training: each time gets the nearest frame."""
    fps = requirements.data.fps or 1.0
    if is_image(media):
        num_available = 1
    else:
        end = facts["last_at"] + facts["last_interval"] / 2
        # The same count as in `decode.RegularFrameTimes.count_frame_times_until`, from the frames' real times.
        num_available = math.floor(end * fps + 1e-6) + 1
    if num_available < requirements.min_frames:
        message = f"{requirements.min_frames} frames at {fps:g} fps are asked for, and it gives {num_available}"
        yield Finding("too_short", message, "reject", "lower data.frames, raise data.fps or remove it")
    # At a lower frame rate than requested, some frames are used twice and the motion stutters.
    if not is_image(media) and requirements.min_frames > 1 and facts["fps"] < (1 - _FPS_TOLERANCE) * fps:
        message = f"{facts['fps']:g} frames a second for data.fps {fps:g}: frames repeat"
        yield make_warning("fps_low", message, f"lower data.fps to {facts['fps']:g}, or remove it")


def _check_shape(facts: Mapping[str, Any], requirements: SampleRequirements) -> Iterator[Finding]:
    height, width = display_size(facts)
    placement = find_bucket(facts, requirements)
    if isinstance(placement, DroppedClip):
        # `_check_length` reports clips that are too short.
        if placement.code != "too_short":
            yield make_warning(placement.code, f"it is left out: {placement.words}", "add a bucket of its shape")
        return
    size = f"{width:g} x {height:g} for {placement.shape.width} x {placement.shape.height} pixels"
    if placement.upscale > MAX_UPSCALE:
        message = f"{size}: it is enlarged {placement.upscale:.2f} times"
        yield make_warning("upscaled", message, "lower data.height and data.width, or remove it")
    if placement.crop > _MAX_CROP:
        message = f"{size}: {placement.crop:.0%} of the picture is cropped away"
        yield make_warning("cropped", message, "add a bucket of its shape, or remove it")


def find_bucket(facts: Mapping[str, Any], requirements: SampleRequirements) -> BucketPlacement | DroppedClip:
    """Bucket that a clip's measurements put it into, or the reason why it has none."""
    height, width = display_size(facts)
    fps, seconds = facts.get("fps"), facts.get("seconds")
    # Only videos have a duration among their facts.
    is_picture = "seconds" not in facts
    header = VideoHeader(fps, seconds, facts["frames"], round(height), round(width), is_image=is_picture)
    return choose_bucket(header, requirements.shapes, requirements.data)


def display_size(facts: Mapping[str, Any]) -> tuple[float, float]:
    """Height and width of a clip in square pixels, upright."""
    height, width = facts["height"], facts["width"] * facts.get("pixel_aspect", 1.0)
    # A quarter turn swaps height and width; images are measured upright and have no rotation here.
    if facts.get("rotation", 0) % 180:
        height, width = width, height
    return round(height, 1), round(width, 1)
