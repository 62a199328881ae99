"""What is saved is sound, whole and says its scale."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import CogVideoXPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dit_lora.adapters.attach import attach_lora, is_lora_b
from dit_lora.adapters.diffusers_format import (
    ADAPTER_FILE,
    BASE_FILE,
    read_run_metadata,
    save_adapter,
    save_pipeline,
)
from dit_lora.adapters.groups import parameter_groups
from dit_lora.adapters.load import load_adapter
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.families import get_family

FAMILY = get_family("cogvideox")


@pytest.fixture
def transformer(tiny_checkpoints: dict[str, Path]) -> torch.nn.Module:
    path = str(tiny_checkpoints["cogvideox-5b"])
    model = FAMILY.open(ModelConfig(family="cogvideox", path=path)).denoiser.load_transformer(torch.float32)
    attach_lora(model, LoraConfig(rank=4, alpha=7), FAMILY.lora_targets, seed=0)
    return model


def train_a_little(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


def test_rank_alpha_and_provenance_travel_in_the_header(transformer: torch.nn.Module, tmp_path: Path) -> None:
    train_a_little(transformer)
    path = save_adapter(transformer, CogVideoXPipeline, tmp_path, {"steps": 5})
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["lora_adapter_metadata"])
    assert config["transformer.r"] == 4
    assert config["transformer.lora_alpha"] == 7
    assert read_run_metadata(path) == {"steps": 5}
    assert [p.name for p in tmp_path.iterdir()] == [ADAPTER_FILE]
    (tmp_path / "new").touch()
    assert path.stat().st_mode == (tmp_path / "new").stat().st_mode  # safetensors writes 0600


def test_dropout_of_training_is_off_in_a_stock_pipeline(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Diffusers loads adapters in training mode: with the trained dropout, samples would be random."""
    path = tiny_checkpoints["cogvideox-2b"]
    model = FAMILY.open(ModelConfig(family="cogvideox", path=str(path))).denoiser.load_transformer(torch.float32)
    attach_lora(model, LoraConfig(rank=4, dropout=0.5), FAMILY.lora_targets, seed=0)
    train_a_little(model)
    save_adapter(model, CogVideoXPipeline, tmp_path, {})
    pipeline = CogVideoXPipeline.from_pretrained(path)
    pipeline.load_lora_weights(tmp_path)
    inputs = {
        "hidden_states": torch.randn(1, 3, 4, 8, 12),
        "encoder_hidden_states": torch.randn(1, 226, 32),
        "timestep": torch.tensor([500]),
    }
    with torch.no_grad():
        assert torch.equal(pipeline.transformer(**inputs).sample, model.eval()(**inputs).sample)


def test_an_untrained_adapter_is_refused(transformer: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(CheckFailedError, match="every B matrix is zero"):
        save_adapter(transformer, CogVideoXPipeline, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_poisoned_adapter_is_refused_and_the_old_one_stays(
    transformer: torch.nn.Module, tmp_path: Path, value: float
) -> None:
    train_a_little(transformer)
    path = save_adapter(transformer, CogVideoXPipeline, tmp_path, {})
    before = path.read_bytes()
    name, parameter = next((n, p) for n, p in transformer.named_parameters() if is_lora_b(n))
    parameter.data[0, 0] = value
    with pytest.raises(CheckFailedError) as error:
        save_adapter(transformer, CogVideoXPipeline, tmp_path, {})
    assert name.replace(".default.", ".") in str(error.value)
    assert path.read_bytes() == before


def test_trained_base_weights_are_stored_beside_and_loaded_back(
    transformer: torch.nn.Module, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A connector group changes weights that a LoRA file cannot hold."""
    parameter_groups(transformer, adapter=1e-4, connector=1e-5, patterns=FAMILY.group_patterns)
    train_a_little(transformer)
    save_adapter(transformer, CogVideoXPipeline, tmp_path, {})
    names = set(load_file(tmp_path / BASE_FILE))
    assert "proj_out.weight" in names
    assert not any(name.startswith("transformer_blocks") for name in names)

    pipeline = CogVideoXPipeline.from_pretrained(tiny_checkpoints["cogvideox-5b"])
    load_adapter(pipeline, tmp_path)
    inputs = {
        "hidden_states": torch.randn(1, 3, 4, 4, 6),
        "encoder_hidden_states": torch.randn(1, 226, 32),
        "timestep": torch.tensor([500]),
        "image_rotary_emb": pipeline._prepare_rotary_positional_embeddings(32, 48, 3, "cpu"),
    }
    with torch.no_grad():
        expected, actual = (m(**inputs).sample for m in (transformer, pipeline.transformer))
    assert torch.equal(expected, actual)


def test_a_poisoned_base_weight_is_refused(transformer: torch.nn.Module, tmp_path: Path) -> None:
    parameter_groups(transformer, adapter=1e-4, connector=1e-5, patterns=FAMILY.group_patterns)
    train_a_little(transformer)
    transformer.proj_out.weight.data[0, 0] = torch.nan
    with pytest.raises(CheckFailedError, match=r"proj_out\.weight"):
        save_adapter(transformer, CogVideoXPipeline, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_one_matrix_that_did_not_move_is_no_reason_to_refuse(transformer: torch.nn.Module, tmp_path: Path) -> None:
    train_a_little(transformer)
    next(p for n, p in transformer.named_parameters() if is_lora_b(n)).data.zero_()
    assert save_adapter(transformer, CogVideoXPipeline, tmp_path, {}).is_file()


def test_base_weights_of_another_model_are_refused(
    transformer: torch.nn.Module, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    train_a_little(transformer)
    save_adapter(transformer, CogVideoXPipeline, tmp_path, {})
    save_file({"decoder.weight": torch.zeros(2)}, tmp_path / BASE_FILE)
    pipeline = CogVideoXPipeline.from_pretrained(tiny_checkpoints["cogvideox-5b"])
    with pytest.raises(DitLoraError, match=r"the model has no such weights\n  - decoder\.weight"):
        load_adapter(pipeline, tmp_path)


def test_base_weights_of_an_earlier_run_do_not_stay_behind(transformer: torch.nn.Module, tmp_path: Path) -> None:
    train_a_little(transformer)
    (tmp_path / BASE_FILE).write_bytes(b"old")
    save_adapter(transformer, CogVideoXPipeline, tmp_path, {})
    assert not (tmp_path / BASE_FILE).exists()


def test_a_file_that_is_no_adapter_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DitLoraError, match=r"cannot read \S+x\.safetensors: .*not a safetensors file"):
        read_run_metadata(tmp_path / "x.safetensors")


def test_a_whole_pipeline_replaces_an_earlier_one_and_never_with_bad_weights(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    base = tiny_checkpoints["cogvideox-5b"]
    model = FAMILY.open(ModelConfig(family="cogvideox", path=str(base))).denoiser.load_transformer(torch.float32)
    output_dir = tmp_path / "model"
    weight = model.get_parameter("proj_out.weight")
    for value in (1.0, 2.0):
        weight.data.fill_(value)
        assert save_pipeline(model, base, output_dir, {"steps": 3}, {"trained": value}) == output_dir
    loaded_pipeline = CogVideoXPipeline.from_pretrained(output_dir)
    assert (loaded_pipeline.transformer.proj_out.weight == 2).all()
    assert json.loads((output_dir / "model_index.json").read_text())["trained"] == 2.0
    assert json.loads((output_dir / "dit_lora.json").read_text()) == {"steps": 3}
    assert all(path.stat().st_mode & 0o044 for path in output_dir.rglob("*.safetensors"))
    modified_times = {path.relative_to(output_dir): path.stat().st_mtime_ns for path in output_dir.rglob("*")}
    weight.data[0, 0] = torch.nan
    with pytest.raises(CheckFailedError, match=r"proj_out\.weight"):
        save_pipeline(model, base, output_dir, {}, {})
    assert modified_times == {path.relative_to(output_dir): path.stat().st_mtime_ns for path in output_dir.rglob("*")}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
