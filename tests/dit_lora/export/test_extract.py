"""The difference of a merge and its base is the adapter that was merged."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import Deltas, Trained, deltas, trained
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_steps import TinyStep, tiny_step
from torch import nn
from typer.testing import CliRunner

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, read_run_metadata
from dit_lora.adapters.lora_mixins import with_lora
from dit_lora.cli.app import app
from dit_lora.errors import DitLoraError
from dit_lora.export.export import ExportRequest, export
from dit_lora.export.extract import ExtractRequest, extract
from dit_lora.export.low_rank import RankChoice

WEIGHTS = "diffusion_pytorch_model.safetensors"
MODELS = (
    ("cogvideox", "cogvideox-2b", ()),
    # A convolution of 1x1, and one of 3x3 that is turned into no linear layer.
    ("sana", "sana-600m", ("to_q", "to_out.0", "ff.conv_inverted", "patch_embed.proj")),
    ("flux2", "flux2-klein", ()),
    ("wan", "wan-2.1-t2v", ()),
    *(
        pytest.param(*model, (), marks=pytest.mark.thorough)
        for model in (
            ("chroma", "chroma"),
            ("ernie_image", "ernie-image"),
            ("ideogram4", "ideogram-4"),
            ("anima", "anima"),
            ("flux", "flux-dev"),
            ("hunyuan_video15", "hunyuan-video-1.5"),
            ("kandinsky5", "kandinsky-5-t2v"),
            ("krea2", "krea2-raw"),
            ("ltx_video", "ltx-video"),
            ("ltx2", "ltx-2"),
            ("qwen_image", "qwen-image"),
            ("qwen_image21", "qwen-image-2.1"),
            ("sd3", "sd3.5-medium"),
            ("z_image", "z-image"),
            ("latte", "latte"),
            ("video_dit", "video-dit-text"),
        )
    ),
)
Files = Callable[[Path, Callable[[dict[str, torch.Tensor]], object]], Path]


def merged(one: Trained, part: str = "") -> Path:
    output_folder = one.folder.parent / f"{one.folder.name}-merged"
    return export(ExportRequest((one.folder,), "merged", output_folder, model=str(one.base)))


def extracted(tuned: object, base: object, out: Path, rank: int = 4, **kwargs: Any) -> Any:
    (extraction,) = extract(ExtractRequest(str(tuned), str(base), out, RankChoice(rank), **kwargs))
    return extraction


def assert_near(found: Deltas, expected: Deltas, within: float = 1e-5) -> None:
    """Each layer's update, by the norm of what it differs."""
    assert found.keys() == expected.keys()
    for name, delta in expected.items():
        assert delta.norm() > 1e-2, name
        assert (found[name] - delta).norm() <= within * delta.norm(), name


def output(step: TinyStep, model: nn.Module) -> torch.Tensor:
    """What the transformer returns for the batch of two, called as its family calls it."""
    outputs: list[Any] = []
    handle = model.eval().register_forward_hook(lambda _module, _args, result: outputs.append(result))
    with torch.no_grad():
        step.losses(model, step.batch)
    handle.remove()
    actual = outputs[-1][0]
    return torch.stack(actual) if isinstance(actual, list) else actual


@pytest.mark.parametrize(("family", "variant", "targets"), MODELS)
def test_a_merged_adapter_comes_back(
    family: str,
    variant: str,
    targets: tuple[str, ...],
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    """At its own rank, alpha included; the stock pipeline with it computes what the merged model computes."""
    trained_adapter = trained(family, tiny_checkpoints[variant], tmp_path / "adapter", targets=targets)
    merged_folder, output_folder = merged(trained_adapter), tmp_path / "back"
    extraction = extracted(merged_folder, trained_adapter.base, output_folder)
    expected = deltas(trained_adapter.model)
    if targets:
        shapes = {delta.shape[2:] for delta in expected.values()}
        assert len(shapes) > 1
    assert {layer.name for layer in extraction.layers} == expected.keys()
    assert extraction.energy_share == pytest.approx(1, abs=1e-10)
    assert not extraction.excluded_energy
    pipeline = with_lora(trained_adapter.checkpoint.sampler.pipeline(torch.float32, text=False))
    step = tiny_step(tiny_checkpoints, variant)
    before = output(step, pipeline.transformer)
    pipeline.load_lora_weights(output_folder)
    loaded_updates = {n: d for n, d in deltas(pipeline.transformer).items() if d.any()}
    assert_near(loaded_updates, expected)
    model = trained_adapter.checkpoint.denoiser.transformer_class.from_pretrained(
        merged_folder, subfolder="transformer"
    )
    expected_output = output(step, model)
    assert (before - expected_output).abs().max() > 1e-2
    torch.testing.assert_close(output(step, pipeline.transformer), expected_output, rtol=1e-4, atol=1e-4)
    metadata = read_run_metadata(output_folder / ADAPTER_FILE)
    assert (metadata["family"], metadata["base_model"], metadata["rank"], metadata["alpha"]) == (
        *(family, trained_adapter.base.name),
        *(4, 4),
    )
    assert len(metadata["transformer_digest"]) == 64
    assert metadata["extracted"]["from"] == merged_folder.name
    assert str(tmp_path) not in json.dumps(metadata)


@pytest.fixture
def base(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["cogvideox-2b"]


def changed(base: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The checkpoint with its transformer's tensors changed; other files are links."""
    (out / "transformer").mkdir(parents=True)
    for path in base.iterdir():
        if path.name != "transformer":
            (out / path.name).symlink_to(path)
    (out / "transformer" / "config.json").symlink_to(base / "transformer" / "config.json")
    tensors = load_file(base / "transformer" / WEIGHTS)
    change(tensors)
    save_file(tensors, out / "transformer" / WEIGHTS, metadata={"format": "pt"})
    return out


LAYERS = ("transformer_blocks.0.attn1.to_q", "transformer_blocks.1.ff.net.2", "proj_out")


def tune(tensors: dict[str, torch.Tensor], names: tuple[str, ...] = LAYERS) -> None:
    """As training of all weights does: of full rank, with a spectrum that falls."""
    generator = torch.Generator().manual_seed(3)
    for name in names:
        weight = tensors[f"{name}.weight"]
        noise = torch.randn(weight.shape, generator=generator)
        u, s, v = torch.linalg.svd(noise, full_matrices=False)
        weight += (0.1 * u * s * 0.7 ** torch.arange(len(s))) @ v
    tensors["proj_out.bias"] += 0.01
    tensors["norm_final.weight"] *= 1.02


def test_what_a_rank_keeps_is_what_svd_says(base: Path, tmp_path: Path) -> None:
    """Against `torch.linalg.svd` of each whole difference; what no LoRA holds is listed with its share."""
    tuned = changed(base, tmp_path / "tuned", tune)
    old, new = (load_file(folder / "transformer" / WEIGHTS) for folder in (base, tuned))
    change = {n: new[n].double() - old[n].double() for n in old if not new[n].equal(old[n])}
    squares = {name: delta.square().sum().item() for name, delta in change.items()}
    extraction = extracted(tuned, base, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / ADAPTER_FILE)
    kept_energy = 0.0
    for layer in extraction.layers:
        u, s, v = torch.linalg.svd(change[f"{layer.name}.weight"], full_matrices=False)
        best = (u[:, :4] * s[:4]) @ v[:4]
        a, b = (tensors[f"transformer.{layer.name}.lora_{side}.weight"].double() for side in "AB")
        assert (b @ a - best).norm() <= 1e-6 * best.norm()
        share = (s[:4].square().sum() / s.square().sum()).item()
        assert 0.5 < share < 0.99
        assert layer.energy_share == pytest.approx(share, rel=1e-9)
        kept_energy += s[:4].square().sum().item()
    layers = sum(squares[f"{name}.weight"] for name in LAYERS)
    assert extraction.energy_share == pytest.approx(kept_energy / layers, rel=1e-9)
    assert extraction.total_energy_share == pytest.approx(kept_energy / sum(squares.values()), rel=1e-9)
    record = extraction.to_dict()
    assert record["left_out"] == {
        name: pytest.approx(squares[name] / sum(squares.values())) for name in ("norm_final.weight", "proj_out.bias")
    }
    report = "\n".join(extraction.format_lines())
    assert "rank 4 keeps " in report
    assert re.search(r"no LoRA holds what changed in these 2 tensors, [\d.]+% of all:\n  \w+\.\w+: ", report)


def test_a_share_of_the_energy_chooses_each_layers_rank(base: Path, tmp_path: Path) -> None:
    """The smallest that keeps it; a stock pipeline scales every layer as it was."""
    tuned = changed(base, tmp_path / "tuned", tune)
    request = ExtractRequest(str(tuned), str(base), tmp_path / "out", RankChoice(energy=0.9))
    (extraction,) = extract(request)
    old, new = (load_file(folder / "transformer" / WEIGHTS) for folder in (base, tuned))
    ranks = {}
    for layer in extraction.layers:
        name = f"{layer.name}.weight"
        energies = torch.linalg.svdvals(new[name].double() - old[name].double()).square()
        cumulative_share = energies.cumsum(0) / energies.sum()
        ranks[layer.name] = int((cumulative_share < 0.9).sum()) + 1
        assert layer.factors.rank == ranks[layer.name]
        assert 0.9 <= layer.energy_share < 1
    assert len(set(ranks.values())) > 1
    step = tiny_step({"cogvideox-2b": base}, "cogvideox-2b")
    pipeline = step.checkpoint.sampler.pipeline(torch.float32, text=False)
    pipeline.load_lora_weights(tmp_path / "out")
    for name, delta in deltas(pipeline.transformer).items():
        u, s, v = torch.linalg.svd(new[f"{name}.weight"].double() - old[f"{name}.weight"].double())
        best = (u[:, : ranks[name]] * s[: ranks[name]]) @ v[: ranks[name]]
        assert (delta - best).norm() <= 1e-6 * best.norm()
    report = next(iter(extraction.format_lines()))
    assert report.startswith(f"ranks {min(ranks.values())} to {max(ranks.values())} keep ")


def test_both_experts_come_back_in_a_file_each(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    base = tiny_checkpoints["wan-2.2-t2v-a14b"]
    trained_adapter = trained("wan", base, tmp_path / "adapter")
    (tmp_path / "both").mkdir()
    header = {"part": "transformer", "family": "wan"}
    for name, part in (("high_noise", "transformer"), ("low_noise", "transformer_2")):
        metadata = {"format": "pt", "dit_lora": json.dumps({**header, "part": part})}
        with safe_open(trained_adapter.folder / ADAPTER_FILE, framework="pt") as adapter_file:
            metadata = {**adapter_file.metadata(), **metadata}
        tensors = load_file(trained_adapter.folder / ADAPTER_FILE)
        if part == "transformer_2":
            tensors = {n: -2 * t if "lora_B" in n else t for n, t in tensors.items()}
        save_file(tensors, tmp_path / "both" / f"x_{name}.safetensors", metadata=metadata)
    merged_folder = tmp_path / "whole"
    export(ExportRequest((tmp_path / "both",), "merged", merged_folder, model=str(base)))
    extraction = extract(ExtractRequest(str(merged_folder), str(base), tmp_path / "out", RankChoice(4)))
    assert [entry.part for entry in extraction] == ["transformer", "transformer_2"]
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["out_high_noise.safetensors", "out_low_noise.safetensors"]
    expected = deltas(trained_adapter.model)
    pipeline = trained_adapter.checkpoint.sampler.pipeline(torch.float32, text=False)
    pipeline.load_lora_weights(tmp_path / "out" / files[0])
    pipeline.load_lora_weights(tmp_path / "out" / files[1], load_into_transformer_2=True)
    assert_near({n: d for n, d in deltas(pipeline.transformer).items() if d.any()}, expected)
    low = {n: d for n, d in deltas(pipeline.transformer_2).items() if d.any()}
    assert_near(low, {n: -2 * d for n, d in expected.items()})
    # Of one expert alone, what is written is one adapter.
    folder = tmp_path / "only"
    first_folder = str(trained_adapter.folder)
    header_of = read_run_metadata(tmp_path / "out" / files[1])
    assert header_of["part"] == "transformer_2"
    export(ExportRequest((Path(first_folder),), "merged", folder, model=str(base)))
    (single,) = extract(ExtractRequest(str(folder), str(base), tmp_path / "one", RankChoice(4)))
    assert single.part == "transformer"
    assert [path.name for path in (tmp_path / "one").iterdir()] == [ADAPTER_FILE]


def test_single_files_and_folders_of_a_transformer(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """By Diffusers' names, with ComfyUI's prefix, and by the published model's own; the pipeline gives the configs."""
    base = tiny_checkpoints["ltx-video"]
    trained_adapter = trained("ltx_video", base, tmp_path / "adapter")
    tuned = merged(trained_adapter) / "transformer"
    expected = deltas(trained_adapter.model)
    tensors = load_file(tuned / WEIGHTS)
    prefixed = tmp_path / "prefixed.safetensors"
    save_file({f"model.diffusion_model.{n}": t for n, t in tensors.items()}, prefixed)
    published_file = tmp_path / "published.safetensors"
    renamed = {f"model.diffusion_model.{own_name(name)}": tensor for name, tensor in tensors.items()}
    assert len(renamed.keys() - {f"model.diffusion_model.{n}" for n in tensors}) > 4
    save_file(renamed, published_file)
    with pytest.raises(DitLoraError, match=r"neither .* is a pipeline's folder; give --model"):
        extracted(tuned, base / "transformer", tmp_path / "out")
    cases: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
        (tuned, base / "transformer", {"model": str(base)}),
        (tuned / WEIGHTS, base, {}),
        (prefixed, base / "transformer" / WEIGHTS, {"model": str(base)}),
        (published_file, base, {}),
    )
    for number, (tuned_source, base_source, options) in enumerate(cases):
        output_folder = tmp_path / f"out{number}"
        extracted(tuned_source, base_source, output_folder, **options)
        pipeline = trained_adapter.checkpoint.sampler.pipeline(torch.float32, text=False)
        pipeline.load_lora_weights(output_folder)
        assert_near(deltas(pipeline.transformer), expected)
        assert read_run_metadata(output_folder / ADAPTER_FILE)["base_model"] == base.name


def own_name(name: str) -> str:
    """The published LTX-Video's name (single_file_utils.py, convert_ltx_transformer_checkpoint_to_diffusers)."""
    for original_part, diffusers_part in (
        ("patchify_proj", "proj_in"),
        ("adaln_single", "time_embed"),
        ("q_norm", "norm_q"),
        ("k_norm", "norm_k"),
    ):
        name = name.replace(diffusers_part, original_part)
    return name


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["extract", *map(str, arguments)])
    assert isinstance(result.exception, DitLoraError), result.output
    return str(result.exception)


def test_what_cannot_be_extracted_is_said_in_a_line(
    base: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tuned = changed(base, tmp_path / "tuned", tune)
    out_option = ("--out", tmp_path / "out")
    rank_options = ("--rank", 4, *out_option)
    assert "do not differ: there is nothing to extract" in refused(base, base, *rank_options)
    sana = tiny_checkpoints["sana-600m"]
    assert "is a SanaTransformer2DModel and not a CogVideoXTransformer3DModel; give" in refused(
        sana, base, *rank_options
    )
    wide_folder = changed(base, tmp_path / "wide", lambda t: t.update({"proj_out.bias": torch.ones(7)}))
    message = refused(wide_folder, base, *rank_options)
    assert message.splitlines()[1:] == ["  - proj_out.bias: [7], the model has [16]"]
    torn_folder = changed(base, tmp_path / "torn", lambda t: t.pop("proj_out.bias"))
    assert "  - proj_out.bias: not there, the model has [16]" in refused(base, torn_folder, *rank_options)
    extra_folder = changed(base, tmp_path / "more", lambda t: t.update({"extra": torch.ones(2)}))
    assert "  - extra: only in one of them" in refused(extra_folder, base, *rank_options)
    quantized_folder = changed(
        base,
        tmp_path / "narrow",
        lambda t: t.update({n: v.to(torch.float8_e4m3fn) for n, v in t.items()}),
    )
    assert "narrow is quantised; give the checkpoint in fp32" in refused(quantized_folder, base, *rank_options)
    bad = changed(base, tmp_path / "bad", lambda t: t["proj_out.weight"].fill_(float("nan")))
    assert "proj_out.weight: not finite in one of the checkpoints" in refused(bad, base, *rank_options)
    norms = changed(base, tmp_path / "norms", lambda t: t["norm_final.weight"].add_(1))
    message = refused(norms, base, *rank_options)
    assert message.startswith("no layer of ")
    assert message.endswith("differs from " + str(base) + "; these do\n  - norm_final.weight")
    message = refused(tuned, base, "--rank", 500, *out_option)
    assert message.startswith("--rank 500 is above the size of these layers; give at most ")
    assert len(message.splitlines()) == 1 + len(LAYERS)
    assert "--rank must be a positive whole number or auto; got 0" in refused(tuned, base, "--rank", 0, *out_option)
    assert "--energy needs --rank auto" in refused(tuned, base, *rank_options, "--energy", 0.5)
    assert "--energy must be above 0 and at most 1; got 2" in refused(
        tuned, base, "--rank", "auto", "--energy", 2, *out_option
    )
    assert "is not a checkpoint; give a pipeline's folder" in refused(tmp_path, base, *rank_options)
    assert "already exists; choose another folder" in refused(tuned, base, "--rank", 4, "--out", tuned)
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / "out").exists()
    torn_file = tmp_path / "torn.safetensors"
    torn_file.write_bytes((base / "transformer" / WEIGHTS).read_bytes()[:-100])
    assert "cannot read " in refused(torn_file, base, *rank_options)


def test_json_says_all_of_it(base: Path, tmp_path: Path) -> None:
    tuned = changed(base, tmp_path / "tuned", tune)
    command = ["extract", str(tuned), str(base), "--rank", "3", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    (record,) = json.loads(result.stdout)
    assert {layer["name"]: layer["rank"] for layer in record["layers"]} == dict.fromkeys(LAYERS, 3)
    shares = [layer["share"] for layer in record["layers"]] + list(record["left_out"].values())
    assert sum(shares) == pytest.approx(1)
