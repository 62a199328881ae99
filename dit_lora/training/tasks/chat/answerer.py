"""Answers questions with a chat model: from a run, an adapter, or an untrained checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dit_lora.adapters.diffusers_format import BASE_FILE, read_run_metadata
from dit_lora.adapters.peft_format import find_chat_adapter_file, load_chat_adapter
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.chat.conversation import Conversation, ConversationKind, Turn
from dit_lora.data.chat.frames import read_frames_at, sample_frame_times
from dit_lora.data.media.media import Media
from dit_lora.data.media.video import ClipError, read_header
from dit_lora.environment.progress_bar import hide_progress_bars
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.families.chat_base import ChatCheckpoint, VisionSettings
from dit_lora.guard.fallbacks import disable_compile
from dit_lora.numerics.precision import choose_precision
from dit_lora.verify.locate import read_peft_base, require_hub_base

MAX_TOKENS = 512


@dataclass(frozen=True)
class SampledFrames:
    """The frames of a video or image that the chat model is shown, and their times in seconds."""

    kind: ConversationKind
    shape: VideoShape | None = None
    pixels: torch.Tensor | None = None
    """Frames, uint8 (F, 3, H, W); None for kind `text`."""
    seconds: tuple[float, ...] = ()


@dataclass
class ChatAnswerGenerator:
    """A loaded chat model in evaluation mode on its device, which answers questions."""

    checkpoint: ChatCheckpoint
    model: nn.Module
    device: torch.device
    dtype: torch.dtype
    system: str = ""
    """System prompt, put before every conversation."""

    def read_media(self, media: Media | None) -> SampledFrames:
        """Read the image, or the middle frame of each of the video's equal parts.

        Raises `ClipError` if it cannot be read.
        """
        if media is None:
            return SampledFrames("text")
        header = read_header(media)
        kind: ConversationKind = "image" if header.is_image else "video"
        shape = self.checkpoint.shape(kind, header.height, header.width)
        if shape is None:
            raise ClipError(f"{media.name}: the model takes no {kind}")
        seconds: tuple[float, ...] = (0.0,)
        if kind == "video":
            if header.seconds is None or header.fps is None:
                raise ClipError(f"{media.name}: its header has no length; encode it again")
            try:
                seconds = sample_frame_times(header.seconds, header.fps, shape.frames)
            except ClipError as error:
                raise ClipError(f"{media.name}: {error}") from error
        pixels = read_frames_at(media, seconds, height=shape.height, width=shape.width, fit=self.checkpoint.fit)
        return SampledFrames(kind, shape, pixels, seconds if kind == "video" else ())

    def generate_answer(self, frames: SampledFrames, turns: Sequence[Turn], *, max_tokens: int = MAX_TOKENS) -> str:
        """Generate the greedy answer to the last turn of a conversation."""
        # The checkpoint reads only the kind of media; the frames are in `frames`.
        conversation = Conversation("question", frames.kind, None, tuple(turns), system=self.system)
        rendered = self.checkpoint.tokenize_conversation(
            conversation, frames.shape, frames.seconds, include_answer=False
        )
        # The same autocast as in training: adapters are fp32.
        mixed = torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype is torch.bfloat16)
        # Not inference_mode: weights that a sharded model gathers in it could not train afterwards. Eager: each token
        # is another shape, for which train.compile would compile a graph.
        with torch.no_grad(), mixed, disable_compile(self.model):
            return self.checkpoint.answer(self.model, rendered, frames.pixels, max_tokens)

    def answer_question(
        self, media: Media | None, question: str, *, history: Sequence[Turn] = (), max_tokens: int = MAX_TOKENS
    ) -> str:
        """Answer one question about an image, a video or nothing, after the turns of `history`."""
        return self.generate_answer(self.read_media(media), (*history, Turn(question, "")), max_tokens=max_tokens)


def answer_prompts(
    answerer: ChatAnswerGenerator,
    media: Media | None,
    prompts: Iterable[str],
    *,
    instruction: str = "",
    max_tokens: int = MAX_TOKENS,
) -> Iterator[str]:
    """Yield the answer to each prompt as it comes: the turns of one conversation about the same media."""
    # Once: later turns use the same frames.
    frames = answerer.read_media(media)
    turns: list[Turn] = []
    for prompt in prompts:
        turns_with_prompt = [*turns, Turn(prompt, "", instruction)]
        answer = answerer.generate_answer(frames, turns_with_prompt, max_tokens=max_tokens)
        turns.append(Turn(prompt, answer, instruction))
        yield answer


def read_prompts(read: Callable[[str], str] = input) -> Iterator[str]:
    """Yield the questions that a user types, line by line, until the end of input; empty lines are skipped."""
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            return
        if line:
            yield line


def load_answerer(target: Path, model: str | None = None, *, frames: int | None = None) -> ChatAnswerGenerator:
    """Load the model of a run's folder, an adapter's folder, or a checkpoint (a folder or a name on the Hub).

    `model` is the base checkpoint, by default the run's. `frames` defaults to the number in training, or the
    checkpoint's. Raises `DitLoraError` if `target` is none of these, or does not name its base.
    """
    hide_progress_bars()
    origin = find_origin(target, model)
    _require_chat(target, origin.model.family)
    checkpoint: ChatCheckpoint = get_family(origin.model.family).open(origin.model)
    # As in training, if that is known; else as the checkpoint does by default.
    viewing = origin.viewing or checkpoint.vision_settings
    checkpoint = checkpoint.copy_with_vision_settings(replace(viewing, frames=frames or viewing.frames))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = choose_precision(origin.model.dtype, device).dtype
    net = checkpoint.load_model(dtype)
    if origin.adapter:
        load_chat_adapter(cast(PreTrainedModel, net), origin.adapter)
    net.requires_grad_(False).eval().to(device)
    return ChatAnswerGenerator(checkpoint, net, device, dtype, system=origin.system)


@dataclass(frozen=True)
class ModelOrigin:
    """The base checkpoint of a chat model, and how the model was trained."""

    model: ModelConfig
    adapter: Path | None
    """The folder with the trained weights; None for a whole checkpoint."""
    viewing: VisionSettings | None = None
    system: str = ""


def find_origin(target: Path, model: str | None) -> ModelOrigin:
    """Find the base of a chat model in the run's recipe or the adapter's metadata.

    `model` overrides the base checkpoint.

    Raises `DitLoraError` if `target` is neither a run, nor an adapter, nor a checkpoint, or does not name its base.
    """
    adapter = None
    for folder in (target, target / "adapter"):
        # The trained weights are an adapter, base weights, or both.
        if (folder / "adapter_config.json").is_file() or (folder / BASE_FILE).is_file():
            adapter = folder
            break
    # `target` is a run's folder, or the folder `adapter` or `checkpoints/step_NNNNNN` inside one.
    run = target if adapter in (None, target / "adapter") else target.parent
    run = run.parent if run.name == "checkpoints" else run
    if (run / "config.yaml").is_file():
        return _read_run_origin(run, adapter, model)
    if adapter is None:
        if model:
            raise DitLoraError(f"--model does not apply: {target} is a checkpoint, not an adapter")
        return ModelOrigin(_detect_model_config(str(target)), None)
    metadata = read_run_metadata(find_chat_adapter_file(adapter))
    path = model or require_hub_base(target, metadata.get("base_model") or read_peft_base(adapter))
    if "family" not in metadata:
        return ModelOrigin(_detect_model_config(path), adapter)
    # The stored revision is one of the adapter's own base.
    revision = None if model else metadata.get("revision")
    base = ModelConfig(family=metadata["family"], path=path, revision=revision)
    viewing = VisionSettings(**metadata["viewing"]) if "viewing" in metadata else None
    return ModelOrigin(base, adapter, viewing, metadata.get("system", ""))


def _require_chat(target: Path, family: str) -> None:
    if family not in CHAT_FAMILIES:
        raise DitLoraError(f"{target} is of the family {family}, which is not a chat model; use dit-lora sample")


def _read_run_origin(run: Path, adapter: Path | None, model: str | None) -> ModelOrigin:
    recipe, whole_model = load_recipe(run / "config.yaml"), run / "model"
    _require_chat(run, recipe.model.family)
    changes: dict[str, Any] = {}
    if adapter is None:
        if not whole_model.is_dir():
            raise DitLoraError(f"{run} has no result yet: neither adapter nor model")
        if model:
            raise DitLoraError(f"--model does not apply: {whole_model} is a whole model, not an adapter")
        # A fully trained model is in the run's folder, and replaces the checkpoint.
        changes = {"path": str(whole_model), "revision": None, "from_scratch": None}
    elif model:
        changes = {"path": model, "revision": None}
    system = recipe.chat.system if recipe.chat else ""
    return ModelOrigin(recipe.model.model_copy(update=changes), adapter, VisionSettings.from_recipe(recipe), system)


def _detect_model_config(path: str) -> ModelConfig:
    """The config of the first chat family that can open this checkpoint. Raises `DitLoraError` if none can."""
    reasons = []
    # Opening reads only configs, so trying each family is cheap.
    for name in CHAT_FAMILIES:
        config = ModelConfig(family=name, path=path)
        try:
            get_family(name).open(config)
        except DitLoraError as error:
            reasons.append(f"{name}: {error}")
            continue
        return config
    raise DitLoraError(format_list(f"{path} is not a folder of a run, an adapter or a chat model", reasons))
