"""Video chat models of Transformers: losses, gradients, answers, prompts and what is refused."""

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from video_text_cases import (
    KINDS,
    VARIANTS,
    batched,
    conversation,
    frame_times,
    opened,
    rendered_sample,
)

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import parameter_groups
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.chat import FAMILY
from dit_lora.families.chat.checkpoint import LAYOUTS
from dit_lora.families.chat.tiny import VARIANTS as TINY
from dit_lora.families.chat_base import VisionSettings
from dit_lora.numerics.streams import RandomStreams

STREAMS = RandomStreams(0, ())


@pytest.fixture(params=VARIANTS)
def folder(request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints[request.param]


@pytest.fixture
def draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def stock_losses(model: Any, checkpoint: Any, samples: list[Any]) -> torch.Tensor:
    """Of each sample alone, by the stock forward's logits with a mask of its own."""
    losses = []
    for rendered, media in samples:
        media_batch = {name: tensor[None] for name, tensor in media.items()}
        model_inputs = checkpoint.build_model_inputs({"input_ids": torch.tensor([rendered.ids]), **media_batch})
        mask = torch.ones_like(model_inputs["input_ids"])
        logits = model(**model_inputs, attention_mask=mask).logits[0]
        labels = torch.tensor(rendered.labels)
        losses.append(F.cross_entropy(logits[:-1].double(), labels[1:]))
    return torch.stack(losses)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_the_stock_models_of_each_sample_alone(folder: Path, kind: Any, draws: torch.Generator) -> None:
    """Neighbours, padding on the right and the missing mask change nothing."""
    checkpoint = opened(folder)
    model = checkpoint.load_model(torch.float32)
    samples = [
        rendered_sample(checkpoint, kind, question=question, answer=answer, generator=draws)
        for question, answer in (
            ("Why?", "It rains, and nobody saw it."),
            ("What is it there?", "No"),
        )
    ]
    with torch.no_grad():
        output = checkpoint.losses(model, batched(samples, extra=5), STREAMS)
        expected = stock_losses(model, checkpoint, samples)
    assert output.losses.dtype is torch.float32
    torch.testing.assert_close(output.losses.double(), expected, rtol=2e-5, atol=2e-5)


def test_a_picture_changes_its_own_samples_loss_and_no_others(folder: Path, draws: torch.Generator) -> None:
    checkpoint = opened(folder)
    model = checkpoint.load_model(torch.float32)
    batch = batched([rendered_sample(checkpoint, "video", generator=draws) for _ in range(2)])
    changed = {**batch, "pixels": batch["pixels"].clone()}
    changed["pixels"][1, -1] = 255 - changed["pixels"][1, -1]
    with torch.no_grad():
        before, after = (checkpoint.losses(model, tensors, STREAMS)[0] for tensors in (batch, changed))
    torch.testing.assert_close(before[0], after[0], rtol=1e-5, atol=1e-5)
    assert (before[1] - after[1]).abs() > 1e-3


def test_gradients_reach_every_lora_matrix_of_the_language_model_alone(folder: Path, draws: torch.Generator) -> None:
    checkpoint = opened(folder)
    model = checkpoint.load_model(torch.float32)
    attach_lora(
        model,
        LoraConfig(rank=2),
        FAMILY.lora_targets,
        seed=0,
        submodules=FAMILY.lora_parent_modules,
    )
    adapters = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(adapters) == 2 * 2 * len(FAMILY.lora_targets)  # A and B, two layers
    assert all(".language_model." in name or ".text_model." in name for name in adapters)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1, generator=draws)
    samples = [rendered_sample(checkpoint, "video", generator=draws) for _ in range(2)]
    checkpoint.losses(model, batched(samples), STREAMS).losses.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_connector_and_backbone_hold_all_of_the_vision_side(folder: Path, draws: torch.Generator) -> None:
    checkpoint = opened(folder)
    model = checkpoint.load_model(torch.float32)
    groups = parameter_groups(model, connector=1e-4, backbone=1e-5, patterns=FAMILY.group_patterns)
    grouped = {name for group in groups for name in group["param_names"]}
    # Only LLaVA's images use its image_newline: of videos alone it would never learn.
    text = ("lm_head", "model.language_model.", "model.text_model.", "model.image_newline")
    ungrouped = {name for name, _ in model.named_parameters()} - grouped
    assert all(name.startswith(text) for name in ungrouped)
    assert not any(name.startswith(text) for name in grouped)
    expected_groups = {
        "llava-next-video": "model.multi_modal_projector.linear_1.weight",
        "qwen3-vl": "model.visual.deepstack_merger_list.0.norm.weight",
    }
    assert expected_groups.get(folder.name, groups[0]["param_names"][0]) in groups[0]["param_names"]
    samples = [rendered_sample(checkpoint, "image", generator=draws)]
    checkpoint.losses(model, batched(samples), STREAMS).losses.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in groups[0]["params"])


@pytest.mark.parametrize("kind", ["video", "text"])
def test_an_answer_is_the_most_likely_token_each_time(folder: Path, kind: Any, draws: torch.Generator) -> None:
    checkpoint = opened(folder)
    model: Any = checkpoint.load_model(torch.float32)
    # What the published files have beside it must not sample nor penalise.
    model.generation_config.update(do_sample=True, temperature=9.0, repetition_penalty=5.0)
    with torch.no_grad():  # a random model would say the tokens of pictures too
        model.lm_head.weight[checkpoint.tokenizer.convert_tokens_to_ids(list(TINY[folder.name].special_tokens))] = 0
    prompt, media = rendered_sample(checkpoint, kind, answered=False, generator=draws)
    answer = checkpoint.answer(model, prompt, media.get("pixels"), max_tokens=5)
    ids, ends = list(prompt.ids), checkpoint.tokenizer.eos_token_id
    media_batch = {name: tensor[None] for name, tensor in media.items()}
    with torch.no_grad():
        for _ in range(5):
            model_inputs = checkpoint.build_model_inputs({"input_ids": torch.tensor([ids]), **media_batch})
            ids.append(int(model(**model_inputs).logits[0, -1].argmax()))
            if ids[-1] == ends:
                break
    new = ids[len(prompt) :]
    assert answer == checkpoint.tokenizer.decode(new, skip_special_tokens=True).strip()


def test_prompts_are_the_beginning_of_what_is_trained(folder: Path) -> None:
    checkpoint = opened(folder)
    shape = checkpoint.shape("video", 90, 151)
    assert shape is not None
    talk, times = conversation("video", "What is it?", "A dog."), frame_times(shape.frames)
    full_sample = checkpoint.tokenize_conversation(talk, shape, times)
    question = checkpoint.tokenize_conversation(talk, shape, times, include_answer=False)
    assert question.ids == full_sample.ids[: len(question)]
    assert question.num_answer_tokens < full_sample.num_answer_tokens
    assert checkpoint.tokenizer.decode(full_sample.ids[-1:]) == TINY[folder.name].end_token


def test_weights_load_in_bf16_and_are_frozen(folder: Path, draws: torch.Generator) -> None:
    checkpoint = opened(folder)
    model = checkpoint.load_model(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    batch = batched([rendered_sample(checkpoint, "video", generator=draws)])
    with torch.no_grad():
        losses = checkpoint.losses(model, batch, STREAMS).losses
    assert losses.dtype is torch.float32
    assert torch.isfinite(losses).all()


def test_qwen2_5_counts_positions_by_the_seconds_of_its_frames(
    tiny_checkpoints: dict[str, Path], draws: torch.Generator
) -> None:
    checkpoint = opened(tiny_checkpoints["qwen2.5-vl"], frames=4)
    model: Any = checkpoint.load_model(torch.float32)
    samples = [rendered_sample(checkpoint, "video", apart=apart, generator=draws) for apart in (0.5, 2.0)]
    batch = batched(samples)
    model_inputs = checkpoint.build_model_inputs(batch)
    # Two tokens a second, two frames a patch.
    assert model_inputs["second_per_grid_ts"].tolist() == [1.0, 4.0]
    names = ("mm_token_type_ids", "video_grid_thw", "second_per_grid_ts")
    positions, _ = model.model.get_rope_index(
        model_inputs["input_ids"], **{name: model_inputs[name] for name in names}
    )
    is_video = batch["input_ids"][0] == checkpoint.config.video_token_id
    spans = positions[0][:, is_video].max(1).values - positions[0][:, is_video].min(1).values
    assert spans.tolist() == [2, 8]
    with pytest.raises(DitLoraError, match="no `seconds`"):
        checkpoint.build_model_inputs({name: batch[name] for name in ("input_ids", "pixels")})


def test_answers_use_the_seconds_that_were_rendered(
    tiny_checkpoints: dict[str, Path], draws: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(tiny_checkpoints["qwen2.5-vl"], frames=4)
    model: Any = checkpoint.load_model(torch.float32)
    intervals = []
    index = type(model.model).get_rope_index
    monkeypatch.setattr(
        type(model.model),
        "get_rope_index",
        lambda *args, **kwargs: intervals.append(kwargs["second_per_grid_ts"]) or index(*args, **kwargs),
    )
    prompt, media = rendered_sample(checkpoint, "video", answered=False, apart=2.0, generator=draws)
    checkpoint.answer(model, copy.copy(prompt), media["pixels"], max_tokens=2)
    assert intervals[0].tolist() == [4.0]


def test_a_wrong_number_of_placeholders_is_refused_by_the_model(folder: Path, draws: torch.Generator) -> None:
    """So that the tests of losses check the number of tokens."""
    checkpoint = opened(folder)
    model = checkpoint.load_model(torch.float32)
    batch = batched([rendered_sample(checkpoint, "video", generator=draws)])
    if "qwen" in folder.name:
        layout: Any = checkpoint.layout
        batch["pixels"] = batch["pixels"][..., : -layout.patch_size * layout.merge_size]
    else:
        batch["pixels"] = batch["pixels"][:, 1:]
    # SmolVLM's code indexes beyond its images in Transformers 5.17.
    with pytest.raises((ValueError, IndexError), match=r"match|split|out of bounds"):
        checkpoint.losses(model, batch, STREAMS)


def recipe_of(folder: Path, tmp_path: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "model": {"family": "chat", "path": str(folder)},
        "data": {"path": "talk.json", "frames": 4, "height": 56, "width": 56},
        "chat": {},
        "train": {"steps": 1},
        "run": {"dir": str(tmp_path / "run")},
    }
    for name, section in changes.items():
        values[name] = {**values.get(name, {}), **section}
    return parse_recipe(values, "test")


def test_a_recipe_says_how_much_is_shown(folder: Path, tmp_path: Path) -> None:
    side = {"smolvlm2": 64}.get(folder.name, 56)
    recipe = recipe_of(folder, tmp_path, data={"height": side, "width": side})
    checkpoint = FAMILY.open(recipe.model, recipe)
    assert checkpoint.vision_settings == VisionSettings(4, side, side)
    shape = checkpoint.shape("video", 300, 200)
    assert shape is not None
    assert shape.frames == 4
    assert checkpoint.shape("text", 0, 0) is None


def test_all_options_that_do_not_apply_are_listed_at_once(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    recipe = recipe_of(
        tiny_checkpoints["internvl"],
        tmp_path,
        data={
            "sources": [{"path": "a", "caption": "a dog", "generate": 3, "image_column": "first"}],
            "path": None,
            "classes": ["a"],
            "buckets": {},
            "fps": 8,
            "windows": 2,
            "caption_dropout": 0.1,
            "image_dropout": 0.1,
            "image_noise": True,
            "precompute": False,
        },
        chat={"tiles": 4},
        train={"vlb": False},
        validation={
            "images": ["a.png"],
            "guidance_scale": 2,
            "inference_steps": 3,
            "eval_draws": 2,
            "data": 0.1,
        },
    )
    with pytest.raises(DitLoraError) as error:
        FAMILY.open(recipe.model, recipe)
    listed = {line.split(":")[0].strip(" -") for line in str(error.value).splitlines()[1:]}
    assert listed == {
        "data.classes",
        "data.sources.caption",
        "data.sources.generate",
        "data.image_column",
        "data.buckets",
        "data.fps",
        "data.windows",
        "data.caption_dropout",
        "data.image_dropout",
        "data.image_noise",
        "data.precompute",
        "chat.tiles",
        "train.vlb",
        "validation.images",
        "validation.guidance_scale",
        "validation.inference_steps",
        "validation.eval_draws",
        "validation.data",
    }
    assert "validation.data: give validation.conversations" in str(error.value)


def test_sizes_and_timestamps_that_a_model_has_not_are_refused(folder: Path) -> None:
    checkpoint = opened(folder)
    for height, width in ((20, 40), (300, 333)):
        if "qwen" in folder.name and height > 28:
            continue
        with pytest.raises(DitLoraError, match=rf"{height}x{width}; for \w+ give"):
            checkpoint.copy_with_vision_settings(VisionSettings(4, height, width))
    untimed = VisionSettings(4, checkpoint.vision_settings.height, checkpoint.vision_settings.width, timestamps=False)
    if folder.name in ("llava-next-video", "internvl"):
        assert checkpoint.copy_with_vision_settings(untimed).vision_settings == untimed
        return
    with pytest.raises(DitLoraError, match="always told when"):
        checkpoint.copy_with_vision_settings(untimed)
    shape = checkpoint.shape("video", 90, 151)
    with pytest.raises(DitLoraError, match="got 1 times for 3 frames"):
        checkpoint.tokenize_conversation(conversation("video", "What?", "It."), shape, [0.0])


def test_other_checkpoints_are_refused_by_name(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> None:
    with pytest.raises(DitLoraError, match=r"no config\.json"):
        FAMILY.open(ModelConfig(family="chat", path=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(DitLoraError, match=f"a gemma3 model; .*{', '.join(LAYOUTS)}"):
        FAMILY.open(ModelConfig(family="chat", path=str(tmp_path)))
    copied = Path(shutil.copytree(tiny_checkpoints["internvl"], tmp_path / "other"))
    values = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**values, "image_token_id": 999_999}))
    with pytest.raises(DitLoraError, match="no token 999999"):
        FAMILY.open(ModelConfig(family="chat", path=str(copied)))


def test_a_template_file_of_older_checkpoints_is_read(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> None:
    copied = Path(shutil.copytree(tiny_checkpoints["internvl"], tmp_path / "internvl"))
    template = (copied / "chat_template.jinja").read_text()
    (copied / "chat_template.jinja").unlink()
    talk = conversation("text", "What?", "It.")
    with pytest.raises(DitLoraError, match="no chat template"):
        opened(copied).tokenize_conversation(talk, None)
    changed = template.replace("<|im_start|>", "<|endoftext|>")
    (copied / "chat_template.json").write_text(json.dumps({"chat_template": changed}))
    checkpoint = opened(copied)
    prompt = checkpoint.tokenize_conversation(talk, None, include_answer=False)
    assert checkpoint.tokenizer.decode(prompt.ids).startswith("<|endoftext|>user")


def test_tiny_checkpoints_are_equal_bytes_for_equal_seeds(folder: Path, tmp_path: Path) -> None:
    FAMILY.build_tiny_checkpoint(folder.name, tmp_path / "same", 0)
    FAMILY.build_tiny_checkpoint(folder.name, tmp_path / "other", 1)
    same_losses, other_losses, ours = (
        {file.name: hashlib.sha256(file.read_bytes()).digest() for file in path.iterdir()}
        for path in (tmp_path / "same", tmp_path / "other", folder)
    )
    assert same_losses == ours
    assert {name for name in ours if ours[name] != other_losses[name]} == {"model.safetensors"}
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2**20


def test_smolvlm_says_its_embeddings_dtype_while_its_vision_encoder_trains_in_fp32(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """Else it casts image features to fp32 among bf16 embeddings, and fails."""
    config = ModelConfig(family="chat", path=str(tiny_checkpoints["smolvlm2"]))
    model = FAMILY.open(config).load_model(torch.bfloat16)
    trunk: Any = model.model
    trunk.vision_model.float()
    assert trunk.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        features = trunk.get_image_features(torch.ones(1, 1, 3, 64, 64), None, return_dict=True)
    assert features.pooler_output[0].dtype is torch.bfloat16
    assert trunk.float().dtype is torch.float32
