"""Each form, loaded by the library that it is for, adds to every weight what was trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from exported import Deltas, Trained, assert_same, deltas, product, trained
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dit_lora.adapters.diffusers_format import (
    ADAPTER_FILE,
    BASE_FILE,
    read_run_metadata,
)
from dit_lora.adapters.layer_names import UNKNOWN_NAMES
from dit_lora.adapters.load import load_adapter
from dit_lora.adapters.lora_mixins import with_lora
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.export import formats
from dit_lora.export.export import ExportFormat, ExportRequest, export
from dit_lora.export.key_maps import build_comfyui_layout

MODELS = (
    ("cogvideox", "cogvideox-2b"),
    ("sana", "sana-600m"),
    *(
        pytest.param(*model, marks=pytest.mark.thorough)
        for model in (
            ("cogvideox", "cogvideox-1.5-i2v"),
            ("sana", "sana-fp16"),
            ("sana_video", "sana-video"),
            ("chroma", "chroma"),
            ("ernie_image", "ernie-image"),
            ("ideogram4", "ideogram-4"),
            ("anima", "anima"),
            ("flux", "flux-dev"),
            ("flux2", "flux2-klein"),
            ("flux2", "flux2-dev"),
            ("hunyuan_video15", "hunyuan-video-1.5"),
            ("kandinsky5", "kandinsky-5-t2v"),
            ("krea2", "krea2-raw"),
            ("qwen_image", "qwen-image"),
            ("qwen_image21", "qwen-image-2.1"),
            ("dit", "dit-tiny"),
            ("latte", "latte"),
            ("video_dit", "video-dit-text"),
            ("ltx_video", "ltx-video-0.9.1"),
            ("sd3", "sd3.5-medium"),
            ("wan", "wan-2.1-i2v"),
            ("wan", "wan-2.2-t2v-a14b"),
            ("z_image", "z-image"),
        )
    ),
)
Make = Callable[..., Trained]


@pytest.fixture
def make(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Make:
    def made(variant: str = "cogvideox-2b", name: str = "adapter", **kwargs: Any) -> Trained:
        family = kwargs.pop("family", "cogvideox")
        return trained(family, tiny_checkpoints[variant], tmp_path / name, **kwargs)

    return made


def exported(one: Trained, to: ExportFormat, *others: Trained, **kwargs: Any) -> Path:
    output_dir = one.folder.parent / f"{one.folder.name}-{to}"
    targets = (one.folder, *(adapter.folder for adapter in others))
    return export(ExportRequest(targets, to, output_dir, model=str(one.base), **kwargs))


def fresh(one: Trained) -> Any:
    """The stock pipeline of the base."""
    return one.checkpoint.sampler.pipeline(torch.float32, text=False)


@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_diffusers_and_peft_load_what_was_trained(make: Make, family: str, variant: str) -> None:
    adapter = make(variant, family=family)
    expected, pipeline = deltas(adapter.model), with_lora(fresh(adapter))

    def loaded(folder: Path, name: str = ADAPTER_FILE) -> Deltas:
        pipeline.load_lora_weights(folder, weight_name=name)
        # Of itself, Wan's loader gives an image's keys and values adapters of zeros.
        updates = {n: d for n, d in deltas(pipeline.transformer).items() if d.any()}
        pipeline.unload_lora_weights()
        return updates

    for form in ("diffusers", "folded"):
        output_dir = exported(adapter, form)
        assert_same(loaded(output_dir), expected)
        metadata = read_run_metadata(output_dir / ADAPTER_FILE)
        assert metadata["steps"] == 3
        assert (metadata["alpha"], metadata["exported"]) == (
            (4, {"to": "folded", "alpha": 7}) if form == "folded" else (7, {"to": "diffusers"})
        )
    # As a loader has it that knows nothing of alpha.
    save_file(load_file(output_dir / ADAPTER_FILE), output_dir / "bare.safetensors")
    assert_same(loaded(output_dir, "bare.safetensors"), expected)
    output_dir = exported(adapter, "peft")
    # And back: a PEFT folder is taken as any adapter.
    peft_folder = export(ExportRequest((output_dir,), "diffusers", output_dir / "back", model=str(adapter.base)))
    assert_same(loaded(peft_folder), expected)
    wrapped = peft.PeftModel.from_pretrained(pipeline.transformer, str(output_dir))
    assert_same(deltas(wrapped), expected)


def test_the_exported_adapter_gives_the_trained_output(make: Make) -> None:
    adapter = make(scale=0.4)
    inputs = {
        "hidden_states": torch.randn(1, 3, 4, 8, 12),
        "encoder_hidden_states": torch.randn(1, 226, 32),
        "timestep": torch.tensor([500]),
    }
    with torch.no_grad():
        expected = adapter.model(**inputs).sample
        before = fresh(adapter).transformer(**inputs).sample
        for form in ("diffusers", "folded"):
            pipeline = fresh(adapter)
            pipeline.load_lora_weights(exported(adapter, form))
            actual = pipeline.transformer(**inputs).sample
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert (before - expected).abs().max() > 0.1


def test_base_weights_that_trained_go_along_or_are_refused(make: Make) -> None:
    adapter = make(connector=True)
    base_weights = load_file(adapter.folder / BASE_FILE)
    assert len(base_weights) > 5
    for form in ("diffusers", "folded", "peft"):
        output_dir = exported(adapter, form)
        tensors = load_file(output_dir / BASE_FILE)
        assert tensors.keys() == base_weights.keys()
        assert all(torch.equal(tensors[name], base_weights[name]) for name in base_weights)
    pipeline = fresh(adapter)
    load_adapter(pipeline, adapter.folder.parent / "adapter-folded")
    assert torch.equal(pipeline.transformer.proj_out.weight, adapter.model.proj_out.weight)
    with pytest.raises(DitLoraError, match=r"--to merged takes them; they are\n  - norm_final"):
        exported(adapter, "comfyui")
    with pytest.raises(DitLoraError, match=r"cannot be weighted or added\n  - .*: \d+ base weights"):
        exported(adapter, "kohya", weights=(0.5,))


def test_adapters_add_up_by_their_weights(make: Make) -> None:
    """Of different rank, alpha and targets; the second one only on some layers of the first, and on others."""
    adapter = make()
    other_adapter = make(name="other", rank=3, alpha=5, targets=("to_q", "ff.net.2", "patch_embed.proj"))
    output_dir = exported(adapter, "diffusers", other_adapter, weights=(0.7, -0.3))
    first_updates, second = deltas(adapter.model), deltas(other_adapter.model)
    expected = {name: 0.7 * delta for name, delta in first_updates.items()}
    for name, delta in second.items():
        expected[name] = expected.get(name, 0) - 0.3 * delta
    assert len(expected) > len(first_updates) > 4
    pipeline = fresh(adapter)
    pipeline.load_lora_weights(output_dir)
    assert_same(deltas(pipeline.transformer), expected)
    metadata = read_run_metadata(output_dir / ADAPTER_FILE)
    assert metadata["rank"] == metadata["alpha"] == 7
    assert metadata["transformer_digest"] == "d1"
    assert "steps" not in metadata  # of training each has its own
    exported_metadata = metadata["exported"]
    assert (exported_metadata["to"], exported_metadata["combination"]) == ("diffusers", "cat")
    assert [(a["weight"], a["rank"], a["alpha"]) for a in exported_metadata["adapters"]] == [
        (0.7, 4, 7),
        (-0.3, 3, 5),
    ]


def test_one_adapter_is_weighted_and_without_weights_each_counts_once(make: Make) -> None:
    adapter, other_adapter = make(), make(name="other", seed=2)
    half_pipeline = fresh(adapter)
    half_pipeline.load_lora_weights(exported(adapter, "folded", weights=(0.5,)))
    assert_same(deltas(half_pipeline.transformer), {n: 0.5 * d for n, d in deltas(adapter.model).items()})
    sum_pipeline = fresh(adapter)
    sum_pipeline.load_lora_weights(exported(adapter, "diffusers", other_adapter))
    first_updates, second = deltas(adapter.model), deltas(other_adapter.model)
    assert_same(
        deltas(sum_pipeline.transformer),
        {name: first_updates[name] + second[name] for name in first_updates},
    )


def native(out: Path, down: str, up: str) -> dict[str, torch.Tensor]:
    """What a file adds by key, alpha over rank as its scale."""
    tensors = load_file(out / f"{out.name}.safetensors")
    keys = {name.removesuffix(".alpha") for name in tensors if name.endswith(".alpha")}
    assert len(tensors) == 3 * len(keys)
    updates = {}
    for key in keys:
        a, b = tensors[f"{key}.{down}.weight"], tensors[f"{key}.{up}.weight"]
        updates[key] = product(a, b, tensors[f"{key}.alpha"].item() / a.shape[0])
    return updates


@pytest.mark.parametrize("variant", ["cogvideox-2b", "cogvideox-1.5-i2v"])
def test_comfyui_finds_every_layer_by_its_own_name(make: Make, variant: str) -> None:
    """Names as comfy/ldm/cogvideo/model.py has them, keys as comfy/lora.py asks for them."""
    targets = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "linear", "text_proj")
    targets += ("patch_embed.proj", "linear_1", "linear_2", "proj_out")
    adapter = make(variant, targets=targets)
    blocks = {
        "attn1.to_q": "q",
        "attn1.to_k": "k",
        "attn1.to_v": "v",
        "attn1.to_out.0": "attn_out",
        "ff.net.0.proj": "ff_proj",
        "ff.net.2": "ff_out",
        "norm1.linear": "norm1.linear",
        "norm2.linear": "norm2.linear",
    }
    names = {
        f"transformer_blocks.{n}.{layer}": f"blocks.{n}.{comfyui_layer}"
        for n in range(len(adapter.model.transformer_blocks))
        for layer, comfyui_layer in blocks.items()
    }
    for part in ("time", "ofs") if variant.endswith("i2v") else ("time",):
        for n in (1, 2):
            names[f"{part}_embedding.linear_{n}"] = f"{part}_embedding_linear_{n}"
    unchanged_names = ("patch_embed.proj", "patch_embed.text_proj", "norm_out.linear", "proj_out")
    names |= {name: name for name in unchanged_names}
    expected = deltas(adapter.model)
    assert names.keys() == expected.keys()
    updates = native(exported(adapter, "comfyui"), "lora_A", "lora_B")
    assert_same(updates, {f"diffusion_model.{names[n]}": d for n, d in expected.items()})


def test_kohya_names_lead_to_the_layers_as_videox_fun_looks_for_them(make: Make) -> None:
    adapter = make(targets=("to_q", "to_out.0", "net.0.proj", "net.2", "norm1.linear", "text_proj"))
    output_dir = exported(adapter, "kohya")
    updates = {}
    for key, delta in native(output_dir, "lora_down", "lora_up").items():
        assert key.startswith("lora_unet__")
        updates[walked(adapter.model, key.removeprefix("lora_unet__").split("_"))] = delta
    assert_same(updates, deltas(adapter.model))
    with safe_open(output_dir / f"{output_dir.name}.safetensors", framework="pt") as file:
        facts = {k: v for k, v in file.metadata().items() if k.startswith("ss_")}
    assert facts == {
        "ss_network_module": "networks.lora",
        "ss_network_dim": "4",
        "ss_network_alpha": "7.0",
        "ss_sd_model_name": "cogvideox-2b",
        "ss_steps": "3",
    }
    wide_adapter = make(name="wide", targets=("patch_embed.proj",))
    with pytest.raises(DitLoraError, match=r"supports only 1x1 convolutions, not these\n  - patch_embed"):
        exported(wide_adapter, "kohya")


def walked(module: Any, parts: list[str]) -> str:
    """The path of attributes that underscored words spell, the shortest name that there is first."""
    if not parts:
        return ""
    for end in range(1, len(parts) + 1):
        name = "_".join(parts[:end])
        if name in dict(module.named_children()):
            remaining = walked(module.get_submodule(name), parts[end:])
            return f"{name}.{remaining}" if remaining else name
    raise AssertionError(f"no {parts} in {type(module).__name__}")


@pytest.mark.parametrize("form", ["comfyui", "kohya"])
def test_families_without_such_names_are_refused_with_what_there_is(make: Make, form: ExportFormat) -> None:
    reasons = {"comfyui": "ComfyUI does not support Sana", "kohya": "kohya's layout is only written for"}
    adapter = make("sana-600m", family="sana")
    with pytest.raises(DitLoraError, match=f"--to {form} sana: {reasons[form]}") as error:
        exported(adapter, form)
    assert str(error.value).endswith("for sana there are: diffusers, folded, peft, merged")
    assert {path.name for path in adapter.folder.parent.iterdir()} == {"adapter"}


def test_a_family_that_nobody_has_looked_up_is_refused_in_words() -> None:
    with pytest.raises(DitLoraError, match="no names of ComfyUI are known here"):
        build_comfyui_layout(UNKNOWN_NAMES, {})


def test_adapters_of_another_base_or_family_are_not_added(make: Make) -> None:
    adapter, other_adapter = make(), make(name="other", digest="d2")
    with pytest.raises(DitLoraError, match="of different base models") as error:
        exported(adapter, "diffusers", other_adapter)
    assert "other/pytorch_lora_weights.safetensors: cogvideox, trained on" in str(error.value)
    with pytest.raises(DitLoraError, match="of different families"):
        exported(adapter, "diffusers", make("sana-600m", name="sana", family="sana"))


def test_what_does_not_fit_is_listed(make: Make, tiny_checkpoints: dict[str, Path]) -> None:
    adapter = make()
    file = adapter.folder / ADAPTER_FILE
    tensors = load_file(file)
    with safe_open(file, framework="pt") as adapter_file:
        metadata = adapter_file.metadata()

    def refusal(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, file, metadata=metadata)
        with pytest.raises(DitLoraError) as error:
            exported(adapter, "diffusers")
        assert not (adapter.folder.parent / "adapter-diffusers").exists()
        return str(error.value)

    name = "transformer.transformer_blocks.0.attn1.to_q.lora_A.weight"
    message = refusal({**tensors, name: torch.ones(4, 5)})
    assert "trained on a different model than this CogVideoXTransformer3DModel" in message
    assert "to_q.lora_A.weight: made for [5], the model's layer has [64]" in message
    moved_tensors = {key.replace("_blocks.1.", "_blocks.9."): value for key, value in tensors.items()}
    assert "transformer_blocks.9.attn1.to_q: not in the model" in refusal(moved_tensors)
    nan_tensors = {**tensors, name: tensors[name] * torch.nan}
    assert "not finite" in refusal(nan_tensors)
    extra_tensors = {**tensors, "transformer.proj_out.lora_magnitude_vector": torch.ones(4)}
    assert "only LoRA matrices (lora_A, lora_B) are supported here; it has\n" in refusal(extra_tensors)
    file.write_bytes(b"nonsense")
    with pytest.raises(DitLoraError, match="it is incomplete or not a safetensors file"):
        exported(adapter, "diffusers")


@pytest.mark.parametrize("form", ["diffusers", "folded", "peft", "comfyui", "kohya"])
def test_what_reads_back_otherwise_is_not_kept(
    make: Make, form: ExportFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that changes one matrix by a thousandth."""
    adapter = make()
    for writer in ("save_adapter", "save_chat_adapter", "write_tensors"):
        monkeypatch.setattr(formats, writer, wrong(getattr(formats, writer)))
    with pytest.raises(CheckFailedError, match=r"read back, is not the adapter.*\n  - .*differs by"):
        exported(adapter, form)
    assert [path.name for path in adapter.folder.parent.iterdir()] == ["adapter"]


def wrong(write: Callable[..., Any]) -> Callable[..., Any]:
    def written(*args: Any, **kwargs: Any) -> Any:
        file = write(*args, **kwargs) or args[1]
        tensors = load_file(file)
        name = next(n for n in tensors if "lora_B" in n or "lora_up" in n)
        with safe_open(file, framework="pt") as adapter_file:
            metadata = adapter_file.metadata()
        save_file({**tensors, name: 1.001 * tensors[name]}, file, metadata=metadata)
        return file

    return written


def test_a_file_that_is_not_ours_goes_by_the_base(make: Make) -> None:
    """Without provenance, and without metadata: alpha is the rank."""
    adapter = make(alpha=4)
    file = adapter.folder / ADAPTER_FILE
    save_file(load_file(file), file)
    output_dir = exported(adapter, "folded")
    pipeline = fresh(adapter)
    pipeline.load_lora_weights(output_dir)
    assert_same(deltas(pipeline.transformer), deltas(adapter.model))
    assert json.loads(json.dumps(read_run_metadata(output_dir / ADAPTER_FILE))) == {"exported": {"to": "folded"}}
