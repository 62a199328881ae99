"""The `data` section of a recipe."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dit_lora.config.section import Count, Positive, Probability, Section


@dataclass(frozen=True, order=True)
class VideoShape:
    """Shape of one video: height and width in pixels, and number of frames. An image is one frame."""

    frames: int
    height: int
    width: int
    references: tuple["VideoShape", ...] = ()
    """Shapes that its references are encoded in. All samples of a batch have the same."""

    @classmethod
    def from_data(cls, data: "DataConfig") -> "VideoShape":
        """Shape from the data section's `frames`, `height` and `width`. With buckets, it sets their budget instead."""
        return cls(data.frames, data.height, data.width)

    @property
    def volume(self) -> int:
        """Number of pixels in all frames of a sample, including those of its references."""
        pixels = self.frames * self.height * self.width
        # References are encoded and passed to the network too, so they count.
        return pixels + sum(reference.volume for reference in self.references)

    def __str__(self) -> str:
        sides = f"{self.frames}x{self.height}x{self.width}"
        return " + ".join([sides, *map(str, self.references)])


class Layout(Section):
    """Options that say where a source's captions, references and masks are."""

    media: str | None = None
    """The folder that the files of a list are below: of metadata files, videos.txt or conversations; by
    default the list's own.
    """
    caption_column: str | None = None
    """Column of the caption in metadata files and datasets; by default the one present of text, caption,
    prompt, label."""
    image_column: str | None = None
    """Column of each clip's first image in metadata files, for image-to-video; by default the clip's own
    first frame."""
    reference_columns: tuple[str, ...] | None = None
    """Columns of reference pictures or clips in metadata files and datasets, in their order, a cell holding one
    or a list; in tars the middle of a member's name, as in 7.source.jpg. By default `references`, where the data
    has it; an empty list leaves references out."""
    reference_folders: tuple[str, ...] = ()
    """Folders of references, in their order, whose files have the names of the samples in `path`."""
    mask_column: str | None = None
    """Column of each sample's mask, a picture: white is learned, black is not; in tars the middle of a name."""
    mask_folder: str | None = None
    """Folder of masks, whose files have the names of the samples in `path`."""
    alpha_mask: bool = False
    """Take a picture's own transparency for its mask; a picture without any is learned whole."""

    @property
    def has_masks(self) -> bool:
        """True if a source's options give its samples masks."""
        return bool(self.mask_column or self.mask_folder or self.alpha_mask)

    @model_validator(mode="after")
    def _check_exclusive_options(self) -> Self:
        if self.reference_columns and self.reference_folders:
            raise ValueError("got both reference_columns and reference_folders; give one")
        # Each of them is a mask of the whole sample: two could contradict each other.
        if sum(map(bool, (self.mask_column, self.mask_folder, self.alpha_mask))) > 1:
            raise ValueError("got more than one of mask_column, mask_folder and alpha_mask; give one")
        return self


class SourceConfig(Layout):
    """Options of one of several sources that the training samples come from."""

    path: str
    """Place of the samples, as in `data.path`."""
    caption: str | None = None
    """One caption for all samples of this source, in place of their own."""
    repeats: Count = 1
    """Number of times that each sample comes in an epoch."""
    weight: Positive | None = None
    """Share of samples from this source, relative to the other weights; all sources have one or none.

    Every sample comes at least once in an epoch.
    """
    loss_weight: Positive = 1.0
    """Factor of the losses of this source's samples."""
    generate: Count | None = None
    """Prior preservation (arXiv 2208.12242): the model itself, before training, samples `caption` into the
    folder `path` until it holds this many.
    """

    @model_validator(mode="after")
    def _check_source_options(self) -> "SourceConfig":
        if self.generate is not None and self.caption is None:
            raise ValueError("generate needs caption: the prompt of the generated samples")
        if self.caption is not None and self.caption_column is not None:
            raise ValueError("got both caption and caption_column; give one")
        # Both set how often a sample occurs in an epoch.
        if self.weight is not None and self.repeats > 1:
            raise ValueError("got both weight and repeats; give one")
        return self


class BucketsConfig(Section):
    """Options for bucketing: samples are grouped by shape.

    There is one for each aspect ratio, resolution and number of frames that fits the budget of data.height
    x data.width x data.frames.
    """

    aspect_ratios: tuple[str, ...] = ("16:9", "3:2", "4:3", "1:1", "3:4", "2:3", "9:16")
    """Ratios of width to height."""
    resolutions: tuple[Count, ...] | None = None
    """Sides, in pixels, of squares with as many pixels; by default that of data.height x data.width."""
    frames: tuple[Count, ...] | None = None
    """Numbers of frames; by default data.frames. With 1 among them, a data set may mix images and clips."""
    max_crop: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Largest share of its picture that a clip may lose; others are left out. Null for no limit."""
    max_upscale: Annotated[float, Field(ge=1)] | None = None
    """Largest factor by which a clip may be enlarged; others are left out. Null for no limit."""

    @field_validator("aspect_ratios")
    @classmethod
    def _check_aspect_ratios(cls, ratios: tuple[str, ...]) -> tuple[str, ...]:
        # Two positive whole numbers, such as 16:9.
        malformed = [ratio for ratio in ratios if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", ratio)]
        if malformed or not ratios:
            raise ValueError(f"give ratios such as 3:2; got {', '.join(malformed) or 'none'}")
        return ratios


class DataConfig(Layout):
    path: str | None = None
    """A folder: metadata.jsonl, .csv or .parquet, prompts.txt + videos.txt, clips or images each with a
    .txt, one folder a class, or tars in WebDataset's layout; one such .tar; or a dataset with a video or
    image column (`save_to_disk`, or a name on the Hub, with `hub:` before it where it reads as a folder).
    For chat models: a .json or .jsonl file of conversations.
    """
    sources: tuple[SourceConfig, ...] = ()
    """Places that samples come from, in place of `path`."""
    classes: tuple[str, ...] | None = None
    """Names of the classes, for models with a class table; by default those that the data has."""
    rejects: Literal["refuse", "skip"] = "refuse"
    """Treatment of samples that cannot be used, or that `dit-lora audit` rejected: refuse the run and list
    them, or leave them out and list them."""
    frames: Count = 1
    """Frames per clip; 1 trains on images."""
    height: Count
    """Height in pixels that clips and images are scaled and cropped to."""
    width: Count
    """Width in pixels that clips and images are scaled and cropped to."""
    fps: Positive | None = None
    """Frames a second that clips are resampled to by their time stamps. Images have none."""
    buckets: BucketsConfig | None = None
    """Several shapes in place of one, `{}` for the defaults; each sample goes to the nearest."""
    windows: Count | Literal["all"] = 1
    """Samples that a long clip is cut into, one after the other; `all` for as many as it holds."""
    window_stride: Positive | None = None
    """Seconds from the start of one window to the next; by default the window's length."""
    flip: bool = False
    """Train on each image's mirror image too, in half of the epochs by chance. For images only."""
    caption_dropout: Probability = 0.0
    """Share of samples trained with an empty caption (or the null class), for classifier-free guidance."""
    image_dropout: Probability = 0.0
    """Image-to-video: share of samples trained without their first image."""
    image_noise: bool | None = None
    """Image-to-video: noise of scale exp(N(-3, 0.5)) on the first image, as CogVideoX was trained with; null
    for yes."""
    sound: bool = False
    """Train the clips' sound beside their frames, for models that make both."""
    reference_resolution: Count | None = None
    """Side, in pixels, of the square with as many pixels as a reference has at most; by default references are scaled
    as the pipeline scales them."""
    mask_floor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight of the loss where a mask is black; where it is white, the weight is 1."""
    precompute: bool = True
    """Encode everything before training and keep it on disk; `false` encodes each batch as it comes, with the
    encoders kept in memory."""
    cache: str | None = None
    """Folder of encoded clips and captions, shared by runs; by default `cache` beside the run's folder."""
    vae_tiling: bool = False
    """Encode clips and decode samples in overlapping tiles: the VAE then needs the memory of one tile. Latents of
    pictures larger than a tile change a little, and are cached apart."""
    vae_slicing: bool = False
    """Decode the pictures of a batch one by one, where the VAE takes frames as a batch. No value depends on it."""
    workers: Annotated[int, Field(ge=0)] = 2
    """Processes that read ahead of the training step."""
    prefetch: Count = 2
    """Micro-batches that each of these processes reads ahead."""

    @property
    def max_frames(self) -> int:
        """Number of frames of the longest training sample that the data section allows; at least 1."""
        # At least 1, for recipes whose buckets have no frame counts of their own.
        return max(self.frames, *((self.buckets.frames if self.buckets else None) or (1,)))

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """Sources of the training samples: `sources`, or a single one made of `path` and its column options."""
        if self.sources:
            return self.sources
        # A recipe with `path` has the layout options in the data section itself.
        layout = {name: getattr(self, name) for name in Layout.model_fields}
        return (SourceConfig(path=self.path or "", **layout),)

    @model_validator(mode="after")
    def _check_data_options(self) -> "DataConfig":
        # The longest shape decides whether the samples are images or clips.
        frames = self.max_frames
        if frames > 1 and self.flip:
            raise ValueError("flip applies only to images (frames: 1); remove it")
        if frames == 1 and self.windows != 1:
            raise ValueError("windows applies only to clips, and data.frames is 1; remove it")
        # An image has no duration, and so no sound.
        shortest = min((self.buckets.frames if self.buckets else None) or (self.frames,))
        if self.sound and (self.fps is None or shortest == 1):
            raise ValueError("sound needs data.fps, and more than 1 frame (data.buckets.frames too)")
        if self.window_stride is not None and self.windows == 1:
            raise ValueError("window_stride needs windows: all, or a number above 1")
        # Exactly one of them must be given.
        if bool(self.path) == bool(self.sources):
            raise ValueError("give either data.path or data.sources")
        if self.sources and any(getattr(self, name) for name in Layout.model_fields):
            raise ValueError("with data.sources, give columns and folders in each source")
        if self.mask_floor and not any(source.has_masks for source in self.all_sources):
            raise ValueError("mask_floor needs mask_column, mask_folder or alpha_mask")
        # A source without a weight would have no share relative to the others.
        weights = [source.weight is not None for source in self.sources]
        if any(weights) and not all(weights):
            raise ValueError("give every source a weight, or none of them")
        return self
