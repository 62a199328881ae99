"""Trains chat models with the common loop: conversations read on the fly, sample answers, and a PEFT adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from dit_lora.adapters.groups import build_recipe_groups, describe_groups
from dit_lora.adapters.peft_format import save_chat_adapter
from dit_lora.adapters.start import attach_initialized_lora
from dit_lora.config.chat import ChatConfig
from dit_lora.config.recipe import Recipe
from dit_lora.data.cache.cache import make_entry_key
from dit_lora.data.cache.digests import Digests
from dit_lora.data.loading.training_set import TrainingData
from dit_lora.data.sources.clips import Clip
from dit_lora.families import get_family
from dit_lora.families.chat_base import KINDS, ChatCheckpoint
from dit_lora.families.family import ChatFamily
from dit_lora.training.check_budget import EvalSize
from dit_lora.training.session.session import Session
from dit_lora.training.step import StepResult
from dit_lora.training.task import Setup
from dit_lora.training.tasks.chat.samples import build_training_set, compute_digest, find_conversations
from dit_lora.training.tasks.chat.training_set import ChatEntry, ChatTrainingSet
from dit_lora.training.tasks.chat.validation import write_answers
from dit_lora.training.tasks.diffusion.cache_plan import find_rejected_files
from dit_lora.training.tasks.diffusion.model import patch_kernels, quantize_if_requested
from dit_lora.training.tasks.eval_loss import EvalSample, measure_eval_loss
from dit_lora.training.tasks.rejects import Rejects
from dit_lora.verify.chat_model import ChatReferenceModel


@dataclass(frozen=True)
class ChatTrainingData(TrainingData):
    """Data of a chat run: conversations to train on, and others to validate on."""

    eval_set: ChatTrainingSet | None = None


ChatSetup: TypeAlias = Setup[ChatTrainingData, ChatCheckpoint]


@dataclass(frozen=True)
class ChatTask:
    """Training task of chat models: every family that implements `families.chat_base`."""

    def prepare_data(self, session: Session, checkpoint: ChatCheckpoint) -> ChatTrainingData:
        recipe, accelerator = session.recipe, session.accelerator
        quiet = not accelerator.is_local_main_process
        rejects = Rejects(session)
        eval_set, eval_digest = None, ""
        # The other processes find headers and digests cached.
        with accelerator.local_main_process_first():
            samples = find_conversations(recipe, checkpoint, recipe.data, quiet=quiet)
            digests = Digests(recipe.cache_dir / "digests.json")
            model = self.model_digest(checkpoint, recipe, digests)
            clips = [Clip(name, media, "") for name, media in samples.media.items()]
            at_fault = find_rejected_files(recipe, clips, digests)
            if not quiet:
                digests.save()
        # Collective: all ranks leave out what any of them rejected.
        rejects.add_rejected_samples({**samples.rejected, **at_fault, **_find_untrainable(recipe, samples.entries)})
        entries = rejects.filter_samples(samples.entries, lambda entry: entry.id)
        conversations = build_training_set(entries, checkpoint, recipe)
        session.say(_describe_conversations(conversations))
        if recipe.validation.conversations is not None:
            data = recipe.data.model_copy(update={"path": recipe.validation.conversations, "sources": ()})
            # The data of another file, read with the same settings.
            validation_samples = find_conversations(recipe, checkpoint, data, quiet=quiet)
            rejects.add_rejected_samples(
                validation_samples.rejected, "these samples of validation.conversations cannot be used"
            )
            usable = rejects.filter_samples(validation_samples.entries, lambda entry: entry.id)
            eval_set, eval_digest = build_training_set(usable, checkpoint, recipe), compute_digest(usable)
        return ChatTrainingData(
            conversations,
            compute_digest(entries),
            model,
            rejects.reasons,
            validation_digest=eval_digest,
            eval_set=eval_set,
        )

    def load_trainable(
        self, recipe: Recipe, family: ChatFamily, checkpoint: ChatCheckpoint, dtype: torch.dtype
    ) -> tuple[nn.Module, list[dict[str, Any]], str]:
        model = checkpoint.load_model(dtype)
        # Before the adapter is attached: PEFT then wraps the quantised layers.
        narrowed = quantize_if_requested(recipe, model, family.group_patterns)
        description = "no adapter: optim.groups.adapter is null"
        if recipe.optim.groups.adapter is not None:
            targets, parents = select_default_targets(family, model), family.lora_parent_modules
            attached = attach_initialized_lora(model, recipe.lora, targets, seed=recipe.train.seed, submodules=parents)
            description = str(attached)
        groups = build_recipe_groups(model, recipe.optim.groups, family.group_patterns)
        return model, groups, f"{narrowed}{description}{describe_groups(groups)}\n{patch_kernels(recipe, model)}"

    def model_digest(self, checkpoint: ChatCheckpoint, recipe: Recipe, digests: Digests) -> str:
        return make_entry_key({checkpoint.path.name: digests.hash_component(checkpoint.path)})

    def trajectory_config(self, recipe: Recipe) -> dict[str, Any]:
        family: ChatFamily = get_family(recipe.model.family)
        chat = recipe.model_dump(mode="json")["chat"] or {}
        # Not configurable for these families; older checkpoints have it.
        if family.has_default_timestamps and chat.get("timestamps", "") is None:
            chat["timestamps"] = True
        return {f"chat.{key}": value for key, value in chat.items()}

    def build_metadata(self, setup: ChatSetup) -> dict[str, Any]:
        chat = setup.recipe.chat or ChatConfig()
        return {"viewing": asdict(setup.checkpoint.vision_settings), "system": chat.system}

    def loss_parts(self, setup: ChatSetup, result: StepResult) -> dict[str, dict[str, float]]:
        """The step's loss by kind of media; all samples of a step are of the same kind."""
        return {"loss_by_media": {KINDS[result.timesteps[0]]: result.loss}}

    def find_reduced_eval_size(self, setup: ChatSetup) -> EvalSize | None:
        # A recipe asks for this eval loss by naming its conversations.
        return None

    def compute_eval_loss(self, setup: ChatSetup) -> float | None:
        """Loss over answer tokens of `eval_clips` conversations, with middle frames and turns in order."""
        eval_set = setup.data.eval_set
        if eval_set is None:
            return None
        entries = eval_set.entries[: setup.recipe.validation.eval_clips]
        eval_samples = [EvalSample(entry, 0, entry.answers) for entry in entries]
        return measure_eval_loss(setup, eval_set, eval_samples)[0]

    def compute_validation_loss(self, setup: ChatSetup) -> float | None:
        """None: the eval loss of a chat model is that of conversations that are never trained on."""
        return None

    def write_samples(self, setup: ChatSetup, step: int) -> None:
        write_answers(setup, step)

    def build_reference_model(self, checkpoint: ChatCheckpoint) -> ChatReferenceModel:
        return ChatReferenceModel(checkpoint)

    def save(self, setup: ChatSetup, metadata: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Path:
        return self.write_adapter(setup, setup.session.dir / "adapter", metadata, weights)

    def write_adapter(
        self, setup: ChatSetup, folder: Path, metadata: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
    ) -> Path:
        return save_chat_adapter(setup.transformer, folder, metadata, weights)


def select_default_targets(family: ChatFamily, model: nn.Module) -> tuple[str, ...]:
    """The family's LoRA targets that exist in this model: its language models differ."""
    # The last part of each linear layer's name, which targets match.
    present = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return tuple(target for target in family.lora_targets if target in present)


def _find_untrainable(recipe: Recipe, entries: Sequence[ChatEntry]) -> dict[str, str]:
    """Samples that would give no trained parameter a gradient, each with the reason."""
    if recipe.optim.groups.adapter is not None:
        return {}
    reason = "it is text only, and without an adapter (optim.groups.adapter: null) nothing is trained by it"
    return {entry.id: reason for entry in entries if entry.shape.kind == "text"}


def _describe_conversations(conversations: ChatTrainingSet) -> str:
    kinds = [entry.conversation.kind for entry in conversations.entries]
    counts = [f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds]
    answers = sum(entry.answers for entry in conversations.entries)
    shortened = sum(entry.num_dropped_tokens > 0 for entry in conversations.entries)
    return (
        f"conversations: {', '.join(counts)}, in {len(conversations.padded_lengths)} buckets; "
        f"{answers:,} answer tokens" + (f"; {shortened:,} with shortened questions" if shortened else "")
    )
