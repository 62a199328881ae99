"""The contract of a chat family: a model that reads text, images and videos, and answers.

As with `families.base`: facts and pure functions, no optimizer, no loop. What samples are made of is in
`dit_lora.data.chat`; a family says how its model wants them.

Shapes: B batch, L tokens (padded), A answer tokens (padded), F frames, H and W pixels.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

from dit_lora.config.chat import ChatConfig
from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.chat.conversation import Conversation, Kind
from dit_lora.data.chat.rendered import Rendered
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.families.answer_losses import with_answer_losses
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import Draws, Streams

KINDS: tuple[Kind, ...] = get_args(Kind)
"""The kinds of media, in the order that losses are told apart by."""
Fit = Literal["stretch", "cover"]
"""The way a frame becomes its shape: squeezed into it, or scaled to cover it and cropped at the centre."""


@dataclass(frozen=True)
class Viewing:
    """The part of an image or a video that the model is shown."""

    frames: int
    """Number of frames of a video."""
    height: int
    """Pixels; of each tile, where there are tiles."""
    width: int
    tiles: int | None = None
    timestamps: bool | None = None
    """True if the prompt says at which seconds the frames are; None to do as the model was trained."""

    @classmethod
    def of(cls, recipe: Recipe) -> "Viewing":
        data, chat = recipe.data, recipe.chat or ChatConfig()
        return cls(data.frames, data.height, data.width, chat.tiles, chat.timestamps)


@dataclass(frozen=True, kw_only=True)
class ChatCheckpoint(ABC):
    """One opened checkpoint of a chat family."""

    path: Path
    config: Any
    """The model's config, as Transformers reads it."""
    tokenizer: Any
    """The language model's."""
    how: Viewing
    fit: Fit = "stretch"

    @property
    @abstractmethod
    def model_class(self) -> Any:
        """The class of Transformers' kind that `load_model` loads."""

    @property
    def pad_token_id(self) -> int:
        """The token that pads the others; the model never looks at it."""
        pad_id = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad_id is None else pad_id

    @abstractmethod
    def for_recipe(self, recipe: Recipe) -> Self:
        """Return the checkpoint as a recipe trains it; raises if it cannot do what the recipe asks for."""

    @abstractmethod
    def viewing(self, how: Viewing) -> Self:
        """Return the checkpoint with that much shown to it; raises if its vision encoder cannot take it."""

    @abstractmethod
    def shape(self, kind: Kind, height: int, width: int) -> VideoShape | None:
        """Pixels that the model sees of a picture of height x width as stored; None of kind `text`."""

    @abstractmethod
    def render(
        self,
        conversation: Conversation,
        shape: VideoShape | None,
        seconds: Sequence[float] = (),
        *,
        answered: bool = True,
    ) -> Rendered:
        """Tokens of a conversation about media of that shape, its frames at these seconds.

        Unless `answered`, up to where the model has to answer the last turn.
        """

    def load_model(self, dtype: torch.dtype) -> nn.Module:
        """Load the frozen model in `dtype` from the start, on the CPU; it takes `answer_labels` (objectives)."""
        model = load_pretrained(self.model_class, self.path, dtype=dtype, use_safetensors=True)
        return with_answer_losses(model.requires_grad_(False))

    @abstractmethod
    def inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's arguments for a batch with `input_ids` (B, L), `pixels` uint8 (B, F, 3, H, W) unless of kind
        text, and, where `render` gives instructions, `instruction_ids` and `instruction_mask` (B, I).

        Tokens are padded on the right, and no `attention_mask` is made: what is causal never looks there.
        """

    def draws(self, batch: Mapping[str, torch.Tensor]) -> Draws:
        """Return nothing: what is drawn for a conversation is in its tokens and frames already."""
        return {}

    def losses(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput:
        """Return the mean next-token loss of each sample's answers, fp32 (B,); for timesteps, indices into `KINDS`.

        Beside what `inputs` takes, `labels` (B, A) are the answer tokens (or -100) and `answer_positions` (B, A)
        the positions that predict them.
        """
        losses = model(
            **self.inputs(batch),
            answer_positions=batch["answer_positions"],
            answer_labels=batch["labels"],
        )
        pixels = batch.get("pixels")
        kind: Kind = "text" if pixels is None else "image" if pixels.shape[1] == 1 else "video"
        return LossOutput(losses, torch.full_like(losses, KINDS.index(kind), dtype=torch.int64))

    @property
    def answer_end(self) -> str | None:
        """Return the text that ends an answer; None where the checkpoint's own end of text does."""
        return None

    @abstractmethod
    def prompt_tensors(self, rendered: Rendered) -> dict[str, torch.Tensor]:
        """Return the tensors (1, ...) of one prompt that `inputs` takes beside `input_ids` and `pixels`."""

    def answer(
        self, model: nn.Module, rendered: Rendered, pixels: torch.Tensor | None, max_tokens: int
    ) -> str:
        """Return what the model says next, greedily; `pixels` uint8 (F, 3, H, W)."""
        prompt = {"input_ids": torch.tensor([rendered.ids]), **self.prompt_tensors(rendered)}
        if pixels is not None:
            prompt["pixels"] = pixels[None]
        device = next(model.parameters()).device
        inputs = self.inputs({name: tensor.to(device) for name, tensor in prompt.items()})
        return greedy_answer(model, self.tokenizer, inputs, max_tokens, end=self.answer_end)


def greedy_answer(
    model: nn.Module,
    tokenizer: Any,
    given: Mapping[str, torch.Tensor],
    max_tokens: int,
    *,
    end: str | None = None,
) -> str:
    """Return what the model says after a prompt (1, L), one likeliest token after the other, until it ends.

    It ends with the checkpoint's own end of text, or with `end` where a prompt's format has another.
    """
    generate: Any = model.generate
    stop = {"stop_strings": [end], "tokenizer": tokenizer} if end else {}
    with torch.no_grad():
        # What a checkpoint's generation_config.json has for sampling, and its penalty, is set back.
        said = generate(
            **given,
            **stop,
            attention_mask=torch.ones_like(given["input_ids"]),
            max_new_tokens=max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
        )
    new = said[0, given["input_ids"].shape[1] :]
    answer = tokenizer.decode(new, skip_special_tokens=True)
    # The last token may go on after the end.
    return (answer.partition(end)[0] if end else answer).strip()
