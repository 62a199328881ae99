"""Chooses the task of a family."""

from dit_lora.families import CHAT_FAMILIES
from dit_lora.training.task import Task


def get_task_of_family(family: str) -> Task:
    """The training task of a family (diffusion or chat). Modules that only the other task needs are not imported."""
    if family in CHAT_FAMILIES:
        from dit_lora.training.tasks.chat.task import ChatTask

        return ChatTask()
    from dit_lora.training.tasks.diffusion.task import DiffusionTask

    return DiffusionTask()
