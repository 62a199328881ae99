"""What tests must know of a family: `Case` describes a tiny checkpoint, `Smoke` a smoke recipe.

A module `family_cases/<family>.py` has `CASES`, `SMOKES` by the name of the smoke recipe, and `OTHERS` where a recipe
is also tried with another checkpoint or other data. No other test has to name a family.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dit_lora.config.data import VideoShape
from dit_lora.data.media.video import write_sample
from dit_lora.data.synthetic.clips import write_class_folders, write_shapes
from dit_lora.data.synthetic.pairs import write_edit_pairs

Call = dict[str, Any]
"""The arguments with which a pipeline called its transformer, by name."""


def hidden_states(call: Call) -> torch.Tensor:
    return call["hidden_states"]


def timestep(call: Call) -> torch.Tensor:
    return call["timestep"]


def as_given(output: Any) -> torch.Tensor:
    return output


def always(_call: Call) -> bool:
    return True


def as_it_is(_patches: pytest.MonkeyPatch) -> None:
    return None


def unchanged(batch: dict[str, torch.Tensor], _seed: int) -> dict[str, torch.Tensor]:
    return batch


@dataclass(frozen=True)
class Case:
    """Shapes and captions for a variant, and how its pipeline's calls and latents read."""

    family: str
    variant: str
    native: VideoShape
    captions: tuple[str, str, str]
    """Of three samples; of a model with classes, their names."""
    decode: Callable[[Any, torch.Tensor], torch.Tensor]
    """(pipeline, clean latents as training has them) to pixels, by the pipeline's own means."""
    vae_decode: Callable[[Any, torch.Tensor], torch.Tensor]
    """(pipeline, the posterior's mean as it is cached) to pixels, by the VAE alone."""
    model: Mapping[str, str] = field(default_factory=dict)
    """Values of the recipe's `model` beside family and path: a part, a task."""
    off_native: VideoShape | None = None
    refused: tuple[tuple[VideoShape, str], ...] = ()
    """Shapes that do not fit, with words of the refusal."""
    noisy: Callable[[Call], torch.Tensor] = hidden_states
    timesteps: Callable[[Call], torch.Tensor] = timestep
    """As `predict` takes them."""
    predicted: Callable[[Any], torch.Tensor] = as_given
    """The network's output as `predict` gives it."""
    has_text_before_image: bool = False
    """True if the network's output begins with a value for each text token, which the loss does not use."""
    takes: frozenset[str] = frozenset({"lora_linear", "ada_norm"})
    """The fused ops that its blocks take: exactly these must be active in a fused model."""
    fused_tolerance: float = 1e-4
    """How far a fused model's gradients may be off in fp32, relative to each tensor's largest value."""
    pictures: tuple[str, ...] = ()
    """The pictures that the pipeline starts from, as `Sampling` names them."""
    references: tuple[VideoShape, ...] = ()
    """The references' own sizes."""
    reference_resolution: int | None = None
    """As in the recipe's `data`."""
    call_dtype: torch.dtype = torch.float32
    """In which a call equals the pipeline's bit for bit."""
    as_sampled: Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor]] = unchanged
    """(batch, seed) with what the pipeline draws for its conditions by that seed."""
    guidance: float | None = None
    """The guidance at which the pipeline makes calls as a training step does; by default the highest that is none."""
    compared: Callable[[Call], bool] = always
    """The calls that are as a training step's."""

    without: tuple[str, ...] = ()
    """Components that the stock pipeline cannot load here."""
    prepare: Callable[[pytest.MonkeyPatch], None] = as_it_is
    """Makes what a test does with it cheap, alike for the pipeline and for training."""
    thorough: bool = False
    """True where another case has all that this one asks, so that it is not asked every time."""
    template_tokens: int = 0
    """Tokens of a chat template around each caption, which leave it less room."""
    takes_several_prompts: bool = True
    """True if the pipeline takes the embeddings of several prompts, padded to one length."""
    has_other_modules: bool = False
    """True if the network has other modules than that of the family's first case."""

    @property
    def name(self) -> str:
        # A checkpoint that may have references has a case without them too.
        references = [f"{len(self.references)}-references"] if len(self.references) > 1 else []
        return "-".join([self.variant, *self.model.values(), *references])

    @property
    def part(self) -> str:
        """The component that it trains."""
        return self.model.get("part", "transformer")

    @property
    def shapes(self) -> list[VideoShape]:
        return [shape for shape in (self.native, self.off_native) if shape is not None]


MASKED = ("data.mask_column=mask", "data.mask_floor=0.2")
"""Overrides for data whose samples have loss masks."""


@dataclass(frozen=True)
class Smoke:
    """What a smoke recipe needs to run here and to be quick."""

    variant: str
    """The tiny checkpoint."""
    write_data: Callable[[Path], None] | None = None
    """Its data; None for the clips of moving shapes."""
    overrides: tuple[str, ...] = ()
    prompt: str = "a red disc"
    """Or a class's name."""
    pictures: tuple[str, ...] = ()
    """The pictures that its samples start from, as `validation` names them."""
    references: int = 0
    """Frames of the references that its samples are made from; 0 for none."""
    references_each: int = 1
    """How many of them a sample has."""
    prepare: Callable[[pytest.MonkeyPatch], None] = as_it_is
    """Makes it cheap."""
    recipe: str | None = None
    """The smoke recipe, where the name is not its own."""

    def write_pictures(self, folder: Path) -> dict[str, Path]:
        """Write what samples start from; files by their fields of `validation`."""
        images = {field: folder / f"{field}.png" for field in self.pictures}
        for image in images.values():
            Image.new("RGB", (120, 80), "navy").save(image)
        return images

    def write_references(self, folder: Path) -> tuple[Path, ...]:
        """Write what samples are made from, of several sizes; nothing where there is no such thing."""
        olive = torch.tensor([128, 128, 0]).byte()
        return tuple(
            write_sample(
                folder / f"reference_{number}",
                olive.expand(self.references, 80, 120 - 16 * number, 3),
                8,
            )
            for number in range(self.references_each if self.references else 0)
        )

    def sampled(self, images: dict[str, Path], references: tuple[Path, ...]) -> list[str]:
        """Return the overrides for one sample, in two steps."""
        value = f"[[{', '.join(map(str, references))}]]" if references else "[]"
        return [
            f"validation.prompts=[{self.prompt}]",
            *(f"validation.{field}=[{image}]" for field, image in images.items()),
            f"validation.references={value}",
            "validation.inference_steps=2",
        ]

    def change(self, recipe: str, variant: str | None = None, *overrides: str, **changes: Any) -> "Smoke":
        """The needs of the same `recipe` with another tiny checkpoint, further overrides and other fields."""
        values = {"recipe": recipe, "variant": variant or self.variant, "overrides": (*self.overrides, *overrides)}
        return replace(self, **{**values, **changes})


def class_folders(folder: Path) -> None:
    write_class_folders(folder, images=12, height=32, width=32)


def class_clips(folder: Path) -> None:
    write_class_folders(folder, images=6, height=32, width=48, frames=8)


def captioned_images(folder: Path) -> None:
    write_shapes(folder, clips=4, frames=1, height=64, width=96, fps=1)


def clips_with_sound(folder: Path) -> None:
    write_shapes(folder, clips=4, frames=17, height=64, width=96, fps=8, sound=True)


def edit_pairs(folder: Path) -> None:
    write_edit_pairs(folder, pairs=4, height=64, width=64)


def edit_clips(folder: Path) -> None:
    write_edit_pairs(folder, pairs=4, height=64, width=64, frames=9)


def edit_pairs_of_two(folder: Path) -> None:
    """Give each pair its mask as a second reference, in which the places are seen that differ."""
    edit_pairs(folder)
    _change_rows(folder, lambda row: row["references"].append(row["mask"]))


def edit_clips_with_sound(folder: Path) -> None:
    """Give clips with sound a silent clip each as their reference: the one behind them."""
    write_shapes(folder / "before", clips=4, frames=17, height=64, width=96, fps=8)
    (folder / "before" / "metadata.jsonl").unlink()
    before = sorted((folder / "before").glob("*.mp4"))
    clips_with_sound(folder)
    shifted_rows = iter([*before[1:], before[0]])
    _change_rows(folder, lambda row: row.update(references=[f"before/{next(shifted_rows).name}"]))


def _change_rows(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    listing = folder / "metadata.jsonl"
    rows = [json.loads(line) for line in listing.read_text("utf-8").splitlines()]
    for row in rows:
        change(row)
    listing.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
