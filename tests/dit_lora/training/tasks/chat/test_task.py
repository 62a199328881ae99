"""Specifics of training a chat model: its LoRA targets, options without effect, the identity of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_sets import found_in, recipe_of, records, set_of, write_records
from family_cases.chat import FAMILY_OF, open_chat
from torch import nn

from dit_lora.config.optim import GroupsConfig
from dit_lora.config.recipe import LoraConfig
from dit_lora.data.cache.digests import Digests
from dit_lora.data.synthetic.conversations import write_conversations
from dit_lora.training.optim.build import clip_gradients, compute_gradient_norms
from dit_lora.training.tasks.chat.task import (
    ChatTask,
    _describe_conversations,
    _find_untrainable,
    select_default_targets,
)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media") / "data"
    write_conversations(folder, clips=2, images=2, frames=6, height=48, width=64, fps=8)
    return folder


@pytest.fixture
def recipe(tiny_checkpoints: dict[str, Path], media: Path, tmp_path: Path) -> Any:
    base = tiny_checkpoints["videochat2-mistral"]
    return recipe_of(base, write_records(media, records()), tmp_path)


@pytest.mark.parametrize("variant", FAMILY_OF)
def test_every_linear_layer_of_the_language_model_is_adapted(variant: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Under all names of the layers; none of the vision encoder."""
    subject = open_chat(variant, tiny_checkpoints[variant])
    model = subject.model()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    inside = [name for name in linear if {*name.split(".")} & {*subject.family.lora_parent_modules}]
    targets = select_default_targets(subject.family, model)
    assert {name.rpartition(".")[2] for name in inside} == set(targets)


def test_text_is_refused_where_nothing_that_it_goes_through_trains(recipe: Any) -> None:
    _, scan = found_in(recipe)
    assert _find_untrainable(recipe, scan.entries) == {}
    groups = GroupsConfig(adapter=None, connector=recipe.optim.groups.adapter)
    optim = recipe.optim.model_copy(update={"groups": groups})
    refused = _find_untrainable(recipe.model_copy(update={"optim": optim}), scan.entries)
    assert set(refused) == {"mine.json#5", "mine.json#6"}


def test_a_group_without_a_gradient_has_the_norm_0_and_is_not_scaled(recipe: Any) -> None:
    """As the vision encoder's in a step of text."""
    seen_weight, unseen = (nn.Parameter(torch.ones(3)) for _ in range(2))
    seen_weight.grad = torch.full((3,), 2.0)
    groups: Any = [
        {"name": "adapter", "params": [seen_weight]},
        {"name": "backbone", "params": [unseen]},
    ]
    norms = compute_gradient_norms(groups)
    assert norms["backbone"] == 0
    groups_config = GroupsConfig.model_validate(
        {"adapter": {"lr": 1.0, "clip": 1.0}, "backbone": {"lr": 1.0, "clip": 1.0}}
    )
    joint = clip_gradients(groups, norms, recipe.optim.model_copy(update={"groups": groups_config}))
    assert joint == pytest.approx(12**0.5)
    assert seen_weight.grad.norm() == pytest.approx(1.0, rel=1e-5)
    assert unseen.grad is None


def test_the_lines_at_the_start_count_what_there_is(recipe: Any) -> None:
    clips = set_of(recipe)
    message = _describe_conversations(clips)
    assert message.startswith("conversations: 2 image, 2 video, 2 text, in ")
    tokens = sum(entry.answers for entry in clips.entries)
    assert f"{len(clips.padded_lengths)} buckets; {tokens:,} answer tokens" in message
    assert "shortened" not in message


def test_what_a_resumed_run_must_share_is_the_chat_section(recipe: Any) -> None:
    identity = ChatTask().trajectory_config(recipe)
    assert identity["chat.max_tokens"] == 256
    assert identity["chat.length_step"] == 32
    assert all(name.startswith("chat.") for name in identity)


def test_the_models_digest_is_of_weights_and_tokenizers(recipe: Any, tmp_path: Path) -> None:
    import shutil

    checkpoint, _ = found_in(recipe)

    def digest(path: Path) -> str:
        fresh = SimpleNamespace(path=path)
        return ChatTask().model_digest(fresh, recipe, Digests(tmp_path / "none.json"))  # type: ignore[arg-type]

    copy = Path(shutil.copytree(checkpoint.path, tmp_path / "copies" / checkpoint.path.name))
    assert digest(copy) == digest(checkpoint.path)
    vocabulary = copy / "qformer_tokenizer" / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text() + "\n")
    assert digest(copy) != digest(checkpoint.path)


def test_with_an_adapter_and_groups_all_of_them_train(recipe: Any) -> None:
    groups = GroupsConfig.model_validate({name: {"lr": 1e-4} for name in ("adapter", "connector", "backbone")})
    update = {
        "optim": recipe.optim.model_copy(update={"groups": groups}),
        "lora": LoraConfig(rank=2),
    }
    both = recipe.model_copy(update=update)
    checkpoint, _ = found_in(recipe)
    from dit_lora.families.videochat2 import FAMILY

    model, parts, note = ChatTask().load_trainable(both, FAMILY, checkpoint, torch.float32)  # type: ignore[arg-type]
    assert [group["name"] for group in parts] == ["adapter", "connector", "backbone"]
    trained = {id(p) for group in parts for p in group["params"]}
    assert trained == {id(p) for p in model.parameters() if p.requires_grad}
    assert "lora: 15 of" in note
