"""Adapters of chat models: where they go, and that stock PEFT and Transformers load what is saved."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_adapter_checks import CONNECTOR, WITHIN, chat_model, logits, train_a_little
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_chat_models import MODELS, mistral
from torch import nn

from dit_lora.adapters.attach import attach_lora, is_lora_b
from dit_lora.adapters.diffusers_format import BASE_FILE, read_run_metadata
from dit_lora.adapters.groups import parameter_groups
from dit_lora.adapters.peft_format import (
    CHAT_ADAPTER_FILE,
    find_chat_adapter_file,
    load_chat_adapter,
    save_chat_adapter,
)
from dit_lora.config.optim import GroupConfig
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import CheckFailedError, DitLoraError

TARGETS = ("q_proj", "down_proj", "lm_head")


def adapted(name: str, **lora: Any) -> tuple[nn.Module, nn.Module]:
    """A frozen base and the same with an adapter, B still zero."""
    base = chat_model(name)
    model = copy.deepcopy(base)
    config = LoraConfig(**{"rank": 4, "alpha": 7, **lora})
    attach_lora(model, config, TARGETS, seed=0, submodules=WITHIN[name])
    return base, model


def loaded_by_peft(base: nn.Module, folder: Path) -> nn.Module:
    return PeftModel.from_pretrained(base, folder)


def loaded_by_transformers(base: nn.Module, folder: Path) -> nn.Module:
    info = base.load_adapter(str(folder))
    assert not info.missing_keys
    assert not info.unexpected_keys
    return base


def loaded_by_us(base: nn.Module, folder: Path) -> nn.Module:
    load_chat_adapter(base, folder)
    return base


LOADERS = [loaded_by_peft, loaded_by_transformers, loaded_by_us]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("load", LOADERS)
def test_every_loader_gives_the_trained_model_bit_for_bit(
    name: str, load: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    base, model = adapted(name, dropout=0.5)
    train_a_little(model)
    save_chat_adapter(model.train(), tmp_path / "out", {"base_model": "some/base"})
    before, expected = logits(base, name), logits(model.eval(), name)
    loaded_model = load(base.train(), tmp_path / "out")
    assert not loaded_model.training
    assert not torch.equal(before, expected)
    assert torch.equal(logits(loaded_model, name), expected)
    assert not any(parameter.requires_grad for parameter in loaded_model.parameters())


def test_the_folder_is_what_peft_itself_writes(tmp_path: Path) -> None:
    base, model = adapted("llava", targets=("q_proj",), dropout=0.5)
    train_a_little(model)
    save_chat_adapter(model, tmp_path / "out", {"base_model": "org/base", "revision": "abc"})
    PeftModel.from_pretrained(base, tmp_path / "out").save_pretrained(tmp_path / "peft")
    tensors, peft_tensors = (load_file(tmp_path / f / CHAT_ADAPTER_FILE) for f in ("out", "peft"))
    assert tensors.keys() == peft_tensors.keys()
    assert all(torch.equal(tensors[key], peft_tensors[key]) for key in tensors)
    configs = [json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("out", "peft")]
    assert configs[0] == configs[1]
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # safetensors writes 0600
    # Of versions that load an adapter in training mode, dropout would make each answer another.
    expected = {"r": 4, "lora_alpha": 7, "lora_dropout": 0.0, "inference_mode": True}
    expected |= {"base_model_name_or_path": "org/base", "revision": "abc"}
    assert expected.items() <= configs[0].items()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        CHAT_ADAPTER_FILE,
        "adapter_config.json",
    }


def test_trained_base_weights_are_beside_the_adapter(tmp_path: Path) -> None:
    """A connector, and a weight under an adapter, which PEFT has renamed."""
    base, model = adapted("llava")
    backbone = GroupConfig(lr=1e-5, modules=("lm_head.*",))
    patterns = {"connector": (CONNECTOR["llava"], "model.image_newline")}
    parameter_groups(model, adapter=1e-4, connector=1e-5, backbone=backbone, patterns=patterns)
    train_a_little(model)
    path = save_chat_adapter(model, tmp_path, {"steps": 3})
    assert path == tmp_path / CHAT_ADAPTER_FILE
    names = set(load_file(tmp_path / BASE_FILE))
    assert {"lm_head.weight", "model.image_newline"} < names
    assert len(names) == 6  # and the projector's two linear layers
    with safe_open(tmp_path / BASE_FILE, framework="pt") as file:
        assert json.loads(file.metadata()["dit_lora"]) == {"steps": 3}
    load_chat_adapter(base, tmp_path)
    assert torch.equal(logits(base, "llava"), logits(model, "llava"))


def test_base_weights_alone_have_no_peft_config(tmp_path: Path) -> None:
    model = chat_model("qwen")
    base = copy.deepcopy(model)
    adapter = adapted("qwen")[1]
    train_a_little(adapter)
    save_chat_adapter(adapter, tmp_path, {})  # an earlier run's, which must not stay
    parameter_groups(model, connector=1e-5, patterns={"connector": (CONNECTOR["qwen"],)})
    train_a_little(model)
    assert save_chat_adapter(model, tmp_path, {"steps": 3}) == tmp_path / BASE_FILE
    assert [path.name for path in tmp_path.iterdir()] == [BASE_FILE]
    assert read_run_metadata(find_chat_adapter_file(tmp_path)) == {"steps": 3}
    before = logits(base, "qwen")
    load_chat_adapter(base, tmp_path)
    assert torch.equal(logits(base, "qwen"), logits(model, "qwen"))
    assert not torch.equal(logits(base, "qwen"), before)


def test_plain_parameters_train_and_are_stored_and_buffers_are_not(tmp_path: Path) -> None:
    class Bridge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query_tokens = nn.Parameter(torch.ones(1, 3, 4, dtype=torch.bfloat16))
            self.proj = nn.Linear(4, 4).bfloat16()
            self.register_buffer("table", torch.ones(2, dtype=torch.bfloat16))

    model = Bridge().requires_grad_(False)
    groups = parameter_groups(model, connector=1e-5, patterns={"connector": ("query_tokens",)})
    assert [group["param_names"] for group in groups] == [["query_tokens"]]
    assert model.query_tokens.dtype is torch.float32
    assert model.query_tokens.requires_grad
    assert model.proj.weight.dtype is model.table.dtype is torch.bfloat16
    save_chat_adapter(model, tmp_path, {})
    assert set(load_file(tmp_path / BASE_FILE)) == {"query_tokens"}


def test_an_adapter_in_half_precision_stays_fp32(tmp_path: Path) -> None:
    base, model = adapted("mistral")
    train_a_little(model)
    save_chat_adapter(model, tmp_path, {})
    load_chat_adapter(base.bfloat16(), tmp_path)
    trained = {n: p for n, p in model.named_parameters() if ".lora_" in n}
    parameters = {n: p for n, p in base.named_parameters() if ".lora_" in n}
    assert all(torch.equal(trained[name], parameters[name]) for name in trained)
    assert base.model.norm.weight.dtype is torch.bfloat16


def test_unsound_adapters_are_refused_and_the_old_files_stay(tmp_path: Path) -> None:
    _, model = adapted("mistral")
    with pytest.raises(CheckFailedError, match="every B matrix is zero"):
        save_chat_adapter(model, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()
    train_a_little(model)
    path = save_chat_adapter(model, tmp_path / "out", {})
    before = path.read_bytes()
    next(p for n, p in model.named_parameters() if is_lora_b(n)).data[0, 0] = torch.nan
    with pytest.raises(CheckFailedError, match=r"q_proj\.lora_B\.weight"):
        save_chat_adapter(model, tmp_path / "out", {})
    assert path.read_bytes() == before
    with pytest.raises(CheckFailedError, match="no adapter and no trained weights"):
        save_chat_adapter(mistral().requires_grad_(False), tmp_path / "none", {})


def test_every_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    _, model = adapted("mistral")
    parameter_groups(model, adapter=1e-4, connector=1e-5, patterns={"connector": ("model.norm.*",)})
    train_a_little(model)
    path = save_chat_adapter(model, tmp_path, {})
    tensors = load_file(path)
    head = "base_model.model.lm_head.lora_"
    tensors["extra"] = tensors.pop(f"{head}A.weight")
    tensors[f"{head}B.weight"] = tensors[f"{head}B.weight"][:, :2].contiguous()
    save_file(tensors, path)
    with pytest.raises(DitLoraError) as error:
        load_chat_adapter(mistral(), tmp_path)
    assert [line.split(": ")[1] for line in str(error.value).split("\n")[1:]] == [
        "not in the model",
        "not in the file",
        "[64, 2] in the file, [64, 4] in the model",
    ]
    save_file({"model.norm.weight": torch.zeros(3)}, tmp_path / BASE_FILE)
    with pytest.raises(DitLoraError, match=r"model\.norm\.weight: \[3\] in the file, \[32\]"):
        load_chat_adapter(mistral(), tmp_path)
    with pytest.raises(DitLoraError, match=r"no adapter in .*none"):
        load_chat_adapter(mistral(), tmp_path / "none")


def test_an_adapter_for_other_layers_is_refused(tmp_path: Path) -> None:
    _, model = adapted("llava", targets=("model.vision_tower.encoder.layers.0.mlp.fc1",))
    train_a_little(model)
    save_chat_adapter(model, tmp_path, {})
    with pytest.raises(DitLoraError, match=r"adapter_config\.json does not fit MistralForCausalLM"):
        load_chat_adapter(mistral(), tmp_path)
