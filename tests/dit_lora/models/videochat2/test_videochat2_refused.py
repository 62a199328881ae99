"""Files that are not a VideoChat2 release are refused with every problem listed; no code runs, no file remains."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from videochat2_release import TEXT, VISION, VOCAB, Tensors, World

from dit_lora.errors import DitLoraError
from dit_lora.models.videochat2 import convert


@pytest.fixture
def world(tmp_path: Path) -> World:
    new_world = World(tmp_path)
    new_world.write()
    return new_world


def test_a_folder_without_all_its_weights_is_refused(world: World) -> None:
    weights = world.folder / "llm" / "model.safetensors"
    original_bytes = weights.read_bytes()
    weights.write_bytes(original_bytes[:-9])
    with pytest.raises(DitLoraError, match=r"cannot read \S+model\.safetensors: .*it is incomplete"):
        world.convert()
    weights.unlink()
    with pytest.raises(DitLoraError, match="has no weights; looked for"):
        world.convert()
    index = '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    (world.folder / "llm" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DitLoraError, match=r"(?s)not exist:.*1\.safetensors.*2\.safetensors"):
        world.convert()


def test_a_lora_that_cannot_be_kept_or_scaled_is_refused(world: World) -> None:
    with pytest.raises(DitLoraError, match="keep_adapter needs a file of stage 3"):
        world.convert(stages=[world.folder / "stage2.pth"], keep_adapter=True)
    head = "mistral_model.base_model.model.lm_head.lora_{}.default.weight"
    world.stage3[head.format("A")] = torch.zeros(3, TEXT)
    world.stage3[head.format("B")] = torch.zeros(VOCAB, 3)
    world.write()
    with pytest.raises(DitLoraError, match=r"of one rank in every release; got \[3, 4\]"):
        world.convert()
    assert not [path for path in world.folder.iterdir() if "out" in path.name]


def test_all_that_does_not_fit_is_listed_at_once(world: World) -> None:
    del world.stage1["qformer.bert.encoder.layer.1.output.dense.bias"]
    del world.stage3["qformer.bert.encoder.layer.1.output.dense.bias"]
    world.stage3["vision_encoder.encoder.pos_embed"] = torch.zeros(1, 4, VISION)
    world.stage3["mistral_model.base_model.model.model.embed_tokens.lora_embedding_A.default"] = torch.zeros(4, VOCAB)
    world.stage2["vision_encoder.encoder.class_embedding"] = torch.zeros(VISION)
    parameter_name = "qformer.bert.embeddings.word_embeddings.weight"
    world.stage3[parameter_name] = world.stage3[parameter_name][:-1]
    lora = "mistral_model.base_model.model.model.layers.{}.lora_{}.default.weight"
    del world.stage3[lora.format("0.self_attn.q_proj", "A")]
    world.stage3[lora.format("1.mlp.down_proj", "B")] = torch.zeros(5, 4)
    world.stage3[lora.format("7.mlp.down_proj", "B")] = torch.zeros(5, 4)
    world.stage3["something.else"] = torch.zeros(1)
    world.write()
    with pytest.raises(DitLoraError) as raised:
        world.convert()
    rows, columns = world.stage3[parameter_name].shape
    assert sorted(str(raised.value).splitlines()[1:]) == sorted(
        [
            "  - stage3.pth: something.else: unknown",
            "  - stage3.pth: model.vision_encoder.encoder.pos_embed: not of this model",
            "  - stage2.pth: model.vision_encoder.encoder.class_embedding: not of this model",
            "  - stage3.pth: model.language_model.embed_tokens.lora_embedding_A.default: not of this model",
            f"  - stage3.pth: model.{parameter_name.replace('bert.', '')}: shape {(rows, columns)}, "
            f"the config makes {(rows + 1, columns)}",
            "  - model.qformer.encoder.layer.1.output.dense.bias: missing from every file",
            "  - LoRA of model.language_model.layers.0.self_attn.q_proj: B without its other half",
            "  - LoRA of model.language_model.layers.1.mlp.down_proj: "
            f"A (4, 48), B (5, 4) for a weight of {(TEXT, 48)}",
            "  - LoRA of model.language_model.layers.7.mlp.down_proj: the model has no such layer",
        ]
    )
    assert not (world.folder / "out").exists()


def test_missing_files_are_listed_at_once(world: World) -> None:
    (world.folder / "out").mkdir()
    with pytest.raises(DitLoraError) as raised:
        world.convert(stages=[], vision=world.folder / "no.pth", llm=world.folder / "nothing")
    message = str(raised.value)
    assert "out already exists" in message
    assert "no.pth" in message
    assert "nothing is not a folder with a language model" in message
    assert "give a file of stage 2 or later" in message


def test_a_language_model_of_another_kind_is_refused(world: World, tmp_path: Path) -> None:
    llama_world = World(tmp_path / "other", "llama")
    with pytest.raises(DitLoraError, match=r"are of a mistral language model .* is a llama"):
        world.convert(llm=llama_world.folder / "llm")
    torch.save(llama_world.stage2, world.folder / "llama2.pth")
    with pytest.raises(DitLoraError, match="of one language model") as raised:
        world.convert(stages=[world.folder / "llama2.pth", world.folder / "stage3.pth"])
    assert "llama2.pth: llama" in str(raised.value)


class Code:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.marker}",)

    def __init__(self, marker: Path) -> None:
        self.marker = marker


@pytest.mark.parametrize("kind", ["zip", "bare"])
def test_code_in_a_pickle_is_refused_and_not_run(kind: str, world: World, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    state = {"model": world.stage3, "config": Code(marker)}
    if kind == "zip":
        torch.save(state, world.folder / "stage3.pth")
    else:
        (world.folder / "stage3.pth").write_bytes(pickle.dumps({"config": Code(marker)}, protocol=2))
    with pytest.raises(DitLoraError, match=r"stage3\.pth holds .* not opened") as raised:
        world.convert()
    assert "\n" not in str(raised.value)
    assert ("posix.system" in str(raised.value)) == (kind == "zip")
    assert not marker.exists()


def test_files_that_hold_no_weights_are_refused(world: World) -> None:
    (world.folder / "stage2.pth").write_bytes((world.folder / "stage2.pth").read_bytes()[:3000])
    with pytest.raises(DitLoraError, match=r"stage2\.pth"):
        world.convert()
    torch.save({"model": {"query_tokens": 3}}, world.folder / "stage2.pth")
    with pytest.raises(DitLoraError, match=r"not tensors:\n  - query_tokens: int"):
        world.convert()
    torch.save([1, 2], world.folder / "stage2.pth")
    with pytest.raises(DitLoraError, match="no state dict; got a list"):
        world.convert()


def test_what_is_not_finite_is_listed_and_nothing_is_left(world: World) -> None:
    world.stage3["query_tokens"][0, 0, 0] = float("nan")
    world.stage3["mistral_proj.bias"][3] = float("inf")
    world.write()
    with pytest.raises(DitLoraError) as raised:
        world.convert(shard_bytes=50_000)
    assert str(raised.value).splitlines()[1:] == [
        "  - stage3.pth: model.query_tokens",
        "  - stage3.pth: model.projection.bias",
    ]
    assert not [path for path in world.folder.iterdir() if "out" in path.name]


def test_an_interrupted_conversion_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Path] = []

    def interrupted(tensors: Tensors, file: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, file, metadata=metadata)
        saved.append(file)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(convert, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.convert(shard_bytes=50_000)
    assert saved
    assert not [path for path in world.folder.iterdir() if "out" in path.name]
