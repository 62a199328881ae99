"""A LoRA in a lower rank is the best one of that rank, for every input format."""

import json
from pathlib import Path

import pytest
import torch
from exported import Trained, deltas, trained
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE, read_run_metadata
from dit_lora.adapters.lora_mixins import with_lora
from dit_lora.cli.app import app
from dit_lora.errors import DitLoraError
from dit_lora.export.export import (
    ExportRequest,
    build_empty_model,
    export,
    export_and_report,
)
from dit_lora.export.low_rank import RankChoice
from dit_lora.export.low_rank_result import LowRankResult


def lowered(target: Path, one: Trained, out: Path, rank: RankChoice) -> LowRankResult:
    request = ExportRequest((target,), "diffusers", out, model=str(one.base), rank=rank)
    (result,) = export_and_report(request)
    return result


@pytest.mark.parametrize(
    ("family", "variant", "targets"),
    [
        ("cogvideox", "cogvideox-2b", ()),
        ("sana", "sana-600m", ("to_q", "ff.conv_inverted", "patch_embed.proj")),
        pytest.param("flux2", "flux2-klein", (), marks=pytest.mark.thorough),
        pytest.param("wan", "wan-2.1-t2v", (), marks=pytest.mark.thorough),
    ],
)
def test_the_update_is_the_nearest_of_that_rank(
    family: str,
    variant: str,
    targets: tuple[str, ...],
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    """By `torch.linalg.svd` of every product, alpha over rank in it; as the stock pipeline loads it."""
    trained_adapter = trained(family, tiny_checkpoints[variant], tmp_path / "adapter", targets=targets, rank=6)
    lowered_result = lowered(trained_adapter.folder, trained_adapter, tmp_path / "out", RankChoice(2))
    pipeline = with_lora(trained_adapter.checkpoint.sampler.pipeline(torch.float32, text=False))
    pipeline.load_lora_weights(tmp_path / "out")
    loaded_updates = {n: d for n, d in deltas(pipeline.transformer).items() if d.any()}
    expected = deltas(trained_adapter.model)
    assert loaded_updates.keys() == expected.keys()
    kept_energy = total_energy = 0.0
    for layer in lowered_result.layers:
        delta = expected[layer.name]
        u, s, v = torch.linalg.svd(delta.flatten(1), full_matrices=False)
        best = ((u[:, :2] * s[:2]) @ v[:2]).reshape(delta.shape)
        assert (loaded_updates[layer.name] - best).norm() <= 1e-6 * best.norm()
        assert layer.energy_share == pytest.approx((s[:2].square().sum() / s.square().sum()).item())
        assert layer.energy_share < 0.9
        kept_energy, total_energy = (
            kept_energy + s[:2].square().sum().item(),
            total_energy + s.square().sum().item(),
        )
    assert lowered_result.energy_share == pytest.approx(kept_energy / total_energy)
    metadata = read_run_metadata(tmp_path / "out" / ADAPTER_FILE)
    assert (metadata["rank"], metadata["alpha"], metadata["steps"]) == (2, 2, 3)
    assert metadata["resized"] == {
        "rank": 6,
        "alpha": 7,
        "energy": pytest.approx(kept_energy / total_energy),
    }


def test_peft_cuts_in_the_same_way(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """`add_weighted_adapter` with `svd`: of whole products, without their energy, and of two adapters at least."""
    trained_adapter = trained("cogvideox", tiny_checkpoints["cogvideox-2b"], tmp_path / "adapter", rank=6)
    lowered(trained_adapter.folder, trained_adapter, tmp_path / "out", RankChoice(3))
    tensors = load_file(tmp_path / "out" / ADAPTER_FILE)
    config = trained_adapter.model.peft_config["default"]
    assert isinstance(config, LoraConfig)
    wrapped = PeftModel(build_empty_model(trained_adapter.checkpoint.denoiser), config, adapter_name="six")
    parameters = dict(trained_adapter.model.named_parameters())
    with torch.no_grad():
        for name, parameter in wrapped.base_model.model.named_parameters():
            if ".six." in name:
                parameter.copy_(parameters[name.replace(".six.", ".default.")])
    wrapped.base_model.add_weighted_adapter(["six", "six"], [0.5, 0.5], "three", combination_type="svd", svd_rank=3)
    for name in deltas(trained_adapter.model):
        layer = wrapped.base_model.model.get_submodule(name)
        peft_delta = layer.get_delta_weight("three").double()
        a, b = (tensors[f"transformer.{name}.lora_{side}.weight"].double() for side in "AB")
        assert peft_delta.norm() > 0.1
        assert (b @ a - peft_delta).norm() <= 1e-5 * peft_delta.norm()


def test_forms_of_other_trainers_and_base_weights(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """ComfyUI's, kohya's and PEFT's formats all give the file of Diffusers' format; other trained weights stay."""
    base = tiny_checkpoints["cogvideox-2b"]
    trained_adapter = trained("cogvideox", base, tmp_path / "adapter", rank=6)
    lowered(trained_adapter.folder, trained_adapter, tmp_path / "out", RankChoice(2))
    expected = load_file(tmp_path / "out" / ADAPTER_FILE)
    for form in ("comfyui", "kohya", "peft"):
        source = export(ExportRequest((trained_adapter.folder,), form, tmp_path / form, model=str(base)))
        target = source if form == "peft" else source / f"{form}.safetensors"
        lowered(target, trained_adapter, tmp_path / f"{form}-2", RankChoice(2))
        tensors = load_file(tmp_path / f"{form}-2" / ADAPTER_FILE)
        assert tensors.keys() == expected.keys()
        for name in tensors:
            torch.testing.assert_close(tensors[name].abs(), expected[name].abs())
    wide_adapter = trained("cogvideox", base, tmp_path / "wide", rank=6, connector=True)
    lowered(wide_adapter.folder, wide_adapter, tmp_path / "wide-2", RankChoice(2))
    before, after = (load_file(f / BASE_FILE) for f in (wide_adapter.folder, tmp_path / "wide-2"))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_each_layers_own_rank_by_energy(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    trained_adapter = trained("cogvideox", tiny_checkpoints["cogvideox-2b"], tmp_path / "adapter", rank=8)
    lowered_result = lowered(trained_adapter.folder, trained_adapter, tmp_path / "out", RankChoice(energy=0.8))
    assert all(0.8 <= layer.energy_share < 1 for layer in lowered_result.layers)
    lower_ranks = {layer.name: layer.factors.rank - 1 for layer in lowered_result.layers}
    for name, delta in deltas(trained_adapter.model).items():
        energies = torch.linalg.svdvals(delta).square()
        assert energies[: lower_ranks[name]].sum() < 0.8 * energies.sum()
    assert len(set(lower_ranks.values())) > 1
    metadata = read_run_metadata(tmp_path / "out" / ADAPTER_FILE)
    ranks = {metadata["rank"], *metadata["rank_pattern"].values()}
    assert ranks == {layer.factors.rank for layer in lowered_result.layers}


def test_a_sum_is_lowered_and_written_in_any_form(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    base = tiny_checkpoints["cogvideox-2b"]
    trained_adapter = trained("cogvideox", base, tmp_path / "one", rank=4)
    second_adapter = trained("cogvideox", base, tmp_path / "two", rank=3, seed=2)
    request = ExportRequest(
        (trained_adapter.folder, second_adapter.folder),
        "comfyui",
        tmp_path / "out",
        weights=(1.0, -0.5),
        model=str(base),
        rank=RankChoice(2),
    )
    (result,) = export_and_report(request)
    first_deltas, second = deltas(trained_adapter.model), deltas(second_adapter.model)
    assert {layer.name for layer in result.layers} == first_deltas.keys()
    for layer in result.layers:
        u, s, v = torch.linalg.svd(first_deltas[layer.name] - 0.5 * second[layer.name])
        best = (u[:, :2] * s[:2]) @ v[:2]
        update = layer.factors.b.double() @ layer.factors.a.double()
        assert (update - best).norm() <= 1e-6 * best.norm()
    file = tmp_path / "out" / "out.safetensors"
    assert read_run_metadata(file)["resized"]["rank"] == 7
    assert {len(t) for n, t in load_file(file).items() if ".lora_A." in n} == {2}


def test_a_layer_without_an_update_stays_without_one(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    trained_adapter = trained("cogvideox", tiny_checkpoints["cogvideox-2b"], tmp_path / "adapter", rank=4)
    file = trained_adapter.folder / ADAPTER_FILE
    with safe_open(file, "pt") as adapter_file:
        metadata = adapter_file.metadata()
    tensors = load_file(file)
    name = next(name for name in tensors if ".lora_B." in name)
    save_file({**tensors, name: torch.zeros_like(tensors[name])}, file, metadata=metadata)
    result = lowered(trained_adapter.folder, trained_adapter, tmp_path / "out", RankChoice(2))
    (layer,) = [layer for layer in result.layers if not layer.total_energy]
    assert layer.energy_share == 1
    assert f"  {layer.name}: 100%, rank 2" in list(result.format_lines())


def test_what_has_no_lower_rank_is_refused_in_one_line(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    base = tiny_checkpoints["cogvideox-2b"]
    trained_adapter = trained("cogvideox", base, tmp_path / "adapter")

    def refused(target: Path, *more: object) -> str:
        arguments = ["export", target, "--model", base, *more]
        result = CliRunner().invoke(app, [str(entry) for entry in arguments])
        assert isinstance(result.exception, DitLoraError), result.output
        return str(result.exception)

    output_folder = ("--out", tmp_path / "out")
    assert "--rank 4 lowers nothing: the ranks of " in refused(trained_adapter.folder, "--rank", 4, *output_folder)
    assert "does not exist" in refused(tmp_path / "gone", "--rank", 2, *output_folder)
    (tmp_path / "bare").mkdir()
    assert "no adapter in" in refused(tmp_path / "bare", "--rank", 2, *output_folder)
    assert "is a whole pipeline, so there is nothing to export" in refused(base, "--rank", 2, *output_folder)
    stray_tensors = {
        **load_file(trained_adapter.folder / ADAPTER_FILE),
        "gone.lora_A.weight": torch.ones(4, 8),
    }
    save_file(stray_tensors, tmp_path / "stray.safetensors")
    assert "layers are not in the model" in refused(tmp_path / "stray.safetensors", "--rank", 2, *output_folder)
    assert "already exists" in refused(trained_adapter.folder, "--rank", 2, "--out", base)
    merged = refused(trained_adapter.folder, "--rank", 2, "--to", "merged", *output_folder)
    assert "does not apply to a merged checkpoint" in merged
    assert refused(trained_adapter.folder, "--energy", 0.9, *output_folder) == "--energy needs --rank"
    assert refused(trained_adapter.folder, "--json", *output_folder) == "--json needs --rank"
    dora = trained("cogvideox", base, tmp_path / "dora", kind="dora")
    assert "is of the kind dora" in refused(dora.folder, "--rank", 2, *output_folder)
    assert not (tmp_path / "out").exists()
    result = CliRunner().invoke(
        app,
        [
            "export",
            str(trained_adapter.folder),
            "--model",
            str(base),
            "--rank",
            "2",
            *map(str, output_folder),
            "--json",
        ],
        catch_exceptions=False,
    )
    (record,) = json.loads(result.stdout)
    assert len(record["layers"]) == len(deltas(trained_adapter.model))
