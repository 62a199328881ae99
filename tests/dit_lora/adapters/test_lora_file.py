"""A LoRA's file, in whichever form, is in the model bit for bit as it was trained; what does not fit is named."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from exported import Trained, assert_same, deltas, trained
from safetensors.torch import load_file, save_file
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.attach_file import attach_lora_file
from dit_lora.adapters.diffusers_format import ADAPTER_FILE, read_run_metadata
from dit_lora.adapters.layer_names import (
    UNKNOWN_NAMES,
    LayerNames,
    get_kohya_name,
    make_unsupported_names,
)
from dit_lora.adapters.lora_file import LoraFile, read_lora
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.environment.safetensors_files import read_header
from dit_lora.errors import DitLoraError
from dit_lora.export.export import ExportFormat, ExportRequest, export
from dit_lora.export.key_maps import build_comfyui_layout
from dit_lora.export.weight_delta import collect_weight_updates
from dit_lora.families import DIFFUSION_FAMILIES, get_family

Make = Callable[..., Trained]
CONTINUED = LoraConfig(init="a/file")


@pytest.fixture
def make(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Make:
    def made(variant: str = "cogvideox-2b", name: str = "adapter", **kwargs: Any) -> Trained:
        family = kwargs.pop("family", "cogvideox")
        return trained(family, tiny_checkpoints[variant], tmp_path / name, **kwargs)

    return made


def fresh(one: Trained) -> Any:
    return one.checkpoint.denoiser.load_transformer(torch.float32)


def read(one: Trained, file: Path, family: str = "cogvideox") -> LoraFile:
    names = get_family(family).comfyui
    return read_lora(file, fresh(one), names, one.checkpoint.info.pipeline_class)


def attached(one: Trained, stored: LoraFile, family: str = "cogvideox") -> Any:
    model = fresh(one)
    attach_lora_file(model, stored, CONTINUED, get_family(family).lora_targets, seed=0)
    return model


def matrices(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if ".lora_" in n}


def exported(one: Trained, to: ExportFormat) -> Path:
    output_dir = one.folder.parent / f"{one.folder.name}-{to}"
    export(ExportRequest((one.folder,), to, output_dir, model=str(one.base)))
    (file,) = output_dir.glob("*.safetensors")
    return file


def forms_of(family: str) -> tuple[ExportFormat, ...]:
    facts = get_family(family)
    programs: dict[ExportFormat, bool] = {
        "comfyui": not facts.comfyui.unsupported_reason,
        "kohya": facts.has_kohya_layout,
    }
    return (
        "diffusers",
        "folded",
        "peft",
        *(form for form, is_supported in programs.items() if is_supported),
    )


# Joined layers, second names and both layouts of other programs are among them.
IN_CI = ("anima", "cogvideox", "dit", "flux", "ideogram4", "ltx2", "qwen_image", "sana", "sd3", "wan", "z_image")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.thorough) for name in DIFFUSION_FAMILIES],
)
def test_every_form_that_export_writes_is_read_back_bit_for_bit(make: Make, family: str) -> None:
    facts = get_family(family)
    variant = facts.tiny_variants[-1 if family == "cogvideox" else 0]
    adapter = make(variant, family=family)
    for form in forms_of(family):
        model = attached(adapter, read(adapter, exported(adapter, form), family), family)
        joins = bool(facts.comfyui.joined_layers)  # the parts of such a layer are read with its rank
        if form == "folded" or (form == "comfyui" and (joins or not facts.comfyui.reads_alpha)):
            assert_same(deltas(model), deltas(adapter.model))
            continue
        expected, actual = matrices(adapter.model), matrices(model)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
        config = model.peft_config[ADAPTER_NAME].to_dict()
        assert (config["r"], config["lora_alpha"]) == (4, 7)
        assert not config["rank_pattern"]
        assert not config["alpha_pattern"]
        assert all(p.requires_grad and p.dtype is torch.float32 for n, p in model.named_parameters() if ".lora_" in n)
        assert adapter.model.peft_config[ADAPTER_NAME].to_dict()["target_modules"] == config["target_modules"]


def test_of_the_families_here_comfyui_runs_those_it_has_names_for() -> None:
    assert forms_of("cogvideox") == ("diffusers", "folded", "peft", "comfyui", "kohya")
    families = (
        *("anima", "chroma", "ernie_image", "flux", "flux2", "hunyuan_video15", "ideogram4", "kandinsky5", "krea2"),
        *("qwen_image", "qwen_image21", "sd3", "z_image"),
    )
    for family in families:
        assert forms_of(family) == ("diffusers", "folded", "peft", "comfyui")
    for family in ("sana", "sana_video", "dit", "latte", "video_dit"):
        assert forms_of(family) == ("diffusers", "folded", "peft")


def test_layers_that_comfyui_would_pass_over_are_refused_by_name(make: Make) -> None:
    """FLUX.2's modulations and time embedding, which its map of Diffusers' names lacks."""
    targets = (
        "attn.to_q",
        "double_stream_modulation_img.linear",
        "single_stream_modulation.linear",
    )
    adapter = make("flux2-klein", family="flux2", targets=targets)
    with pytest.raises(DitLoraError, match="has no counterpart of these layers") as error:
        exported(adapter, "comfyui")
    assert "  - double_stream_modulation_img.linear\n  - single_stream_modulation.linear" in str(error.value)


def test_what_trains_of_a_file_is_the_adapter_alone(make: Make) -> None:
    adapter = make()
    model = attached(adapter, read(adapter, adapter.folder / ADAPTER_FILE))
    assert {n for n, p in model.named_parameters() if p.requires_grad} == matrices(model).keys()


def uneven(one: Trained, file: Path, key: Callable[[str], str], up: str, down: str) -> Any:
    """Write a file whose layers have ranks 2, 3, 4, ... and different alphas; return a plain model with its sums."""
    generator = torch.Generator().manual_seed(3)
    tensors, expected = {}, {}
    names = [n for n, m in fresh(one).named_modules() if n.endswith(("to_q", "ff.net.2"))]
    for number, name in enumerate(names):
        layer = fresh(one).get_submodule(name)
        rank, alpha = 2 + number, 1.5 + number
        a = torch.randn(rank, layer.in_features, generator=generator)
        b = torch.randn(layer.out_features, rank, generator=generator)
        tensors |= {f"{key(name)}.{down}.weight": a, f"{key(name)}.{up}.weight": b}
        tensors[f"{key(name)}.alpha"] = torch.tensor(alpha)
        expected[name] = alpha / rank * b.double() @ a.double()
    save_file(tensors, file)
    assert len(expected) == 4
    return expected


def test_layers_of_different_ranks_and_alphas_keep_their_own(make: Make, tmp_path: Path) -> None:
    adapter = make()
    expected = uneven(adapter, tmp_path / "k.safetensors", get_kohya_name, "lora_up", "lora_down")
    model = attached(adapter, read(adapter, tmp_path / "k.safetensors"))
    assert_same(deltas(model), expected)
    # As Diffusers loads what is saved of it.
    adapter.checkpoint.info.pipeline_class.save_lora_weights(
        tmp_path / "saved",
        transformer_lora_layers={n.replace(f".{ADAPTER_NAME}.", "."): t for n, t in matrices(model).items()},
        transformer_lora_adapter_metadata=model.peft_config[ADAPTER_NAME].to_dict(),
    )
    pipeline = adapter.checkpoint.sampler.pipeline(torch.float32, text=False)
    pipeline.load_lora_weights(tmp_path / "saved")
    assert_same(deltas(pipeline.transformer), expected)


def test_peft_configs_with_patterns_and_rslora_are_scaled_as_peft_does(make: Make, tmp_path: Path) -> None:
    import peft

    adapter = make()
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["to_q", "ff.net.2"],
        rank_pattern={"transformer_blocks.1.attn1.to_q": 2},
        alpha_pattern={"net.2": 5},
        use_rslora=True,
        init_lora_weights=False,
    )
    wrapped = peft.get_peft_model(fresh(adapter), config)
    wrapped.save_pretrained(str(tmp_path / "peft"))
    lora_file = read(adapter, tmp_path / "peft" / "adapter_model.safetensors")
    assert set(lora_file.digests) == {"sha256", "config_sha256"}
    assert lora_file.layers["transformer_blocks.0.ff.net.2"].alpha == pytest.approx(5 * math.sqrt(4))
    assert_same(deltas(attached(adapter, lora_file)), deltas(wrapped))


def test_a_program_with_the_same_names_and_no_alpha_is_written_and_read_back(make: Make) -> None:
    adapter = make()
    names = LayerNames(prefix="transformer.", reads_alpha=False)
    tensors = build_comfyui_layout(names, collect_weight_updates(adapter.model)).build_lora_tensors(
        collect_weight_updates(adapter.model)
    )
    assert set(tensors) == {
        f"transformer.{name}.lora_{part}.weight" for name in deltas(adapter.model) for part in "AB"
    }
    file = adapter.folder.parent / "same.safetensors"
    save_file(tensors, file)
    lora_file = read_lora(file, fresh(adapter), names, adapter.checkpoint.info.pipeline_class)
    assert all(
        torch.equal(tensors[f"transformer.{n}.lora_B.weight"], layer.b) for n, layer in lora_file.layers.items()
    )
    assert_same(deltas(attached(adapter, lora_file)), deltas(adapter.model))


def test_what_another_program_wrote_is_exported_again(make: Make, monkeypatch: Any) -> None:
    """From ComfyUI's names, with alpha and without, to Diffusers' file, whose header says what `verify` compares."""
    adapter = make()
    for names in (
        get_family("cogvideox").comfyui,
        LayerNames(prefix="transformer.", reads_alpha=False),
    ):
        family = replace(get_family("cogvideox"), comfyui=names)
        monkeypatch.setattr("dit_lora.export.export.get_family", lambda _, bound_family=family: bound_family)
        file = exported(adapter, "comfyui")
        output_dir = file.parent / "back"
        export(ExportRequest((file,), "diffusers", output_dir, model=str(adapter.base)))
        pipeline = adapter.checkpoint.sampler.pipeline(torch.float32, text=False)
        pipeline.load_lora_weights(output_dir)
        assert_same(deltas(pipeline.transformer), deltas(adapter.model))
        metadata = read_run_metadata(output_dir / ADAPTER_FILE)
        assert (metadata["rank"], metadata["alpha"]) == (4, 7 if names.reads_alpha else 4)
        assert (
            attached(adapter, read(adapter, output_dir / ADAPTER_FILE))
            .peft_config[ADAPTER_NAME]
            .to_dict()["lora_alpha"]
            == metadata["alpha"]
        )
        shutil.rmtree(file.parent)


def test_names_of_a_program() -> None:
    renamed = LayerNames(renames={"blocks.*.a.to_q": "layers.*.q", "out": "head"})
    assert renamed.translate_layer_name("blocks.12.a.to_q") == "diffusion_model.layers.12.q"
    assert renamed.translate_layer_name("out") == "diffusion_model.head"
    assert renamed.translate_layer_name("blocks.x.a.to_q") is None
    assert renamed.translate_layer_name("blocks.1.a.to_k") is None
    assert LayerNames(prefix="transformer.").translate_layer_name("blocks.1.a") == "transformer.blocks.1.a"
    partial_names = LayerNames(unnamed_layers=("single_stream_modulation.*",))
    assert partial_names.translate_layer_name("single_stream_modulation.linear") is None
    assert partial_names.translate_layer_name("blocks.1.a") == "diffusion_model.blocks.1.a"
    assert make_unsupported_names("why").translate_layer_name("out") is None
    assert UNKNOWN_NAMES.unsupported_reason


@pytest.mark.parametrize(
    ("key", "down", "up"),
    [
        ("{ours}", "lora_A", "lora_B"),
        ("transformer.{ours}", "lora_A.default", "lora_B.default"),
        ("base_model.model.{ours}", "lora_A", "lora_B"),
        ("transformer.{ours}", "lora.down", "lora.up"),
        ("diffusion_model.{theirs}", "lora_down", "lora_up"),
        ("lora_unet_{joined_theirs}", "lora_down", "lora_up"),
        ("lora_unet_{joined}", "lora_down", "lora_up"),
        ("lycoris_{joined}", "lora_down", "lora_up"),
        ("lora_transformer_{joined}", "lora_down", "lora_up"),
    ],
)
def test_each_spelling_of_other_trainers_is_the_same_layer(
    make: Make, tmp_path: Path, key: str, down: str, up: str
) -> None:
    """Files have both kinds of names: Diffusers', and those of the published model, which ComfyUI has."""
    adapter, names = make(), get_family("cogvideox").comfyui
    tensors = {}
    for name, (term,) in collect_weight_updates(adapter.model).items():
        published_name = (names.translate_layer_name(name) or "").removeprefix(names.prefix)
        joined_names = {
            "joined": name.replace(".", "_"),
            "joined_theirs": published_name.replace(".", "_"),
        }
        layer_key = key.format(ours=name, theirs=published_name, **joined_names)
        tensors |= {f"{layer_key}.{down}.weight": term.a, f"{layer_key}.{up}.weight": term.b}
        tensors[f"{layer_key}.alpha"] = torch.tensor(7.0)
    save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / "theirs.safetensors")
    assert_same(
        deltas(attached(adapter, read(adapter, tmp_path / "theirs.safetensors"))),
        deltas(adapter.model),
    )


def test_kohyas_joined_layers_come_apart_where_the_pipeline_knows_how(tmp_path: Path) -> None:
    """FLUX: q, k and v are one layer there; Diffusers' own converter splits them, and folds alpha."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=[2, 2, 4],
    ).requires_grad_(False)
    a, b = torch.randn(3, 16), torch.randn(48, 3)
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {
        f"{key}.lora_down.weight": a,
        f"{key}.lora_up.weight": b,
        f"{key}.alpha": torch.tensor(6.0),
    }
    save_file(tensors, tmp_path / "flux.safetensors")
    lora_file = read_lora(tmp_path / "flux.safetensors", model, UNKNOWN_NAMES, FluxPipeline)
    attach_lora_file(model, lora_file, CONTINUED, (), seed=0)
    updates = (2.0 * b.double() @ a.double()).split(16)
    expected = {
        f"transformer_blocks.0.attn.to_{projection}": part for projection, part in zip("qkv", updates, strict=True)
    }
    assert_same(deltas(model), expected)


def test_joined_layers_come_apart_at_the_models_own_widths(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Diffusers' converter has the published widths of FLUX's single blocks written into it."""
    checkpoint = get_family("flux").open(ModelConfig(family="flux", path=str(tiny_checkpoints["flux-dev"])))
    model, key = checkpoint.denoiser.load_transformer(torch.float32), "lora_unet_single_blocks_0_linear1"
    for rows in (224, 225):
        down, up = torch.randn(3, 32), torch.randn(rows, 3)
        tensors = {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
        save_file(tensors, tmp_path / "flux.safetensors")
        if rows == 224:
            read_lora(tmp_path / "flux.safetensors", model, UNKNOWN_NAMES, FluxPipeline)
            continue
        with pytest.raises(DitLoraError, match=f"{key}.lora_B.weight: made for 225 outputs"):
            read_lora(tmp_path / "flux.safetensors", model, UNKNOWN_NAMES, FluxPipeline)


def refusal(one: Trained, tensors: dict[str, torch.Tensor], metadata: Any = None) -> str:
    file = one.folder.parent / "changed.safetensors"
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(DitLoraError) as error:
        read(one, file)
    assert error.value.exit_code == 2
    return str(error.value)


def test_every_name_that_fits_nowhere_is_listed(make: Make) -> None:
    adapter = make()
    tensors = load_file(adapter.folder / ADAPTER_FILE)
    moved_tensors = {key.replace("_blocks.1.", "_blocks.9."): value for key, value in tensors.items()}
    message = refusal(adapter, moved_tensors)
    assert "4 of its layers are not in the model" in message
    for name in ("to_q", "to_k", "to_v", "to_out.0"):
        assert f"  - transformer.transformer_blocks.9.attn1.{name}: not in the model" in message
    assert "_blocks.0." not in message


@pytest.mark.parametrize(
    "read",
    [
        lambda file: read_lora(file, nn.Linear(1, 1), make_unsupported_names("not asked"), FluxPipeline),
        read_run_metadata,
        read_header,
    ],
    ids=["read_lora", "read_provenance", "header_of"],
)
def test_a_file_of_a_hundred_thousand_tensors_is_refused_before_they_are_read(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}.lora_A.weight": entry for number in range(100_001)}).encode()
    file = tmp_path / "many.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DitLoraError, match="has 100,001 tensors; at most 100,000 are read"):
        read(file)


def test_other_shapes_and_other_kinds_of_tensors_are_refused(make: Make) -> None:
    adapter = make()
    tensors = load_file(adapter.folder / ADAPTER_FILE)
    layer = "transformer.transformer_blocks.0.attn1.to_q"
    message = refusal(adapter, {**tensors, f"{layer}.lora_A.weight": torch.ones(4, 5)})
    assert "to_q.lora_A.weight: made for [5], the model's layer has [64]" in message
    message = refusal(adapter, {**tensors, f"{layer}.lora_B.weight": torch.ones(64, 3)})
    assert "to_q: A has rank 4, B is [64, 3]" in message
    message = refusal(adapter, {n: t for n, t in tensors.items() if n != f"{layer}.lora_B.weight"})
    assert "transformer_blocks.0.attn1.to_q: no lora_B" in message
    message = refusal(adapter, {**tensors, f"{layer}.dora_scale": torch.ones(4)})
    assert "(lora_A, lora_B) are supported here; it has\n" in message
    assert f"  - {layer}.dora_scale" in message
    message = refusal(adapter, {**tensors, f"{layer}.lora_A.weight": torch.full((4, 64), torch.inf)})
    assert "not finite" in message
    attention = "transformer.transformer_blocks.0.attn1"
    invalid_tensors = {
        f"{attention}.lora_A.weight": torch.ones(4, 64),
        f"{attention}.lora_B.weight": torch.ones(64, 4),
    }
    assert "attn1: no linear layer and no 2D convolution" in refusal(adapter, {**tensors, **invalid_tensors})
    repeated_name = get_kohya_name("transformer_blocks.0.attn1.to_q")
    message = refusal(adapter, {**tensors, f"{repeated_name}.lora_down.weight": torch.ones(4, 64)})
    assert "a second one of transformer_blocks.0.attn1.to_q" in message
    assert "has no LoRA matrices" in refusal(adapter, {})


def test_a_refusal_lists_what_is_the_reason_and_no_sound_layer(make: Make) -> None:
    adapter = make()
    tensors, layer = load_file(adapter.folder / ADAPTER_FILE), "transformer_blocks.0.ff.net.2"
    for name in ("lora_te1_text_model_0_mlp", "text_encoders.gemma.model.layers.0.q_proj"):
        extra_layer = {f"{name}.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
        message = refusal(adapter, {**tensors, **extra_layer})
        assert message.endswith(f"1 of its layers belong to a text encoder, which is not trained here\n  - {name}")
    message = refusal(adapter, {**tensors, f"{layer}.alpha": torch.tensor(4.0)})
    assert message.endswith(f"\n  - {layer}: no lora_A and no lora_B, its alpha is alone")
    message = refusal(adapter, {**tensors, f"{layer}.diff": torch.ones(4, 4)})
    assert message.endswith(f"(lora_A, lora_B) are supported here; it has\n  - {layer}.diff: a full difference")


def test_prefixes_may_differ_within_a_file(make: Make, tmp_path: Path) -> None:
    adapter = make()
    tensors = load_file(adapter.folder / ADAPTER_FILE)
    mixed = {
        name.replace("transformer.", "model.diffusion_model.", 1) if "_blocks.1." in name else name: t
        for name, t in tensors.items()
    }
    save_file(mixed, tmp_path / "mixed.safetensors")
    assert len(read(adapter, tmp_path / "mixed.safetensors").layers) == 8


def test_a_converter_that_drops_tensors_is_found_out(make: Make) -> None:
    """XLabs' form, which only Diffusers' converter knows, and one that keeps the first layer it sees."""

    class Dropping:
        @staticmethod
        def save_lora_weights() -> None: ...

        @staticmethod
        def lora_state_dict(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            kept_tensors = {n: t for n, t in state.items() if "_blocks_0" in n}
            return {
                f"transformer_blocks.0.attn1.to_q.lora_{'A' if 'down' in n else 'B'}.weight": 1 * t
                for n, t in kept_tensors.items()
            }

    adapter = make()
    factors = {"lora_down": torch.randn(4, 64), "lora_up": torch.randn(64, 4)}
    file = adapter.folder.parent / "strange.safetensors"
    tensors = {f"x_blocks_0.{part}.weight": t for part, t in factors.items()}
    save_file(tensors | {"x_blocks_0.alpha": torch.tensor(8.0)}, file)
    layer = read_lora(file, fresh(adapter), UNKNOWN_NAMES, Dropping).layers["transformer_blocks.0.attn1.to_q"]
    update = layer.alpha / layer.rank * layer.b @ layer.a
    torch.testing.assert_close(update, 2 * factors["lora_up"] @ factors["lora_down"])
    extra_tensors = {f"x_blocks_1.{part}.weight": t.clone() for part, t in factors.items()}
    save_file(tensors | extra_tensors, file)
    with pytest.raises(DitLoraError, match=r"would drop these\n  - x_blocks_1\.lora_down"):
        read_lora(file, fresh(adapter), UNKNOWN_NAMES, Dropping)


def test_a_recipes_own_rank_alpha_or_targets_must_be_the_files(make: Make) -> None:
    adapter = make()
    lora_file = read(adapter, adapter.folder / ADAPTER_FILE)

    def refused(**lora: Any) -> str:
        with pytest.raises(DitLoraError) as error:
            attach_lora_file(fresh(adapter), lora_file, LoraConfig(init="a/file", **lora), (), seed=0)
        return str(error.value)

    assert "lora.rank: 8 is given, and 4 is in pytorch_lora_weights.safetensors" in refused(rank=8)
    assert "lora.alpha: 4 is given, and 7 is in" in refused(alpha=4)
    message = refused(targets=("to_q", "ff.net.2"))
    assert "transformer_blocks.0.ff.net.2: not in the file" in message
    assert "transformer_blocks.0.attn1.to_k: not in lora.targets" in message
    same_config = LoraConfig(init="x/y", rank=4, alpha=7, targets=("to_q", "to_k", "to_v", "to_out.0"))
    attach_lora_file(fresh(adapter), lora_file, same_config, (), seed=0)


def test_a_quantised_base_takes_a_file_too(make: Make) -> None:
    from dit_lora.adapters.quantize import quantize_base

    adapter = make()
    model = fresh(adapter)
    quantize_base(model, "int8")
    lora_file = read_lora(adapter.folder / ADAPTER_FILE, model, UNKNOWN_NAMES, adapter.checkpoint.info.pipeline_class)
    attach_lora_file(model, lora_file, CONTINUED, (), seed=0)
    assert_same(deltas(model), deltas(adapter.model))
