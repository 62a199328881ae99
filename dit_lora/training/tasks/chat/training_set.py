"""Reads conversations for a run: frames decoded and text rendered as they come, each sample in its bucket.

A sample's tensors have the shape of its bucket, so all of a step can be one batch on any rank, of one kind of media.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dit_lora.config.chat import ChatConfig
from dit_lora.config.data import VideoShape
from dit_lora.data.cache.shards import Spec
from dit_lora.data.chat.conversation import Conversation, Kind
from dit_lora.data.chat.fitting import fit
from dit_lora.data.chat.frames import frame_seconds, random_box, read_at
from dit_lora.data.chat.rendered import Rendered
from dit_lora.data.chat.tensors import to_tensors
from dit_lora.data.loading.batch import LOSS_WEIGHT, Batch, draw_number
from dit_lora.data.loading.order import Order
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.data.loading.reading import Reading, build_loader
from dit_lora.data.loading.sampler import OrderedDataset
from dit_lora.data.media.video import ClipError
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.families.chat_base import ChatCheckpoint
from dit_lora.numerics.streams import generator


@dataclass(frozen=True, order=True, slots=True)
class ChatShape:
    """The sizes that samples of one batch share."""

    length: int
    """Tokens, padding included."""
    frames: int
    """Frames; 0 for kind `text`."""
    height: int
    width: int
    kind: Kind

    @property
    def pixels(self) -> VideoShape | None:
        return None if self.kind == "text" else VideoShape(self.frames, self.height, self.width)

    @property
    def volume(self) -> int:
        """Tokens of the language model plus patches of 16x16 of the vision encoder."""
        return self.length + self.frames * self.height * self.width // 256

    def __str__(self) -> str:
        media = f"{self.kind} {self.pixels} and " if self.pixels else ""
        return f"{media}{self.length} tokens"


@dataclass(frozen=True, slots=True)
class ChatEntry:
    """One conversation, and what is known of it without decoding."""

    conversation: Conversation
    header: VideoHeader | None
    """The media's header; None for kind `text`."""
    shape: ChatShape
    answers: int
    """Tokens that are learned: the same however frames and turns are drawn."""
    instruction: int
    """Tokens that a Q-Former reads."""
    shortened: int = 0
    """Tokens of questions that are left out."""

    @property
    def id(self) -> str:
        return self.conversation.id


@dataclass(frozen=True)
class Room:
    """Tokens that the longest sample of a bucket needs, which all of them are padded to."""

    answers: int
    instruction: int


@dataclass(frozen=True)
class ChatSet:
    """Conversations that are read as they are wanted."""

    entries: tuple[ChatEntry, ...]
    checkpoint: ChatCheckpoint
    chat: ChatConfig
    pad: int
    rooms: Mapping[ChatShape, Room]

    @classmethod
    def of(
        cls, entries: Sequence[ChatEntry], checkpoint: ChatCheckpoint, chat: ChatConfig, pad: int
    ) -> "ChatSet":
        rooms: dict[ChatShape, Room] = {}
        for entry in entries:
            room = rooms.get(entry.shape, Room(1, 0))
            # Padding by bucket and not by batch: a sample's tensors do not depend on its neighbours.
            rooms[entry.shape] = Room(
                max(room.answers, entry.answers), max(room.instruction, entry.instruction)
            )
        return cls(tuple(entries), checkpoint, chat, pad, rooms)

    def order(self, *, seed: int, quarantine: Quarantine, group: int = 1) -> Order:
        return Order(
            [entry.id for entry in self.entries],
            seed=seed,
            quarantine=quarantine,
            group=group,
            buckets=[entry.shape for entry in self.entries],
            times=[entry.conversation.times for entry in self.entries],
        )

    @property
    def largest(self) -> tuple[ChatShape, Spec]:
        shape = max(self.rooms, key=lambda one: one.volume)
        tensors = self._tensors(shape, Rendered(()), None, [0.0] * shape.frames)
        return shape, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def one_of_each_kind(self) -> Sequence[ChatEntry]:
        """Return one entry of each kind where there are several: text uses no vision encoder."""
        first: dict[Kind, ChatEntry] = {}
        for entry in self.entries:
            first.setdefault(entry.shape.kind, entry)
        return tuple(first.values()) if len(first) > 1 else ()

    def known(self) -> dict[str, torch.Tensor]:
        """Return tokens of one sample of the largest shape: models count those that stand for its media."""
        shape, _ = self.largest
        entry = next(entry for entry in self.entries if entry.shape == shape)
        rendered, seconds = self.render(entry, None)
        tensors = self._tensors(shape, rendered, None, seconds)
        return {name: tensor for name, tensor in tensors.items() if name != "pixels"}

    def sample(self, entry: ChatEntry, draw: int) -> Batch:
        """Read one sample with the middle frames, whole pictures and turns as written; `draw` changes nothing."""
        return self._read(entry, draw, None)

    def drawn(self, entry: ChatEntry, draw: int, seed: int) -> Batch:
        """Read one sample with frames, crop and order of turns by chance, as the recipe's `chat` section has it."""
        return self._read(entry, draw, draws_of(seed, draw))

    def token_problems(self, model: nn.Module) -> list[str]:
        """Return a line for each token of a sample's text that the model has no embedding of."""
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
        count = embeddings.num_embeddings
        vocabulary = self.checkpoint.tokenizer.get_vocab()
        # Most vocabularies fit: then no sample is rendered for this.
        beyond = {token: name for name, token in vocabulary.items() if token >= count}
        if not beyond:
            return []
        problems = []
        for entry in self.entries:
            pieces = self.render(entry, None)[0].pieces
            ids = {token for piece in pieces if piece.part != "media" for token in piece.ids}
            problems += [
                f"{entry.id}: {beyond[token]!r} is token {token}, "
                f"and the model has embeddings of tokens 0..{count - 1}"
                for token in sorted(ids & beyond.keys())
            ]
        return problems

    def set_aside_bad(self, samples: Sequence[str]) -> list[Path]:
        return []

    def loader(self, how: Reading) -> Iterable[Batch]:
        return build_loader(ChatDataset(self, how), how)

    def render(
        self, entry: ChatEntry, draws: torch.Generator | None
    ) -> tuple[Rendered, list[float]]:
        """Return the sample's tokens, shortened to `chat.max_tokens`, and the seconds of its frames."""
        conversation, shape = _reordered(entry.conversation, self.chat, draws), entry.shape.pixels
        seconds = _seconds(entry, draws if self.chat.frames == "random" else None)
        rendered = self.checkpoint.render(conversation, shape, seconds)
        return fit(rendered, self.chat.max_tokens), seconds

    def _read(self, entry: ChatEntry, draw: int, draws: torch.Generator | None) -> Batch:
        pixels, fault = None, None
        rendered, seconds = self.render(entry, draws)
        try:
            pixels = self._pixels(entry, seconds, draws)
        except ClipError as error:
            fault = str(error)
        tensors = self._tensors(entry.shape, rendered, pixels, seconds)
        return Batch(
            ids=(entry.id,),
            draws=(draw,),
            tensors={name: tensor[None] for name, tensor in tensors.items()},
            faults={entry.id: fault} if fault else {},
        )

    def _pixels(
        self, entry: ChatEntry, seconds: Sequence[float], draws: torch.Generator | None
    ) -> torch.Tensor | None:
        media, shape, header = entry.conversation.media, entry.shape, entry.header
        if media is None or header is None:
            return None
        box = None
        if draws is not None and self.chat.crop < 1:
            box = random_box(draws, self.chat.crop, header.width / header.height)
        return read_at(
            media,
            seconds or (0.0,),
            height=shape.height,
            width=shape.width,
            fit=self.checkpoint.fit,
            box=box,
        )

    def _tensors(
        self,
        shape: ChatShape,
        rendered: Rendered,
        pixels: torch.Tensor | None,
        seconds: Sequence[float],
    ) -> dict[str, torch.Tensor]:
        room = self.rooms[shape]
        tensors = to_tensors(
            rendered,
            length=shape.length,
            answers=room.answers,
            instruction=room.instruction or None,
            pad=self.pad,
        )
        if shape.kind != "text":
            empty = (shape.frames, 3, shape.height, shape.width)
            # A file that cannot be read keeps its shape in the batch; the fault travels beside it.
            tensors["pixels"] = torch.zeros(empty, dtype=torch.uint8) if pixels is None else pixels
        if shape.kind == "video":
            tensors["seconds"] = torch.tensor(seconds)  # some models count positions by them
        return tensors


class ChatDataset(OrderedDataset):
    """The sample at each position of a run, weighted so that every answer token of a step counts the same.

    A sample's loss is its mean over its answer tokens; times its share of the step's tokens, over all micro-steps and
    ranks, the step's mean is that over tokens. Which samples a step has is known to all, so nothing is exchanged.
    """

    def __init__(self, clips: ChatSet, how: Reading) -> None:
        self.clips = clips
        self.seed = how.seed
        self.group = how.sampler.group
        self.order = clips.order(seed=how.seed, quarantine=how.quarantine, group=self.group)
        self._total = (-1, 0)

    def __getitem__(self, position: int) -> Batch:
        epoch, copy, index = self.order.draw_at(position)
        entry = self.clips.entries[index]
        batch = self.clips.drawn(entry, draw_number(entry.id, epoch, copy), self.seed)
        # Times the group's size: the loop takes the mean over samples.
        share = entry.answers * self.group / self._tokens(position // self.group)
        weight = torch.tensor([share * entry.conversation.loss_weight])
        return dataclasses.replace(batch, tensors={**batch.tensors, LOSS_WEIGHT: weight})

    def _tokens(self, step: int) -> int:
        """Return the number of answer tokens of a step's samples."""
        # A step's samples come one after another: the last sum is remembered.
        if self._total[0] != step:
            positions = range(step * self.group, (step + 1) * self.group)
            indices = (self.order.draw_at(position).sample for position in positions)
            self._total = (step, sum(self.clips.entries[index].answers for index in indices))
        return self._total[1]


def draws_of(seed: int, draw: int) -> torch.Generator:
    """Return the generator for frames, crop and order of turns of one coming of a sample."""
    return generator(seed, "chat", draw)


def _reordered(
    conversation: Conversation, chat: ChatConfig, draws: torch.Generator | None
) -> Conversation:
    if draws is None or not (chat.shuffle_turns and conversation.independent):
        return conversation
    order = torch.randperm(len(conversation.turns), generator=draws).tolist()
    return dataclasses.replace(
        conversation, turns=tuple(conversation.turns[index] for index in order)
    )


def _seconds(entry: ChatEntry, draws: torch.Generator | None) -> list[float]:
    header, one = entry.header, entry.conversation
    if one.kind != "video" or header is None or header.seconds is None or header.fps is None:
        return []
    return list(
        frame_seconds(
            header.seconds,
            header.fps,
            entry.shape.frames,
            start=one.start,
            end=one.end,
            generator=draws,
        )
    )
