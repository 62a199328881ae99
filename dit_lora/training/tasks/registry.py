"""Chooses the task of a family."""

from dit_lora.families import CHAT_FAMILIES
from dit_lora.training.task import Task


def task_of(family: str) -> Task:
    """Return the task of a family; what only the other one needs is not imported."""
    if family in CHAT_FAMILIES:
        from dit_lora.training.tasks.chat.task import ChatTask

        return ChatTask()
    from dit_lora.training.tasks.diffusion.task import DiffusionTask

    return DiffusionTask()
