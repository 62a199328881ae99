"""Shows one training sample as the model gets it: its frames, its tokens, and which tokens have a loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import RenderableType

from dit_lora.config.load import load_recipe
from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.data.chat.view import build_terminal_view
from dit_lora.environment.progress_bar import hide_progress_bars
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.families.chat_base import ChatCheckpoint
from dit_lora.training.tasks.chat.samples import build_training_set, find_conversations
from dit_lora.training.tasks.chat.training_set import ChatEntry, make_sample_generator


@dataclass(frozen=True)
class ShownSample:
    """One training sample of a chat model, rendered for display."""

    entry: ChatEntry
    checkpoint: ChatCheckpoint
    rendered: RenderedConversation
    seconds: Sequence[float]
    pixels: torch.Tensor | None
    """Frames, uint8 (F, 3, H, W); None for kind `text`."""

    def render_for_terminal(self) -> RenderableType:
        """The sample's tokens as text for a terminal, with those that are learned marked."""
        return build_terminal_view(
            self.entry.id,
            self.rendered,
            self.checkpoint.tokenizer,
            kind=self.entry.conversation.kind,
            seconds=self.seconds,
            instruction=self.entry.conversation.turns[0].instruction,
        )


def show_sample(recipe_path: str, overrides: Sequence[str], sample: str, draw: int | None) -> ShownSample:
    """Load a chat recipe's training sample with this id or number.

    Args:
        recipe_path: The recipe of a chat model.
        overrides: `key=value` settings on top of it.
        sample: The sample's id, or its number in the dataset.
        draw: The draw number, for random choices as in training; None for the whole sample with centered crops.

    Raises:
        DitLoraError: There is no such sample, or it cannot be used.
    """
    hide_progress_bars()
    recipe = load_recipe(recipe_path, overrides)
    if recipe.model.family not in CHAT_FAMILIES:
        raise DitLoraError(
            f"{recipe_path} trains {recipe.model.family}, and show is for chat models; use dit-lora audit"
        )
    checkpoint = get_family(recipe.model.family).open(recipe.model, recipe)
    samples = find_conversations(recipe, checkpoint, recipe.data, quiet=False)
    name = samples.names[int(sample)] if sample.isdecimal() and int(sample) < len(samples.names) else sample
    if name in samples.rejected:
        raise DitLoraError(f"{name}: {samples.rejected[name]}")
    entry = next((candidate for candidate in samples.entries if candidate.id == name), None)
    if entry is None:
        first_names = [f"{number}: {candidate}" for number, candidate in enumerate(samples.names[:20])]
        raise DitLoraError(
            format_list(f"there is no sample {sample}; the first of {len(samples.names)} are", first_names)
        )
    # A dataset of only this sample, so that it is not padded to the length of others.
    clips = build_training_set([entry], checkpoint, recipe)
    seed = recipe.train.seed
    batch = clips.read_sample(entry, 0) if draw is None else clips.read_augmented(entry, draw, seed)
    if batch.faults:
        raise DitLoraError(batch.faults[entry.id])
    # Rendered with the same random choices as the batch above.
    rendered, seconds = clips.render(entry, None if draw is None else make_sample_generator(seed, draw))
    pixels = batch.tensors.get("pixels")
    return ShownSample(entry, checkpoint, rendered, seconds, None if pixels is None else pixels[0])
