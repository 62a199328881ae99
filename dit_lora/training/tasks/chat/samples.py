"""Finds a recipe's conversations, renders each to learn its length, and assigns it to a bucket."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dit_lora.config.chat import ChatConfig
from dit_lora.config.data import DataConfig
from dit_lora.config.recipe import Recipe
from dit_lora.data.cache.cache import make_entry_key
from dit_lora.data.chat.annotations import read_conversations
from dit_lora.data.chat.conversation import Conversation
from dit_lora.data.chat.fitting import shorten_conversation
from dit_lora.data.chat.frames import compute_latest_times
from dit_lora.data.chat.tensors import round_up_length
from dit_lora.data.media.media import Media
from dit_lora.data.media.video import ClipError
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.errors import DitLoraError
from dit_lora.families.chat_base import ChatCheckpoint
from dit_lora.training.tasks.chat.training_set import ChatEntry, ChatShape, ChatTrainingSet
from dit_lora.training.tasks.diffusion.samples import describe_read_error, make_progress_bar, read_headers


@dataclass(frozen=True)
class ChatSamples:
    """The samples of a file of conversations, read for a chat model."""

    entries: tuple[ChatEntry, ...]
    rejected: dict[str, str]
    """Reasons why samples cannot be used, by id."""
    media: dict[str, Media]
    """The media of every sample that has any and could be read so far, by id."""
    names: tuple[str, ...]
    """Names of all samples, in file order."""


def find_conversations(recipe: Recipe, checkpoint: ChatCheckpoint, data: DataConfig, *, quiet: bool) -> ChatSamples:
    """Read annotations and headers, and render every conversation; decodes no media."""
    conversations, chat = read_conversations(data), recipe.chat or ChatConfig()
    rejected = {problem.file: problem.message for problem in conversations.problems}
    with_media = [conversation for conversation in conversations.usable if conversation.media is not None]
    # Only headers: sizes give the bucket, durations the time stamps.
    media_files = [conversation.media for conversation in with_media if conversation.media]
    headers = read_headers(media_files, recipe, quiet=quiet)
    by_id = {conversation.id: header for conversation, header in zip(with_media, headers, strict=True)}
    entries = []
    for conversation in make_progress_bar("rendering conversations", "sample", quiet)(conversations.usable):
        # A conversation's own system prompt wins over the recipe's.
        conversation = replace(conversation, system=conversation.system or chat.system)
        try:
            entries.append(_build_entry(conversation, by_id.get(conversation.id), checkpoint, chat))
        except DitLoraError as error:
            rejected[conversation.id] = str(error)
    media = {conversation.id: conversation.media for conversation in with_media if conversation.media}
    # In file order without repetitions; samples that could not be parsed come last.
    names = dict.fromkeys([*(conversation.id for conversation in conversations.usable), *rejected])
    return ChatSamples(tuple(entries), rejected, media, tuple(names))


def compute_digest(entries: Sequence[ChatEntry]) -> str:
    """Digest of the texts, times, lengths and media headers; not of the media's content."""
    described = []
    for entry in entries:
        sample = entry.conversation
        settings = (sample.start, sample.end, sample.times_per_epoch, sample.loss_weight)
        texts = [text for turn in sample.turns for text in (turn.instruction, turn.question, turn.answer)]
        facts = [repr(entry.header), str(entry.shape), str(entry.answers)]
        described.append([sample.id, sample.system, repr(settings), *texts, *facts])
    return make_entry_key({"conversations": described})


def build_training_set(entries: Sequence[ChatEntry], checkpoint: ChatCheckpoint, recipe: Recipe) -> ChatTrainingSet:
    return ChatTrainingSet.from_entries(entries, checkpoint, recipe.chat or ChatConfig(), checkpoint.pad_token_id)


def _build_entry(
    conversation: Conversation, header: VideoHeader | ClipError | None, checkpoint: ChatCheckpoint, chat: ChatConfig
) -> ChatEntry:
    """Render a conversation and choose its bucket. Raises `DitLoraError` if nothing can be learned from it."""
    if isinstance(header, ClipError) and conversation.media is not None:
        raise ClipError(describe_read_error(conversation.media, header))
    if isinstance(header, ClipError):
        raise header
    pixels, seconds = None, tuple[float, ...]()
    if header is not None:
        pixels = checkpoint.shape(conversation.kind, header.height, header.width)
        if conversation.kind == "video" and pixels is not None:
            if header.seconds is None or header.fps is None:
                raise ClipError(f"{conversation.id}: its header has no length; encode it again")
            start, end = conversation.start, conversation.end
            seconds = compute_latest_times(header.seconds, header.fps, pixels.frames, start=start, end=end)
    # With the longest time stamps: no random choice of frames gives more tokens.
    begun = _list_turn_order_variants(conversation, chat)
    renderings = [
        shorten_conversation(checkpoint.tokenize_conversation(rendered, pixels, seconds), chat.max_tokens)
        for rendered in begun
    ]
    longest, instruction = max(renderings, key=len), len(renderings[0].instruction)
    if instruction and _is_shuffled(conversation, chat):
        # Any turn may come first: padding needs the longest instruction of all.
        single_turns = [replace(conversation, turns=(turn,)) for turn in conversation.turns]
        instruction = max(
            len(checkpoint.tokenize_conversation(rendered, pixels, seconds).instruction) for rendered in single_turns
        )
    # Rounded up, so that few shapes occur.
    length = round_up_length(len(longest), chat.length_step)
    size = (pixels.frames, pixels.height, pixels.width) if pixels else (0, 0, 0)
    shape = ChatShape(length, *size, conversation.kind)
    answers = max(rendered.num_answer_tokens for rendered in renderings)
    num_dropped = sum(piece.num_dropped for piece in longest.pieces)
    return ChatEntry(conversation, header, shape, answers, instruction, num_dropped)


def _is_shuffled(conversation: Conversation, chat: ChatConfig) -> bool:
    return chat.shuffle_turns and conversation.is_independent and len(conversation.turns) > 1


def _list_turn_order_variants(conversation: Conversation, chat: ChatConfig) -> list[Conversation]:
    """One order of turns for each length that a random order can give.

    Only the first turn makes a difference: its instruction is the conversation's, and a caption asks no question.
    """
    turns = conversation.turns
    if not _is_shuffled(conversation, chat):
        return [conversation]
    # The position of one turn for each kind of beginning.
    firsts = {(turn.instruction, not turn.question): at for at, turn in enumerate(turns)}
    return [replace(conversation, turns=(*turns[at:], *turns[:at])) for at in firsts.values()]
