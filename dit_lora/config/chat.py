"""The `chat` section of a recipe: how conversations about images and videos become tokens."""

from typing import Annotated, Literal

from pydantic import Field

from dit_lora.config.section import Count, Section


class ChatConfig(Section):
    """Settings of chat models; `data.path` is then a JSON (or JSON lines) file of conversations."""

    max_tokens: Count = 1024
    """Tokens of one sample, those of its frames included. A longer question is shortened; an answer never is."""
    length_step: Count = 64
    """Samples whose lengths round up to the same multiple of this share a batch, and are padded to it."""
    frames: Literal["middle", "random"] = "random"
    """The frame to take from each of data.frames equal parts of a video: the middle, or a random one (in training)."""
    timestamps: bool | None = None
    """Say in the prompt at which seconds the frames are. null: as the model was trained, VideoChat2-Vicuna with them,
    VideoChat2-Mistral and -Phi-3 without."""
    crop: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Least share of the picture that a random crop keeps, in training; 1 for none. VideoChat2: 0.5."""
    shuffle_turns: bool = True
    """Give the questions of one sample in another order each time, where they are independent (`QA` lists)."""
    system: str = ""
    """Text that is put before every conversation."""
    tiles: Count | None = None
    """VideoChat2-HD: cut each frame into up to this many tiles of data.height x data.width, by its shape."""
