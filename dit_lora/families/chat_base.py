"""The contract of a chat family: a model that reads text, images and videos, and answers.

As with `families.base`: facts and pure functions, no optimizer, no loop. What samples are made of is in
`dit_lora.data.chat`; a family says how its model wants them.

Shapes: B batch, L tokens (padded), A answer tokens (padded), F frames, H and W pixels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import nn

from dit_lora.chat_config import ChatConfig
from dit_lora.config import ModelConfig, Recipe
from dit_lora.data.chat.conversation import Conversation, Kind
from dit_lora.data.chat.rendered import Rendered
from dit_lora.data_config import VideoShape
from dit_lora.numerics.streams import Streams
from dit_lora.objectives import LossOutput

KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order that losses are told apart by."""


@dataclass(frozen=True)
class Viewing:
    """How much of an image or a video the model is shown."""

    frames: int
    """Of a video."""
    height: int
    """Pixels; of each tile, where there are tiles."""
    width: int
    tiles: int | None = None
    timestamps: bool | None = None
    """Whether the prompt says at which seconds the frames are; None: as the model was trained."""

    @classmethod
    def of(cls, recipe: Recipe) -> "Viewing":
        data, chat = recipe.data, recipe.chat or ChatConfig()
        return cls(data.frames, data.height, data.width, chat.tiles, chat.timestamps)


class ChatCheckpoint(Protocol):
    """One opened checkpoint of a chat family."""

    @property
    def path(self) -> Path: ...

    @property
    def how(self) -> Viewing: ...

    @property
    def fit(self) -> Literal["stretch", "cover"]:
        """How a frame becomes its shape: squeezed into it, or scaled to cover it and cropped at the centre."""

    @property
    def model_class(self) -> Any:
        """The class of Transformers' kind that `load_model` loads."""

    @property
    def tokenizer(self) -> Any:
        """The language model's."""

    @property
    def pad_token_id(self) -> int:
        """What tokens are padded with; never looked at."""

    def for_recipe(self, recipe: Recipe) -> "ChatCheckpoint":
        """The checkpoint as a recipe trains it; raises if it cannot do what the recipe asks for."""

    def viewing(self, how: Viewing) -> "ChatCheckpoint":
        """The checkpoint with that much shown to it; raises if its vision encoder cannot take it."""

    def in_notebook(self) -> "ChatCheckpoint":
        """The checkpoint as MVBench's notebook asks it: no seconds in the prompt, where it can do without, and of
        VideoChat2 the notebook's prompt and colours, which are not those of its training."""

    def model_files(self) -> Sequence[Path]:
        """The files and folders whose contents make the model and its tokens."""

    def shape(self, kind: Kind, height: int, width: int) -> VideoShape | None:
        """Pixels that the model sees of a picture of height x width as stored; None of kind `text`."""

    def render(
        self,
        conversation: Conversation,
        shape: VideoShape | None,
        seconds: Sequence[float] = (),
        *,
        answered: bool = True,
        prefix: str = "",
    ) -> Rendered:
        """Tokens of a conversation about media of that shape, its frames at these seconds.

        Unless `answered`, up to where the model has to answer the last turn, after `prefix`.
        """

    def load_model(self, dtype: torch.dtype) -> nn.Module:
        """The frozen model, loaded in `dtype` from the start, on the CPU; takes `answer_labels` (objectives)."""

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's arguments for a batch with `input_ids` (B, L), `pixels` uint8 (B, F, 3, H, W) unless of kind
        text, and, where `render` gives instructions, `instruction_ids` and `instruction_mask` (B, I).

        Tokens are padded on the right, and no `attention_mask` is made: what is causal never looks there.
        """

    def losses(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput:
        """Mean next-token loss of each sample's answers, fp32 (B,); in place of timesteps, indices into `KINDS`.

        Beside what `inputs` takes, `labels` (B, A) are the answer tokens (or -100) and `answer_positions` (B, A)
        the positions that predict them.
        """

    def answer(
        self, model: nn.Module, rendered: Rendered, pixels: torch.Tensor | None, max_tokens: int
    ) -> str:
        """What the model says next, greedily; `pixels` uint8 (F, 3, H, W)."""


class ChatFamily(Protocol):
    """What is known of a chat family before a checkpoint is opened."""

    name: str
    lora_targets: tuple[str, ...]
    """Default names of the linear layers that get an adapter."""
    lora_within: tuple[str, ...]
    """The submodules in which they are looked for, such as the language model."""
    group_patterns: Mapping[str, tuple[str, ...]]
    tiny_variants: tuple[str, ...]

    def open(self, model: ModelConfig) -> ChatCheckpoint: ...

    def build_tiny(self, variant: str, out: Path, seed: int) -> None: ...


def answered_losses(
    checkpoint: ChatCheckpoint, model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> LossOutput:
    """`ChatCheckpoint.losses` of a model with `with_answer_losses`; in place of timesteps, indices into `KINDS`."""
    losses = model(
        **checkpoint.inputs(batch),
        answer_positions=batch["answer_positions"],
        answer_labels=batch["labels"],
    )
    pixels = batch.get("pixels")
    kind: Kind = "text" if pixels is None else "image" if pixels.shape[1] == 1 else "video"
    return LossOutput(losses, torch.full_like(losses, KINDS.index(kind), dtype=torch.int64))


def greedy_answer(
    model: nn.Module,
    tokenizer: Any,
    given: Mapping[str, torch.Tensor],
    max_tokens: int,
    *,
    end: str | None = None,
) -> str:
    """What the model says after a prompt (1, L), one likeliest token after the other, until it ends.

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
