"""The largest sample of a chat recipe: from its conversations, or synthetic if the data does not exist here."""

from collections.abc import Mapping

import torch

from dit_lora.config.chat import ChatConfig
from dit_lora.config.recipe import Recipe
from dit_lora.data.cache.cache import Spec
from dit_lora.data.chat.conversation import Conversation, Turn
from dit_lora.data.chat.fitting import shorten_conversation
from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.data.chat.tensors import round_up_length
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.errors import DitLoraError
from dit_lora.families.chat_base import ChatCheckpoint
from dit_lora.families.without_weights import is_data_available
from dit_lora.training.tasks.chat.samples import build_training_set, find_conversations
from dit_lora.training.tasks.chat.training_set import ChatEntry, ChatShape, ChatTrainingSet

_SYNTHETIC_DURATION_S = 60.0


def compute_chat_specs(
    recipe: Recipe, checkpoint: ChatCheckpoint
) -> dict[ChatShape, tuple[Spec, Mapping[str, torch.Tensor]]]:
    """The largest shape of a chat recipe, with the tensors of a sample of that shape.

    The tensors are given as shapes and dtypes; token ids that the model's shapes depend on are given as values.
    Without data, the sample is a video at the recipe's size and as many tokens as `chat.max_tokens` allows. Half of
    the tokens that do not belong to the video are in the answer.

    Raises:
        DitLoraError: The data has no usable conversation.
    """
    clips = (
        build_training_set(find_conversations(recipe, checkpoint, recipe.data, quiet=True).entries, checkpoint, recipe)
        if is_data_available(recipe)
        else _build_synthetic_set(recipe, checkpoint)
    )
    if not clips.entries:
        raise DitLoraError(f"data.path: {recipe.data.path} has no conversation that can be used")
    shape, spec = clips.largest_shape
    return {shape: (spec, clips.integer_inputs())}


def _build_synthetic_set(recipe: Recipe, checkpoint: ChatCheckpoint) -> ChatTrainingSet:
    """A dataset with one synthetic conversation that is as long as the recipe allows."""
    # A recipe without the section uses its defaults.
    chat, data = recipe.chat or ChatConfig(), recipe.data
    # Wide enough for the maximum number of tiles, if the model splits frames into tiles.
    height, width = data.height, data.width * (chat.tiles or 1)
    header = VideoHeader(fps=8.0, seconds=_SYNTHETIC_DURATION_S, frames=None, height=height, width=width)
    pixels = checkpoint.shape("video", height, width)
    assert pixels is not None
    # Time stamps of frames in the middle of equal parts: their digits become tokens in some prompts.
    seconds = [_SYNTHETIC_DURATION_S * (index + 0.5) / pixels.frames for index in range(pixels.frames)]

    def render_sample(num_words: int) -> tuple[Conversation, RenderedConversation]:
        turn = Turn("a " * chat.max_tokens, "a " * num_words, "a")
        largest = Conversation("largest", "video", None, (turn,), system=chat.system)
        return largest, shorten_conversation(
            checkpoint.tokenize_conversation(largest, pixels, seconds), chat.max_tokens
        )

    _, short = render_sample(1)
    _, longer = render_sample(9)
    # Answers of 1 and 9 words give the tokens per word: a tokenizer may need several.
    tokens_per_word = max(1, (longer.num_answer_tokens - short.num_answer_tokens) // 8)
    # Tokens of the question: it and the answer share what the rest of the prompt leaves free.
    questions = sum(len(piece.ids) for piece in short.pieces if piece.part == "question")
    free = chat.max_tokens - len(short) + questions
    conversation, long = render_sample(max(1, free // 2 // tokens_per_word))
    # Batches are padded to multiples of this step.
    length = round_up_length(len(long), chat.length_step)
    shape = ChatShape(length, pixels.frames, pixels.height, pixels.width, "video")
    entry = ChatEntry(conversation, header, shape, long.num_answer_tokens, len(long.instruction))
    return ChatTrainingSet.from_entries([entry], checkpoint, chat, checkpoint.pad_token_id)
