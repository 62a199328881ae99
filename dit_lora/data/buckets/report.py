"""Report on buckets: which clips are in which, which are left out, and what to change."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.data.buckets.buckets import MAX_ENLARGEMENT, BucketPlacement, DroppedClip
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.errors import join_first_items

# Share of the clips from which on advice is given, and share of a picture from which on a crop counts as heavy.
MIN_ADVICE_SHARE = 0.25
HEAVY_CROP = 0.25
_MAX_LISTED = 6
_SIZES = ("frames", "height", "width")


@dataclass(frozen=True)
class BucketRow:
    """Row of a bucket report: one shape, with the number of its clips and samples, and how much is cropped.

    Crops are shares of the picture; `share` is a share of all samples.
    """

    shape: VideoShape
    clips: int
    samples: int
    """Number of windows of the bucket's clips."""
    share: float
    mean_crop: float
    worst_crop: float
    upscaled: int
    """Number of clips that are enlarged beyond rounding."""
    pixels: int
    """Pixels of one sample, over all frames."""


@dataclass(frozen=True)
class BucketReport:
    """Report on how the clips of a data set are assigned to buckets."""

    rows: tuple[BucketRow, ...]
    """One row for each bucket, used or not."""
    dropped: tuple[tuple[str, DroppedClip], ...]
    """Names of clips that are left out, with the reason."""
    advice: tuple[str, ...]

    @classmethod
    def from_clips(
        cls,
        clips: Sequence[tuple[str, BucketPlacement | DroppedClip]],
        buckets: Sequence[VideoShape],
        data: DataConfig,
        samples_per_step: int,
    ) -> "BucketReport":
        """Build a bucket report of named clips; `samples_per_step` is the number of samples of one optimizer step."""
        placed_clips = [clip for _, clip in clips if isinstance(clip, BucketPlacement)]
        dropped = tuple((name, clip) for name, clip in clips if isinstance(clip, DroppedClip))
        samples = sum(len(clip.starts) for clip in placed_clips)
        # Buckets without clips get a row too, for the advice to remove them.
        by_shape: dict[VideoShape, list[BucketPlacement]] = {shape: [] for shape in sorted(buckets)}
        for clip in placed_clips:
            by_shape[clip.shape].append(clip)
        rows = tuple(_summarise_bucket(shape, in_bucket, samples) for shape, in_bucket in by_shape.items())
        advice = [
            *_advise_on_dropped(dropped, len(clips)),
            *_advise_on_sizes(rows, samples_per_step),
            *_advise_on_pictures(placed_clips, buckets),
            *_advise_on_lengths(placed_clips, data),
        ]
        return cls(rows, dropped, tuple(advice))

    def as_dict(self) -> dict[str, Any]:
        """Convert a bucket report to values that JSON can hold."""
        return {
            "buckets": [
                # References are not part of a bucket: they are added to a sample's shape later.
                {**asdict(row), "shape": {n: getattr(row.shape, n) for n in _SIZES}}
                for row in self.rows
            ],
            "dropped": [{"id": name, **asdict(clip)} for name, clip in self.dropped],
            "advice": list(self.advice),
        }

    def format_lines(self) -> list[str]:
        """Format a bucket report for a terminal: a table of the buckets in use, clips left out, and advice."""
        table = [("bucket", "clips", "samples", "share", "crop mean/worst", "enlarged")]
        for row in self.rows:
            # Unused buckets are mentioned in the advice, and would only lengthen the table.
            if row.clips:
                crop = f"{row.mean_crop:.0%} / {row.worst_crop:.0%}"
                cells = (str(row.shape), str(row.clips), str(row.samples), f"{row.share:.1%}", crop, str(row.upscaled))
                table.append(cells)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table]
        for name, clip in self.dropped:
            lines.append(f"left out ({clip.code}): {name}: {clip.words}")
        return lines + [f"advice: {advice}" for advice in self.advice]


def advise_on_references(shapes: Sequence[VideoShape], samples_per_step: int) -> list[str]:
    """Advice if references split samples into shapes with fewer samples than a step takes.

    `shapes` has one shape per sample; `samples_per_step` is the number of samples of a step.
    """
    counts = Counter(shapes)
    # The same shapes with references removed: as many as there are buckets in use.
    without_references = {replace(shape, references=()) for shape in counts}
    rare = sorted((shape for shape in counts if counts[shape] < samples_per_step), key=counts.__getitem__)
    # If references do not split the samples further, the advice about buckets covers it.
    if not rare or len(counts) == len(without_references):
        return []
    descriptions = [_describe_rare_shape(shape, counts[shape], samples_per_step) for shape in rare]
    return [
        f"with their references, samples have {len(counts)} shapes, and a step takes {samples_per_step} samples of "
        f"one; these do not come in every epoch: {join_first_items(descriptions, _MAX_LISTED)}; give references "
        "fewer sizes, or lower train.batch_size or accumulate"
    ]


def _summarise_bucket(shape: VideoShape, clips: Sequence[BucketPlacement], total_samples: int) -> BucketRow:
    """Summarize the clips of one bucket as a row of the report; `total_samples` is the number in all buckets."""
    crops = [clip.crop for clip in clips]
    count = sum(len(clip.starts) for clip in clips)
    return BucketRow(
        shape,
        clips=len(clips),
        samples=count,
        share=count / total_samples if total_samples else 0.0,
        mean_crop=sum(crops) / len(crops) if crops else 0.0,
        worst_crop=max(crops, default=0.0),
        upscaled=sum(clip.upscale > MAX_ENLARGEMENT for clip in clips),
        pixels=shape.volume,
    )


def _advise_on_dropped(dropped: Sequence[tuple[str, DroppedClip]], num_clips: int) -> list[str]:
    if len(dropped) < MIN_ADVICE_SHARE * num_clips or not dropped:
        return []
    remedies = {
        "too_short": "lower data.frames, or add shorter buckets.frames, to keep clips that are too short",
        "cropped": "add buckets.aspect_ratios to keep clips that are cropped",
        "upscaled": "lower buckets.resolutions to keep clips that are enlarged",
    }
    counts = Counter(clip.code for _, clip in dropped)
    # The advice is for the most frequent reason; sorting makes ties reproducible.
    worst = max(sorted(counts), key=lambda code: counts[code])
    return [f"{_format_share(len(dropped), num_clips)} are left out: {remedies[worst]}"]


def _advise_on_sizes(rows: Sequence[BucketRow], samples_per_step: int) -> list[str]:
    used = [row for row in rows if row.samples]
    # Such a bucket collects samples over several epochs until it fills a step.
    small = [row for row in used if row.samples < samples_per_step]
    advice = []
    # With a single bucket in use, there is nothing to even out.
    if small and len(used) > 1:
        descriptions = [_describe_rare_shape(row.shape, row.samples, samples_per_step) for row in small]
        advice.append(
            f"buckets with fewer samples than a step takes ({samples_per_step}) are not used in every epoch: "
            f"{join_first_items(descriptions, _MAX_LISTED)}; lower train.accumulate or use fewer buckets"
        )
    unused = [str(row.shape) for row in rows if not row.samples]
    if unused and used:
        advice.append(f"unused buckets: {join_first_items(unused, _MAX_LISTED)}; they can be removed")
    return advice


def _advise_on_pictures(placed: Sequence[BucketPlacement], buckets: Sequence[VideoShape]) -> list[str]:
    total, advice = len(placed), []
    enlarged = sum(clip.upscale > MAX_ENLARGEMENT for clip in placed)
    if enlarged and enlarged >= MIN_ADVICE_SHARE * total:
        worst = max(clip.upscale for clip in placed)
        advice.append(
            f"{_format_share(enlarged, total)} are enlarged, up to {worst:.1f} times: lower "
            "data.height and data.width, or add a lower one to buckets.resolutions"
        )
    # Rotated clips would lose most of their picture in buckets of the other orientation.
    portrait = sum(clip.header.height > clip.header.width for clip in placed)
    landscape = sum(clip.header.height < clip.header.width for clip in placed)
    for count, word, missing in (
        (portrait, "portrait", all(shape.height <= shape.width for shape in buckets)),
        (landscape, "landscape", all(shape.height >= shape.width for shape in buckets)),
    ):
        if missing and count and count >= MIN_ADVICE_SHARE * total:
            advice.append(
                f"{_format_share(count, total)} are {word} and no bucket is: add {word} buckets.aspect_ratios"
            )
    cropped_clips = [clip for clip in placed if clip.crop > HEAVY_CROP]
    if cropped_clips and len(cropped_clips) >= MIN_ADVICE_SHARE * total:
        common = Counter(_format_ratio(clip.header) for clip in cropped_clips)
        (ratio, count), *_ = sorted(common.items(), key=lambda item: (-item[1], item[0]))
        advice.append(
            f"{_format_share(len(cropped_clips), total)} lose more than {HEAVY_CROP:.0%} of their picture; "
            f"{count} of them are about {ratio}: add such a ratio to buckets.aspect_ratios"
        )
    return advice


def _advise_on_lengths(placed: Sequence[BucketPlacement], data: DataConfig) -> list[str]:
    if data.fps is None:
        return []
    available = used = num_long = 0
    for clip in placed:
        if clip.header.seconds is None or clip.shape.frames == 1:
            continue
        # The small addend keeps rounding errors from losing a window.
        num_windows = int(clip.header.seconds * data.fps / clip.shape.frames + 1e-6)
        # Long: at least twice as many windows would fit as are used.
        num_long += num_windows >= 2 * len(clip.starts)
        available, used = available + max(num_windows, len(clip.starts)), used + len(clip.starts)
    if not num_long or num_long < MIN_ADVICE_SHARE * len(placed):
        return []
    return [
        f"{_format_share(num_long, len(placed))} are more than twice as long as what is used of them: "
        f"data.windows: all makes about {available} samples of them instead of {used}"
    ]


def _format_ratio(header: VideoHeader) -> str:
    """Aspect ratio in small numbers nearest to width : height, such as 16:9."""
    short, long = sorted((header.width, header.height))
    # Common ratios have denominators up to 9, as in 16:9.
    nearest = Fraction(long, short).limit_denominator(9)
    is_wide = header.width == long
    return f"{nearest.numerator}:{nearest.denominator}" if is_wide else f"{nearest.denominator}:{nearest.numerator}"


def _format_share(count: int, total: int) -> str:
    return f"{count} of {total} clips ({count / total:.0%})"


def _describe_rare_shape(shape: VideoShape, num_samples: int, samples_per_step: int) -> str:
    """Text on a shape with too few samples to come in every epoch: their number, and how often the shape comes."""
    epochs = samples_per_step / num_samples
    period = f"{epochs:.1f} epochs" if epochs < 10 else f"{epochs:.0f} epochs"
    return f"{shape} ({num_samples} sample{'' if num_samples == 1 else 's'}, every {period})"
