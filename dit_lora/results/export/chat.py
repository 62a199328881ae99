"""Exports a chat model's adapter in other forms."""

from collections.abc import Callable
from pathlib import Path

from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.results.export.merge_chat import merge_adapter
from dit_lora.training.session.session import quiet_libraries
from dit_lora.training.tasks.chat.answerer import find_origin


def export_merged(
    target: Path, out: Path, model: str | None, on_progress: Callable[[str], None]
) -> Path:
    """Write the whole checkpoint with the adapter of a run's or an adapter's folder in it; return `out`."""
    quiet_libraries()
    origin = find_origin(target, model)
    if origin.adapter is None:
        raise DitLoraError(f"{target} is no adapter and no run with one; there is nothing to merge")
    checkpoint = get_family(origin.model.family).open(origin.model)
    return merge_adapter(
        origin.adapter,
        checkpoint.path,
        out,
        model_class=checkpoint.model_class,
        on_progress=on_progress,
    )
