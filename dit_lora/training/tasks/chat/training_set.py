"""Reads conversations for a run: decodes frames and renders text on the fly, each sample in its bucket.

A sample's tensors have the shape of its bucket, so that any samples of a step form a batch, with one kind of media.
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
from dit_lora.data.chat.conversation import Conversation, ConversationKind
from dit_lora.data.chat.fitting import shorten_conversation
from dit_lora.data.chat.frames import read_frames_at, sample_frame_times, sample_random_box
from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.data.chat.tensors import conversation_to_tensors
from dit_lora.data.loading.batch import (
    LOSS_WEIGHT,
    Batch,
    DataReadingSettings,
    OrderedDataset,
    build_loader,
    make_sample_seed,
)
from dit_lora.data.loading.order import SampleOrder
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.data.media.video import ClipError
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.families.chat_base import ChatCheckpoint
from dit_lora.numerics.streams import make_generator


@dataclass(frozen=True, order=True, slots=True)
class ChatShape:
    """The sizes that all conversations of a batch share."""

    length: int
    """Tokens, including padding."""
    frames: int
    """Frames; 0 for kind `text`."""
    height: int
    width: int
    kind: ConversationKind

    @property
    def pixels(self) -> VideoShape | None:
        return None if self.kind == "text" else VideoShape(self.frames, self.height, self.width)

    @property
    def volume(self) -> int:
        """Size of a bucket: tokens of the language model plus 16x16 patches of the vision encoder."""
        return self.length + self.frames * self.height * self.width // 256

    def __str__(self) -> str:
        media = f"{self.kind} {self.pixels} and " if self.pixels else ""
        return f"{media}{self.length} tokens"


@dataclass(frozen=True, slots=True)
class ChatEntry:
    """One entry of a chat training set: a conversation, with everything that is known without decoding."""

    conversation: Conversation
    header: VideoHeader | None
    """The media's header; None for kind `text`."""
    shape: ChatShape
    answers: int
    """Tokens that are learned; independent of the random frames and turn order."""
    num_instruction_tokens: int
    """Tokens that a Q-Former reads."""
    num_dropped_tokens: int = 0
    """Tokens of questions that are cut off."""

    @property
    def id(self) -> str:
        return self.conversation.id


@dataclass(frozen=True)
class PaddedLengths:
    """Token counts of answers and instructions to which all conversations of a bucket are padded."""

    num_answer_tokens: int
    num_instruction_tokens: int


@dataclass(frozen=True)
class ChatTrainingSet:
    """Training set of conversations that are read on demand."""

    entries: tuple[ChatEntry, ...]
    checkpoint: ChatCheckpoint
    chat: ChatConfig
    pad_token_id: int
    padded_lengths: Mapping[ChatShape, PaddedLengths]

    @classmethod
    def from_entries(
        cls, entries: Sequence[ChatEntry], checkpoint: ChatCheckpoint, chat: ChatConfig, pad_token_id: int
    ) -> "ChatTrainingSet":
        rooms: dict[ChatShape, PaddedLengths] = {}
        for entry in entries:
            lengths = rooms.get(entry.shape, PaddedLengths(1, 0))
            # Padding per bucket, not per batch: a sample's tensors do not depend on its neighbours.
            rooms[entry.shape] = PaddedLengths(
                max(lengths.num_answer_tokens, entry.answers),
                max(lengths.num_instruction_tokens, entry.num_instruction_tokens),
            )
        return cls(tuple(entries), checkpoint, chat, pad_token_id, rooms)

    def build_order(self, *, seed: int, quarantine: Quarantine, samples_per_step: int = 1) -> SampleOrder:
        return SampleOrder(
            [entry.id for entry in self.entries],
            seed=seed,
            quarantine=quarantine,
            samples_per_step=samples_per_step,
            buckets=[entry.shape for entry in self.entries],
            times_per_epoch=[entry.conversation.times_per_epoch for entry in self.entries],
        )

    @property
    def largest_shape(self) -> tuple[ChatShape, Spec]:
        shape = max(self.padded_lengths, key=lambda candidate: candidate.volume)
        # All samples of a bucket are padded alike, so an empty conversation has their shapes.
        tensors = self._build_tensors(shape, RenderedConversation(()), None, [0.0] * shape.frames)
        return shape, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def select_example_entries(self) -> Sequence[ChatEntry]:
        """One data set entry of each kind of media if there are several kinds; else empty.

        Text uses no vision encoder.
        """
        by_kind: dict[ConversationKind, ChatEntry] = {}
        for entry in self.entries:
            by_kind.setdefault(entry.shape.kind, entry)
        return tuple(by_kind.values()) if len(by_kind) > 1 else ()

    def integer_inputs(self) -> dict[str, torch.Tensor]:
        """Tensors of one sample of the largest shape, except pixels: models count the tokens that stand for media."""
        shape, _ = self.largest_shape
        entry = next(entry for entry in self.entries if entry.shape == shape)
        rendered, seconds = self.render(entry, None)
        tensors = self._build_tensors(shape, rendered, None, seconds)
        return {name: tensor for name, tensor in tensors.items() if name != "pixels"}

    def read_sample(self, entry: ChatEntry, sample_seed: int) -> Batch:
        """Read a conversation without randomness: middle frames, whole pictures, turns in order.

        Any `sample_seed` is possible.
        """
        return self._read_sample(entry, sample_seed, None)

    def read_augmented(self, entry: ChatEntry, sample_seed: int, run_seed: int) -> Batch:
        """Read one conversation with random frames, crop and turn order, according to the recipe's `chat` section."""
        return self._read_sample(entry, sample_seed, make_sample_generator(run_seed, sample_seed))

    def find_token_problems(self, model: nn.Module) -> list[str]:
        """One message for each token in a sample's text that has no embedding in the model."""
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
        count = embeddings.num_embeddings
        vocabulary = self.checkpoint.tokenizer.get_vocab()
        # Most vocabularies fit: then no sample needs to be rendered.
        not_embedded = {token: name for name, token in vocabulary.items() if token >= count}
        if not not_embedded:
            return []
        problems = []
        for entry in self.entries:
            pieces = self.render(entry, None)[0].pieces
            # Media placeholders are replaced by features and need no embedding.
            ids = {token for piece in pieces if piece.part != "media" for token in piece.ids}
            problems += [
                f"{entry.id}: {not_embedded[token]!r} is token {token}, and the model has embeddings of tokens "
                f"0..{count - 1}"
                for token in sorted(ids & not_embedded.keys())
            ]
        return problems

    def mark_bad_entries(self, samples: Sequence[str]) -> list[Path]:
        return []

    def make_loader(self, reading: DataReadingSettings) -> Iterable[Batch]:
        return build_loader(ChatDataset(self, reading), reading)

    def render(self, entry: ChatEntry, rng: torch.Generator | None) -> tuple[RenderedConversation, list[float]]:
        """The conversation's tokens, cut to `chat.max_tokens`, and the times of its frames in seconds."""
        conversation = entry.conversation
        if rng is not None and self.chat.shuffle_turns and conversation.is_independent:
            # Independent turns may come in any order.
            order = torch.randperm(len(conversation.turns), generator=rng).tolist()
            turns = tuple(conversation.turns[index] for index in order)
            conversation = dataclasses.replace(conversation, turns=turns)
        seconds = _draw_frame_times(entry, rng if self.chat.frames == "random" else None)
        rendered = self.checkpoint.tokenize_conversation(conversation, entry.shape.pixels, seconds)
        return shorten_conversation(rendered, self.chat.max_tokens), seconds

    def _read_sample(self, entry: ChatEntry, sample_seed: int, rng: torch.Generator | None) -> Batch:
        pixels, fault = None, None
        rendered, seconds = self.render(entry, rng)
        try:
            pixels = self._read_pixels(entry, seconds, rng)
        except ClipError as error:
            fault = str(error)
        tensors = self._build_tensors(entry.shape, rendered, pixels, seconds)
        # One sample as a batch: every tensor gets a first dimension of 1.
        return Batch(
            ids=(entry.id,),
            sample_seeds=(sample_seed,),
            tensors={name: tensor[None] for name, tensor in tensors.items()},
            faults={entry.id: fault} if fault else {},
        )

    def _read_pixels(
        self, entry: ChatEntry, seconds: Sequence[float], rng: torch.Generator | None
    ) -> torch.Tensor | None:
        media, shape, header = entry.conversation.media, entry.shape, entry.header
        if media is None or header is None:
            return None
        box = None
        if rng is not None and self.chat.crop < 1:
            box = sample_random_box(rng, self.chat.crop, header.width / header.height)
        # A picture has no time stamps: its only frame is at 0.
        return read_frames_at(
            media, seconds or (0.0,), height=shape.height, width=shape.width, fit=self.checkpoint.fit, box=box
        )

    def _build_tensors(
        self, shape: ChatShape, rendered: RenderedConversation, pixels: torch.Tensor | None, seconds: Sequence[float]
    ) -> dict[str, torch.Tensor]:
        lengths = self.padded_lengths[shape]
        tensors = conversation_to_tensors(
            rendered,
            length=shape.length,
            num_answers=lengths.num_answer_tokens,
            instruction_length=lengths.num_instruction_tokens or None,
            pad_token_id=self.pad_token_id,
        )
        if shape.kind != "text":
            # (F, 3, H, W)
            empty = (shape.frames, 3, shape.height, shape.width)
            # An unreadable file keeps its shape in the batch; the fault is passed along with it.
            tensors["pixels"] = torch.zeros(empty, dtype=torch.uint8) if pixels is None else pixels
        if shape.kind == "video":
            # Some models derive positions from the frames' times.
            tensors["seconds"] = torch.tensor(seconds)
        return tensors


class ChatDataset(OrderedDataset):
    """The sample at each position of a run, weighted so that every answer token of a step counts the same.

    A sample's loss is the mean over its answer tokens. Multiplied by its share of the step's tokens on all ranks, the
    step's mean is the mean over tokens. All ranks know the samples of a step, so nothing is communicated.
    """

    def __init__(self, clips: ChatTrainingSet, reading: DataReadingSettings) -> None:
        self.clips = clips
        self.seed = reading.seed
        self.group = reading.sampler.samples_per_step
        self.order = clips.build_order(seed=reading.seed, quarantine=reading.quarantine, samples_per_step=self.group)
        # (step, answer tokens of its samples) of the last step; -1 is no step.
        self._cached_token_sum = (-1, 0)

    def __getitem__(self, position: int) -> Batch:
        epoch, copy, index = self.order.get_occurrence(position)
        entry = self.clips.entries[index]
        batch = self.clips.read_augmented(entry, make_sample_seed(entry.id, epoch, copy), self.seed)
        # Times the group size, because the loop averages over samples.
        share = entry.answers * self.group / self._count_answer_tokens(position // self.group)
        weight = torch.tensor([share * entry.conversation.loss_weight])
        return dataclasses.replace(batch, tensors={**batch.tensors, LOSS_WEIGHT: weight})

    def _count_answer_tokens(self, step: int) -> int:
        # A step's samples are read one after another: cache the last sum.
        if self._cached_token_sum[0] != step:
            positions = range(step * self.group, (step + 1) * self.group)
            indices = (self.order.get_occurrence(position).sample_index for position in positions)
            self._cached_token_sum = (step, sum(self.clips.entries[index].answers for index in indices))
        return self._cached_token_sum[1]


def make_sample_generator(run_seed: int, sample_seed: int) -> torch.Generator:
    """Random generator for frames, crop and turn order of one use of a sample."""
    return make_generator(run_seed, "chat", sample_seed)


def _draw_frame_times(entry: ChatEntry, rng: torch.Generator | None) -> list[float]:
    header, conversation = entry.header, entry.conversation
    if conversation.kind != "video" or header is None or header.seconds is None or header.fps is None:
        return []
    start, end, frames = conversation.start, conversation.end, entry.shape.frames
    return list(sample_frame_times(header.seconds, header.fps, frames, start=start, end=end, generator=rng))
