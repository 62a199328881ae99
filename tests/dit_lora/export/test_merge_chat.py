"""A merged checkpoint is the adapted model, and needs only Transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_adapter_checks import CONNECTOR, WITHIN, chat_model, logits, train_a_little
from safetensors.torch import load_file, save_file
from tiny_chat_models import MODELS

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import parameter_groups
from dit_lora.adapters.peft_format import load_chat_adapter, save_chat_adapter
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.export.merge_chat import merge_adapter


def saved_base(name: str, out: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A checkpoint in shards, with a tokenizer's file and a folder, and its model, frozen."""
    model = chat_model(name).to(dtype)
    model.save_pretrained(out, max_shard_size="20KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    (out / "tokenizer.json").write_text("{}")
    (out / "parts").mkdir()
    (out / "parts" / "vocab.txt").write_text("a")
    # As Vicuna's: Transformers reads it and refuses to write it.
    (out / "generation_config.json").write_text('{"temperature": 0.9, "eos_token_id": 2}')
    return model


def trained(model: Any, name: str, out: Path, scale: float = 0.3) -> Any:
    """An adapter with alpha != rank in the language model and its head, and a connector, saved."""
    lora = LoraConfig(rank=4, alpha=7, targets=("v_proj", "lm_head"))
    attach_lora(model, lora, (), seed=0, submodules=WITHIN[name])
    parameter_groups(model, adapter=1e-4, connector=1e-5, patterns={"connector": (CONNECTOR[name],)})
    train_a_little(model, scale)
    save_chat_adapter(model, out, {"steps": 3})
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("model*.safetensors")) for k, v in load_file(f).items()}


@pytest.mark.parametrize("name", MODELS)
def test_stock_transformers_loads_the_adapted_model(name: str, tmp_path: Path) -> None:
    base, output_folder, messages = tmp_path / "base", tmp_path / "out", list[str]()
    model = saved_base(name, base)
    before = logits(model, name)
    expected = logits(trained(model, name, tmp_path / "adapter"), name)
    # None of ours is a class of Transformers.
    merge_options = {"model_class": type(model)} if name == "videochat2" else {}
    assert (
        merge_adapter(tmp_path / "adapter", base, output_folder, **merge_options, on_progress=messages.append)
        == output_folder
    )
    loaded_model, info = type(model).from_pretrained(output_folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(loaded_model.eval(), name), expected, rtol=1e-5, atol=1e-5)
    assert (before - expected).abs().max() > 0.1
    assert messages == ["loading base in float32", "merging 3 layers", f"writing {output_folder}"]
    assert json.loads((output_folder / "dit_lora.json").read_text()) == {"steps": 3}
    assert {p.name for p in output_folder.iterdir() if "model" not in p.name} == {
        *(p.name for p in base.iterdir() if "model" not in p.name),
        "dit_lora.json",
    }
    assert (output_folder / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert {k: v.dtype for k, v in stored(output_folder).items()} == {k: v.dtype for k, v in stored(base).items()}


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    """Of W + s B A in fp64, not of W + the rounded product."""
    base = tmp_path / "base"
    model = saved_base("mistral", base, torch.bfloat16)
    trained(model, "mistral", tmp_path / "adapter", scale=0.05)
    merge_adapter(tmp_path / "adapter", base, tmp_path / "out")
    old, new = stored(base), stored(tmp_path / "out")
    lora = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    num_rounded_once = num_rounded_twice = 0
    for layer in ("model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj", "lm_head"):
        a, b = (lora[f"base_model.model.{layer}.lora_{x}.weight"].double() for x in "AB")
        weight, delta = old[f"{layer}.weight"].double(), 7 / 4 * b @ a
        merged = new[f"{layer}.weight"]
        num_rounded_once += int((merged != (weight + delta).bfloat16()).sum())
        num_rounded_twice += int((merged != (weight + delta.bfloat16().double()).bfloat16()).sum())
    assert num_rounded_once <= 3  # of 4096, where fp32 and fp64 are on two sides of a tie
    assert num_rounded_twice > 100
    untouched = [k for k in old if "v_proj" not in k and k not in ("lm_head.weight", "model.norm.weight")]
    assert all(torch.equal(old[key], new[key]) for key in untouched)


def test_base_weights_alone_are_merged_too(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = saved_base("llava", base)
    parameter_groups(model, connector=1e-5, patterns={"connector": (CONNECTOR["llava"],)})
    train_a_little(model)
    save_chat_adapter(model, tmp_path / "adapter", {})
    merge_adapter(tmp_path / "adapter", base, tmp_path / "out")
    loaded_model = type(model).from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(loaded_model, "llava"), logits(model, "llava"))


def test_a_checkpoint_in_two_dtypes_loses_nothing(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = saved_base("llava", base)
    trained(model, "llava", tmp_path / "adapter")
    for file in base.glob("model-*.safetensors"):
        tensors = load_file(file)
        mixed_tensors = {k: v.bfloat16() if "embed_tokens" in k else v for k, v in tensors.items()}
        save_file(mixed_tensors, file, metadata={"format": "pt"})
    (base / "config.json").write_text(
        json.dumps({**json.loads((base / "config.json").read_text()), "dtype": "bfloat16"})
    )
    merge_adapter(tmp_path / "adapter", base, tmp_path / "out")
    old, new = stored(base), stored(tmp_path / "out")
    assert {tensor.dtype for tensor in new.values()} == {torch.float32}
    vision = [key for key in old if "vision" in key]
    assert vision
    assert all(torch.equal(old[key], new[key]) for key in vision)


def test_what_cannot_be_merged_leaves_nothing(tmp_path: Path) -> None:
    base, adapter, output_folder = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    model = saved_base("mistral", base, torch.float16)
    trained(model, "mistral", adapter, scale=3e3)
    with pytest.raises(CheckFailedError, match=r"not finite once merged in torch\.float16\n  - .*v_proj"):
        merge_adapter(adapter, base, output_folder)
    lora = load_file(adapter / "adapter_model.safetensors")
    lora.popitem()
    save_file(lora, adapter / "adapter_model.safetensors")
    with pytest.raises(DitLoraError, match="belongs to a different model"):
        merge_adapter(adapter, base, output_folder)
    config = json.loads((base / "config.json").read_text())
    for config_change, expected_message in (
        ({"architectures": ["NoSuchModel"]}, "Transformers has no class NoSuchModel"),
        ({"quantization_config": {}}, "is quantised"),
    ):
        (base / "config.json").write_text(json.dumps({**config, **config_change}))
        with pytest.raises(DitLoraError, match=expected_message):
            merge_adapter(adapter, base, output_folder)
    with pytest.raises(DitLoraError, match="is quantised"):  # whatever the family's class is
        merge_adapter(adapter, base, output_folder, model_class=type(model))
    (base / "config.json").write_text(json.dumps(config))
    for file in base.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(DitLoraError, match=r"needs model\*\.safetensors in fp32.*got none"):
        merge_adapter(adapter, base, output_folder)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}
    output_folder.mkdir()
    with pytest.raises(DitLoraError, match="out already exists"):
        merge_adapter(adapter, base, output_folder)


def test_a_failure_while_writing_leaves_no_folder(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    trained(saved_base("llava", base), "llava", adapter)
    (tmp_path / "outside.json").write_text("{}")
    (base / "tokenizer_config.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(DitLoraError, match="links to files outside of it are not followed"):
        merge_adapter(adapter, base, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "outside.json"}


@pytest.mark.parametrize(
    "kind",
    [
        "dora",
        *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("lokr", "loha", "oft")),
    ],
)
def test_every_kind_of_adapter_is_merged_and_loaded_as_trained(kind: Any, tmp_path: Path) -> None:
    name, base, output_folder = next(iter(MODELS)), tmp_path / "base", tmp_path / "out"
    model = saved_base(name, base)
    kind_options: dict[str, Any] = {"block_size": 4} if kind == "oft" else {"rank": 3, "alpha": 5}
    lora = LoraConfig(kind=kind, targets=("v_proj", "o_proj"), **kind_options)
    before = logits(model, name)
    attach_lora(model, lora, (), seed=0, submodules=WITHIN[name])
    torch.testing.assert_close(logits(model, name), before)
    train_a_little(model, 0.3)
    save_chat_adapter(model, tmp_path / "adapter", {"steps": 3})
    expected = logits(model, name)
    assert (before - expected).abs().max() > 0.05
    merge_options = {"model_class": type(model)} if name == "videochat2" else {}
    merge_adapter(tmp_path / "adapter", base, output_folder, **merge_options)
    merged = type(model).from_pretrained(output_folder).eval()
    torch.testing.assert_close(logits(merged, name), expected, rtol=1e-4, atol=1e-4)
    fresh_model = type(model).from_pretrained(base)
    load_chat_adapter(fresh_model, tmp_path / "adapter")
    torch.testing.assert_close(logits(fresh_model.eval(), name), expected)
