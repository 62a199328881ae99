"""A merged pipeline is base plus adapter, and needs only Diffusers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from exported import Trained, deltas, trained
from safetensors.torch import load_file, save_file

from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.export import merge_pipeline
from dit_lora.export.export import ExportRequest, export
from dit_lora.models.video_dit_pipeline import VideoDiTPipeline

WEIGHTS = "diffusion_pytorch_model.safetensors"
MODELS = (
    ("cogvideox", "cogvideox-2b"),
    ("sana", "sana-600m"),
    *(
        pytest.param(*model, marks=pytest.mark.thorough)
        for model in (
            ("cogvideox", "cogvideox-1.5-i2v"),
            ("sana", "sana-fp16"),
            ("sana_video", "sana-video"),
            ("flux", "flux-dev"),
            ("flux2", "flux2-klein"),
            ("flux2", "flux2-dev"),
            ("qwen_image", "qwen-image"),
            ("ltx_video", "ltx-video"),
            ("sd3", "sd3.5-medium"),
            ("dit", "dit-tiny"),
            ("latte", "latte"),
            ("video_dit", "video-dit-class"),
            ("z_image", "z-image"),
        )
    ),
)


def merged(one: Trained, **kwargs: Any) -> Path:
    output_folder = one.folder.parent / "merged"
    return export(ExportRequest((one.folder,), "merged", output_folder, model=str(one.base), **kwargs))


def copied(base: Path, out: Path, dtype: torch.dtype = torch.float32, shards: int = 1) -> Path:
    """The checkpoint with its transformer in that dtype, in so many files."""
    shutil.copytree(base, out)
    file = out / "transformer" / WEIGHTS
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    if shards == 1:
        save_file(tensors, file, metadata={"format": "pt"})
        return out
    file.unlink()
    names = {n: f"diffusion_pytorch_model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)}
    index = {name: names[number % shards] for number, name in enumerate(tensors)}
    for filename in names.values():
        part = {name: tensors[name] for name in tensors if index[name] == filename}
        save_file(part, file.with_name(filename), metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    weight_index = {"metadata": {"total_size": size}, "weight_map": index}
    file.with_name(f"{WEIGHTS}.index.json").write_text(json.dumps(weight_index))
    return out


def stored(folder: Path) -> dict[str, torch.Tensor]:
    files = (folder / "transformer").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_stock_diffusers_loads_base_plus_adapter(
    family: str, variant: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    base = tiny_checkpoints[variant]
    trained_adapter = trained(family, base, tmp_path / "adapter", connector=True)
    output_folder = merged(trained_adapter)
    kind = VideoDiTPipeline if family == "video_dit" else DiffusionPipeline
    pipeline: Any = kind.from_pretrained(output_folder)
    assert type(pipeline) is trained_adapter.checkpoint.info.pipeline_class
    updates, names = deltas(trained_adapter.model), dict(trained_adapter.model.named_parameters())
    old, new = stored(base), stored(output_folder)
    assert old.keys() == new.keys()
    changed_names = set()
    for name, tensor in new.items():
        parameter = names.get(name, names.get(f"{name.removesuffix('.weight')}.base_layer.weight"))
        exact = old[name].double() if parameter is None else parameter.double()
        if name.removesuffix(".weight") in updates:
            exact = exact + updates[name.removesuffix(".weight")]
        assert tensor.dtype == old[name].dtype
        torch.testing.assert_close(tensor, exact.to(tensor.dtype), msg=lambda m, n=name: f"{n}: {m}")
        if not torch.equal(tensor, old[name]):
            changed_names.add(name)
    assert {f"{name}.weight" for name in updates} < changed_names
    loaded_tensors = pipeline.transformer.state_dict()
    assert all(torch.equal(loaded_tensors[name], tensor.float()) for name, tensor in new.items())
    base_files = {p.relative_to(base) for p in base.rglob("*") if p.is_file()}
    assert {p.relative_to(output_folder) for p in output_folder.rglob("*") if p.is_file()} == base_files | {
        Path("dit_lora.json")
    }
    metadata = json.loads((output_folder / "dit_lora.json").read_text())
    assert metadata["exported"] == {"to": "merged"}
    assert metadata["steps"] == 3


def test_half_precision_in_several_files_is_rounded_once(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """W + s B A is summed in fp64 and rounded once; weights without an adapter keep their bytes."""
    base = copied(tiny_checkpoints["cogvideox-2b"], tmp_path / "base", torch.bfloat16, shards=2)
    save_file({}, base / "transformer" / "diffusion_pytorch_model.fp16.safetensors")  # a variant
    trained_adapter = trained("cogvideox", base, tmp_path / "adapter", scale=0.05)
    output_folder = merged(trained_adapter)
    assert {p.name for p in (output_folder / "transformer").iterdir()} == {
        "config.json",
        f"{WEIGHTS}.index.json",
        "diffusion_pytorch_model-00001-of-00002.safetensors",
        "diffusion_pytorch_model-00002-of-00002.safetensors",
    }
    old, new, updates = stored(base), stored(output_folder), deltas(trained_adapter.model)
    num_rounded_once = num_rounded_twice = 0
    for layer, delta in updates.items():
        weight = old[f"{layer}.weight"].double()
        merged_weight = new[f"{layer}.weight"]
        num_rounded_once += int((merged_weight != (weight + delta).bfloat16()).sum())
        num_rounded_twice += int((merged_weight != (weight + delta.bfloat16().double()).bfloat16()).sum())
    assert num_rounded_once <= 20  # of 32,768, where fp32 and fp64 are on two sides of a tie
    assert num_rounded_twice > 200
    assert all(torch.equal(old[n], new[n]) for n in old if n.removesuffix(".weight") not in updates)


def test_classes_that_training_added_are_in_the_pipeline(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    base = tiny_checkpoints["dit-tiny"]
    trained_adapter = trained("dit", base, tmp_path / "adapter")
    rows = {name: t for name, t in stored(base).items() if "embedding_table" in name}
    count = len(next(iter(rows.values())))
    labels = json.loads((base / "model_index.json").read_text())["id2label"]
    grown = {**labels, str(count): "kitten"}  # behind the null class
    table_metadata = {"family": "dit", "index": {"id2label": grown}}
    file = trained_adapter.folder / "pytorch_lora_weights.safetensors"
    metadata = {"format": "pt", "dit_lora": json.dumps(table_metadata)}
    tables = {name: torch.randn(count + 1, table.shape[1]) for name, table in rows.items()}
    save_file(tables, trained_adapter.folder / "base_weights.safetensors", metadata=metadata)
    save_file(load_file(file), file, metadata=metadata)
    output_folder = merged(trained_adapter)
    pipeline: Any = DiffusionPipeline.from_pretrained(output_folder)
    assert pipeline.labels["kitten"] == count
    assert pipeline.transformer.config.num_embeds_ada_norm == count
    state = pipeline.transformer.state_dict()
    assert all(torch.equal(state[name], table) for name, table in tables.items())


def test_what_cannot_be_merged_leaves_nothing(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = copied(tiny_checkpoints["cogvideox-2b"], tmp_path / "base", torch.float16)
    trained_adapter = trained("cogvideox", base, tmp_path / "adapter", scale=500)
    with pytest.raises(CheckFailedError, match=r"not finite once merged\n  - .*attn1"):
        merged(trained_adapter)
    file = base / "transformer" / WEIGHTS
    weights = load_file(file)
    fp8_weights = {n: t.to(torch.float8_e4m3fn) if "to_q" in n else t for n, t in weights.items()}
    save_file(fp8_weights, file, metadata={"format": "pt"})
    with pytest.raises(DitLoraError, match=r"in fp32, bf16 or fp16, to merge into\n  - .*F8_E4M3"):
        merged(trained_adapter)
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((base / "transformer" / "config.json").read_text())
    quantized_config = {**config, "quantization_config": {"quant_method": "bitsandbytes"}}
    (base / "transformer" / "config.json").write_text(json.dumps(quantized_config))
    with pytest.raises(DitLoraError, match="is quantised; give --model the checkpoint"):
        merged(trained_adapter)
    (base / "transformer" / "config.json").write_text(json.dumps(config))
    torn_config = base / "text_encoder" / "config.json"
    whole = torn_config.read_bytes()
    torn_config.write_bytes(whole[:-9])
    with pytest.raises(DitLoraError, match=r"is damaged; .* again\n  - text_encoder/config.json: "):
        merged(trained_adapter)
    torn_config.write_bytes(whole)
    small = trained("cogvideox", base, tmp_path / "adapter", scale=0.05)
    monkeypatch.setattr(merge_pipeline, "_merge_tensor", lambda _name, tensor, *_: tensor)
    with pytest.raises(CheckFailedError, match=r"are not base plus adapter.*\n  - .*to_k\.weight"):
        merged(small)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}
