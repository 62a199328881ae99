"""Answers questions with a chat model: a run's result, an adapter, or a checkpoint as it is."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from dit_lora.adapters.diffusers_format import BASE_FILE, read_provenance
from dit_lora.adapters.peft_format import chat_adapter_file, load_chat_adapter
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.chat.conversation import Conversation, Kind, Turn
from dit_lora.data.chat.frames import frame_seconds
from dit_lora.data.chat.mvbench import FrameFolder, notebook_seconds, read_facts, read_frames_at
from dit_lora.data.media.media import Media, file_stamp
from dit_lora.data.media.video import ClipError
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.errors import DitLoraError, listed
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.families.chat_base import ChatCheckpoint, Viewing
from dit_lora.files import files_below
from dit_lora.guard.switches import eager
from dit_lora.numerics.precision import choose_precision
from dit_lora.results.source import named_base, peft_base
from dit_lora.results.verify.output import adapters_off
from dit_lora.results.verify.reference_model import tuner_layers
from dit_lora.training.session.session import quiet_libraries

MAX_TOKENS = 512


@dataclass(frozen=True)
class Seen:
    """The frames that the model is shown, and when they are."""

    kind: Kind
    shape: VideoShape | None = None
    pixels: torch.Tensor | None = None
    """Frames, uint8 (F, 3, H, W); None for kind `text`."""
    seconds: tuple[float, ...] = ()


@dataclass
class Answerer:
    """A loaded model, in evaluation mode on its device."""

    checkpoint: ChatCheckpoint
    model: nn.Module
    device: torch.device
    dtype: torch.dtype
    system: str = ""
    """Text that is put before every conversation."""
    fit: Literal["stretch", "cover"] | None = None
    """The way a frame becomes its shape, where it is not that of training."""
    notebook: bool = False
    """True if frames are those that MVBench's notebook takes."""
    made: dict[str, Any] = field(default_factory=dict)
    """Facts that identify the model, for results."""
    original: dict[str, torch.Tensor] = field(default_factory=dict)
    """The base's own weights that the fine-tune replaced, by name."""

    def look(
        self,
        media: Media | FrameFolder | None,
        *,
        start: float | None = None,
        end: float | None = None,
    ) -> Seen:
        """Return the frames in the middle of equal parts (or the notebook's), or the image.

        Raises `ClipError` if it cannot be read.
        """
        if media is None:
            return Seen("text")
        header = read_facts(media)
        kind: Kind = "image" if header.is_image else "video"
        shape = self.checkpoint.shape(kind, header.height, header.width)
        if shape is None:
            raise ClipError(f"{media.name}: the model takes no {kind}")
        seconds: tuple[float, ...] = (0.0,)
        if kind == "video":
            try:
                seconds = self._seconds(media, header, shape.frames, start, end)
            except ClipError as error:
                raise ClipError(f"{media.name}: {error}") from error
        size = {"height": shape.height, "width": shape.width}
        pixels = read_frames_at(media, seconds, **size, fit=self.fit or self.checkpoint.fit)
        return Seen(kind, shape, pixels, seconds if kind == "video" else ())

    def _seconds(
        self,
        media: Media | FrameFolder,
        header: VideoHeader,
        frames: int,
        start: float | None,
        end: float | None,
    ) -> tuple[float, ...]:
        if header.seconds is None or header.fps is None:
            raise ClipError("does not say how long it is; encode it anew")
        if self.notebook:
            first = int(isinstance(media, FrameFolder))
            return notebook_seconds(header, frames, start=start, end=end, first=first)
        return frame_seconds(header.seconds, header.fps, frames, start=start, end=end)

    def say(
        self,
        seen: Seen,
        turns: Sequence[Turn],
        *,
        answer_prefix: str = "",
        max_tokens: int = MAX_TOKENS,
    ) -> str:
        """Return the model's greedy answer to the last turn, without `answer_prefix`, by which it has to begin."""
        # The checkpoint looks at the kind alone; what is shown is in `seen`.
        about = Conversation("question", seen.kind, None, tuple(turns), system=self.system)
        rendered = self.checkpoint.render(
            about, seen.shape, seen.seconds, answered=False, prefix=answer_prefix
        )
        # One autocast, as in training: adapters are fp32.
        mixed = torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.dtype is torch.bfloat16
        )
        # Not inference_mode: what a sharded model gathers within it could not train afterwards. Eager: each token is
        # a shape of its own, of which train.compile would make a graph.
        with torch.no_grad(), mixed, eager(self.model):
            return self.checkpoint.answer(self.model, rendered, seen.pixels, max_tokens)

    def ask(
        self,
        media: Media | FrameFolder | None,
        question: str,
        *,
        history: Sequence[Turn] = (),
        max_tokens: int = MAX_TOKENS,
    ) -> str:
        """Return one answer about an image, a video or nothing, after the turns that came before."""
        return self.say(self.look(media), (*history, Turn(question, "")), max_tokens=max_tokens)

    @property
    def is_tuned(self) -> bool:
        """True if there is a fine-tune that `as_base` can leave out."""
        return bool(self.original or tuner_layers(self.model))

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Restore the model before its fine-tune in this context: adapters off, the base's own weights in place."""
        with adapters_off(self.model):
            self._swap()
            try:
                yield
            finally:
                self._swap()

    def _swap(self) -> None:
        """Exchange the trained base weights and the original ones; nothing is copied."""
        if not self.original:
            return
        # PEFT renames the weights of the layers that it wraps.
        named = {
            name.replace(".base_layer.", "."): one for name, one in self.model.named_parameters()
        }
        for name, weight in self.original.items():
            # By reference: both sets stay in memory once, and a swap back restores the very tensors.
            self.original[name], named[name].data = named[name].data, weight


def converse(
    answerer: Answerer,
    media: Media | None,
    prompts: Iterable[str],
    *,
    instruction: str = "",
    max_tokens: int = MAX_TOKENS,
) -> Iterator[str]:
    """Yield the answer to each prompt, as it comes: the turns of one conversation about the same media."""
    # Once: later turns are about the same frames.
    seen = answerer.look(media)
    turns: list[Turn] = []
    for prompt in prompts:
        asked = [*turns, Turn(prompt, "", instruction)]
        answer = answerer.say(seen, asked, max_tokens=max_tokens)
        turns.append(Turn(prompt, answer, instruction))
        yield answer


def typed(read: Callable[[str], str] = input) -> Iterator[str]:
    """Yield what a person types, line by line, until the end of input; empty lines are passed over."""
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            return
        if line:
            yield line


def load_answerer(target: Path, model: str | None = None, *, frames: int | None = None) -> Answerer:
    """Load the model of a run's folder, an adapter's folder, or a checkpoint's (or its name on the Hub).

    `model` is the base checkpoint, by default the run's; `frames` are by default those of training, or the
    checkpoint's own. Raises `DitLoraError` if `target` is none of these, or does not say where its base is.
    """
    quiet_libraries()
    origin = find_origin(target, model)
    adapter = origin.adapter
    family = origin.model.family
    _require_chat(target, family)
    checkpoint: ChatCheckpoint = get_family(family).open(origin.model)
    how = origin.how or checkpoint.how
    checkpoint = checkpoint.viewing(replace(how, frames=frames or how.frames))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = choose_precision(origin.model.dtype, device).dtype
    net = checkpoint.load_model(dtype)
    original: dict[str, torch.Tensor] = {}
    if adapter:
        # Before they are overwritten, for `as_base` to ask the base without loading it again.
        original = _to_be_replaced(net, adapter / BASE_FILE)
        load_chat_adapter(cast(PreTrainedModel, net), adapter)
    net.requires_grad_(False).eval().to(device)
    return Answerer(
        checkpoint,
        net,
        device,
        dtype,
        system=origin.system,
        made={
            "target": str(target),
            "weights": _digest(adapter) if adapter else _stamp(checkpoint.path),
            "family": family,
            "base_model": origin.model.path,
            "viewing": asdict(checkpoint.how),
        },
        original={name: tensor.to(device) for name, tensor in original.items()},
    )


@dataclass(frozen=True)
class ModelOrigin:
    """The base that a model is from, and how it was trained."""

    model: ModelConfig
    adapter: Path | None
    """The folder with what was trained; None for a whole checkpoint."""
    how: Viewing | None = None
    system: str = ""


def _adapter_of(target: Path) -> Path | None:
    """Return the folder with what was trained: an adapter, base weights, or both."""
    for folder in (target, target / "adapter"):
        if (folder / "adapter_config.json").is_file() or (folder / BASE_FILE).is_file():
            return folder
    return None


def find_origin(target: Path, model: str | None) -> ModelOrigin:
    """Find the base by the run's recipe, or by what its adapter says; `model` is another base checkpoint.

    Raises `DitLoraError` if `target` is neither a run, nor an adapter, nor a checkpoint, or does not say its base.
    """
    adapter = _adapter_of(target)
    run = target if adapter in (None, target / "adapter") else target.parent
    if (run / "config.yaml").is_file():
        return _of_run(run, adapter, model)
    if adapter is None:
        if model:
            raise DitLoraError(f"--model does not apply: {target} is a checkpoint, not an adapter")
        return ModelOrigin(_checkpoint(str(target)), None)
    made = read_provenance(chat_adapter_file(adapter))
    path = model or named_base(target, made.get("base_model") or peft_base(adapter))
    if "family" not in made:
        return ModelOrigin(_checkpoint(path), adapter)
    revision = None if model else made.get("revision")
    base = ModelConfig(family=made["family"], path=path, revision=revision)
    how = Viewing(**made["viewing"]) if "viewing" in made else None
    return ModelOrigin(base, adapter, how, made.get("system", ""))


def _require_chat(target: Path, family: str) -> None:
    if family not in CHAT_FAMILIES:
        raise DitLoraError(
            f"{target} is of the family {family}, which answers no questions; see dit-lora sample"
        )


def _of_run(run: Path, adapter: Path | None, model: str | None) -> ModelOrigin:
    recipe, whole = load_recipe(run / "config.yaml"), run / "model"
    _require_chat(run, recipe.model.family)
    changes: dict[str, Any] = {}
    if adapter is None:
        if not whole.is_dir():
            raise DitLoraError(f"{run} holds no result yet: neither adapter nor model")
        if model:
            raise DitLoraError(f"--model does not apply: {whole} is a whole model, not an adapter")
        changes = {"path": str(whole), "revision": None, "from_scratch": None}
    elif model:
        changes = {"path": model, "revision": None}
    system = recipe.chat.system if recipe.chat else ""
    return ModelOrigin(recipe.model.model_copy(update=changes), adapter, Viewing.of(recipe), system)


def _digest(adapter: Path) -> str:
    """Return the SHA-256 of an adapter's weights and config."""
    digest = hashlib.sha256()
    for file in sorted(adapter.glob("*")):
        if file.suffix in (".safetensors", ".json"):
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _stamp(checkpoint: Path) -> str:
    """Return a hash that changes when a checkpoint's weights may have; they are not read."""
    files = [path for path in files_below(checkpoint) if path.suffix == ".safetensors"]
    facts = [(one.name, *file_stamp(one)) for one in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _checkpoint(path: str) -> ModelConfig:
    """Return the config of the first chat family that opens this checkpoint. Raises `DitLoraError` if none does."""
    reasons = []
    # Opening reads configs alone, so trying each family is cheap.
    for name in CHAT_FAMILIES:
        config = ModelConfig(family=name, path=path)
        try:
            get_family(name).open(config)
        except DitLoraError as error:
            reasons.append(f"{name}: {error}")
            continue
        return config
    raise DitLoraError(
        listed(
            f"{path} is neither a run's folder, nor an adapter's, nor a chat model's checkpoint",
            reasons,
        )
    )


def _to_be_replaced(model: nn.Module, base: Path) -> dict[str, torch.Tensor]:
    """Return copies of the weights that were trained in full, before they are loaded."""
    if not base.is_file():
        return {}
    with safe_open(base, framework="pt") as file:
        names = set(file.keys())
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if name in names
    }
