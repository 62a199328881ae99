"""One tiny checkpoint under the contract test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dit_lora.config.data import VideoShape

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
    takes: frozenset[str] = frozenset({"lora_linear", "ada_norm"})
    """The fused ops that its blocks take; tests ask that these, and no less, are put in."""
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
