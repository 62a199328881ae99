"""The contract of a chat family: a model that reads text, images and videos, and answers.

As in `families.base`, a checkpoint holds facts and pure functions, no optimizer and no training loop.
`dit_lora.data.chat` builds the samples; a family describes the format its model needs.

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
from dit_lora.data.chat.conversation import Conversation, ConversationKind
from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.families.answer_losses import add_answer_losses
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import DrawFunctions, RandomStreams

KINDS: tuple[ConversationKind, ...] = get_args(ConversationKind)
"""The kinds of media. A loss is reported under the index of its kind."""
Fit = Literal["stretch", "cover"]
"""How a frame gets its size: stretched to it (aspect ratio not kept), or scaled to cover it and center-cropped."""


@dataclass(frozen=True)
class VisionSettings:
    """Settings for how much of an image or a video a chat model sees: number of frames, size and tiles."""

    frames: int
    """Number of frames sampled from a video."""
    height: int
    """Height in pixels, of each tile if images are tiled."""
    width: int
    tiles: int | None = None
    timestamps: bool | None = None
    """True if the prompt contains the frame times. None for the model's default."""

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "VisionSettings":
        # A recipe without a `chat` section uses its defaults.
        data, chat = recipe.data, recipe.chat or ChatConfig()
        return cls(data.frames, data.height, data.width, chat.tiles, chat.timestamps)


@dataclass(frozen=True, kw_only=True)
class ChatCheckpoint(ABC):
    """Base class of an opened chat checkpoint: tokenization, model inputs, loss and answers."""

    path: Path
    config: Any
    """The model's config, as Transformers loads it."""
    tokenizer: Any
    """The language model's tokenizer."""
    vision_settings: VisionSettings
    fit: Fit = "stretch"

    @property
    @abstractmethod
    def model_class(self) -> Any:
        """The Transformers class with which the chat model is loaded."""

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token. Padding is on the right, where a causal model never attends to it."""
        # Some tokenizers have no padding token. Padding is never attended to, so any token works.
        pad_id = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad_id is None else pad_id

    @abstractmethod
    def apply_recipe(self, recipe: Recipe) -> Self:
        """This description of a chat checkpoint with the recipe's settings; no weights are read.

        Raises `DitLoraError` if it does not support them.
        """

    @abstractmethod
    def copy_with_vision_settings(self, vision_settings: VisionSettings) -> Self:
        """This description of a chat checkpoint with these vision settings; no weights are read.

        Raises `DitLoraError` if its vision encoder rejects them.
        """

    @abstractmethod
    def shape(self, kind: ConversationKind, height: int, width: int) -> VideoShape | None:
        """Size in pixels at which the model sees a picture stored as height x width. None if `kind` is `text`."""

    @abstractmethod
    def tokenize_conversation(
        self,
        conversation: Conversation,
        shape: VideoShape | None,
        seconds: Sequence[float] = (),
        *,
        include_answer: bool = True,
    ) -> RenderedConversation:
        """Tokenize a conversation.

        Args:
            conversation: The turns and their media.
            shape: Shape of the media as the model sees them; None for text.
            seconds: Times of the frames, in seconds.
            include_answer: If false, stop where the model has to answer the last turn.
        """

    def load_model(self, dtype: torch.dtype) -> nn.Module:
        """Load the frozen model on the CPU, in `dtype` from the start.

        Its forward accepts `answer_positions` and `answer_labels` (see `add_answer_losses`).
        """
        # Frozen before it is patched: adapters and optimizer groups make parameters trainable later.
        model = load_pretrained(self.model_class, self.path, dtype=dtype, use_safetensors=True)
        return add_answer_losses(model.requires_grad_(False))

    @abstractmethod
    def build_model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The chat model's arguments for a batch.

        Padding is on the right and `attention_mask` is left out, because causal attention never reaches the
        padding.

        Args:
            batch: `input_ids` (B, L); `pixels` uint8 (B, F, 3, H, W) unless the batch is text; and
                `instruction_ids` and `instruction_mask` (B, I) if `tokenize_conversation` returns instructions.
        """

    def get_random_input_samplers(self, batch: Mapping[str, torch.Tensor]) -> DrawFunctions:
        """Always empty: the loss of a chat model needs no random tensors.

        All randomness of a conversation is already in its tokens and frames.
        """
        return {}

    def losses(self, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: RandomStreams) -> LossOutput:
        """Mean next-token loss of each sample's answer, fp32 (B,).

        In addition to the tensors for `build_model_inputs`, the batch has `labels` (B, A), the answer tokens or -100,
        and `answer_positions` (B, A), the positions that predict them.
        """
        # With these two arguments, the patched forward returns one loss per sample instead of logits.
        losses = model(
            **self.build_model_inputs(batch), answer_positions=batch["answer_positions"], answer_labels=batch["labels"]
        )
        pixels = batch.get("pixels")
        # A batch has media of one kind: no pixels, one frame, or several frames.
        kind: ConversationKind = "text" if pixels is None else "image" if pixels.shape[1] == 1 else "video"
        # Each loss is reported under its kind of media, in the place where diffusion reports timesteps.
        return LossOutput(losses, torch.full_like(losses, KINDS.index(kind), dtype=torch.int64))

    @property
    def answer_end(self) -> str | None:
        """Text that ends an answer; None if answers end with the tokenizer's end-of-text token."""
        return None

    @abstractmethod
    def prompt_tensors(self, rendered: RenderedConversation) -> dict[str, torch.Tensor]:
        """Tensors (1, ...) of one prompt that `build_model_inputs` needs in addition to `input_ids` and `pixels`."""

    def answer(
        self, model: nn.Module, rendered: RenderedConversation, pixels: torch.Tensor | None, max_tokens: int
    ) -> str:
        """Generate the model's answer to a prompt with greedy decoding; `pixels` uint8 (F, 3, H, W)."""
        # A batch of one: tokens (1, L) and pixels (1, F, 3, H, W).
        prompt = {"input_ids": torch.tensor([rendered.ids]), **self.prompt_tensors(rendered)}
        if pixels is not None:
            prompt["pixels"] = pixels[None]
        device = next(model.parameters()).device
        inputs = self.build_model_inputs({name: tensor.to(device) for name, tensor in prompt.items()})
        return generate_answer(model, self.tokenizer, inputs, max_tokens, end_text=self.answer_end)


def generate_answer(
    model: nn.Module,
    tokenizer: Any,
    inputs: Mapping[str, torch.Tensor],
    max_tokens: int,
    *,
    end_text: str | None = None,
) -> str:
    """Generate the answer to a prompt (1, L) with greedy decoding.

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        inputs: The model's arguments for the prompt.
        max_tokens: Maximum number of new tokens.
        end_text: Text that ends the answer, if the prompt format has its own. The end-of-text token always ends it.
    """
    generate: Any = model.generate
    # Transformers needs the tokenizer to find stop strings in the generated tokens.
    stop_options = {"stop_strings": [end_text], "tokenizer": tokenizer} if end_text else {}
    with torch.no_grad():
        # Reset the sampling options and the repetition penalty of the checkpoint's generation_config.json.
        tokens = generate(
            **inputs,
            **stop_options,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
        )
    # `generate` returns the prompt followed by the new tokens.
    new_tokens = tokens[0, inputs["input_ids"].shape[1] :]
    answer = tokenizer.decode(new_tokens, skip_special_tokens=True)
    # The last token may contain text after `end_text`.
    return (answer.partition(end_text)[0] if end_text else answer).strip()
