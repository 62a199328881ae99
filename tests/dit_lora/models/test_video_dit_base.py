"""A base folder put together from local parts: what opens, what trains, what OpenDiT's weights become."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.tiny.text import build_clip_encoder, build_clip_tokenizer
from dit_lora.families.tiny.vae import build_sd_vae
from dit_lora.models.video_dit import spatial_sines, temporal_sines
from dit_lora.models.video_dit_base import convert_checkpoint, write_base

CONFIG = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_frames": 2}


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, str]:
    """A VAE, and CLIP with its tokenizer, each in a folder as the Hub has them."""
    vae: Any = build_sd_vae()
    vae.save_pretrained(tmp_path / "vae")
    tokenizer = build_clip_tokenizer()
    tokenizer.save_pretrained(tmp_path / "clip")
    build_clip_encoder(tokenizer).save_pretrained(tmp_path / "clip")
    return {"vae": str(tmp_path / "vae"), "text_encoder": str(tmp_path / "clip")}


def opened(path: Path, **model: Any) -> Any:
    return get_family("video_dit").open(ModelConfig(family="video_dit", path=str(path), **model))


def test_a_base_without_weights_opens_from_scratch_alone(parts: dict[str, str], tmp_path: Path) -> None:
    path = write_base(tmp_path / "base", config=CONFIG, **parts)
    with pytest.raises(DitLoraError, match=r"transformer: no \.safetensors file"):
        opened(path)
    checkpoint = opened(path, from_scratch={"num_layers": 2})
    model = checkpoint.denoiser.load_transformer(torch.float32)
    assert len(model.transformer_blocks) == 2
    assert model.config.text_dim == 16
    pipeline = checkpoint.sampler.pipeline(torch.float32, model)
    assert pipeline("a horse", num_frames=3, height=16, width=32, num_inference_steps=1).frames.shape == (
        1, 3, 16, 32, 3,
    )  # fmt: skip
    loaded: Any = AutoencoderKL.from_pretrained(path, subfolder="vae")
    assert loaded.config.scaling_factor == 0.18215
    with pytest.raises(DitLoraError, match="exists; choose another folder"):
        write_base(path, **parts)


def test_a_base_of_classes_takes_as_many_as_the_data_has(parts: dict[str, str], tmp_path: Path) -> None:
    path = write_base(tmp_path / "base", config=CONFIG, **{**parts, "text_encoder": None})
    assert not (path / "text_encoder").exists()
    assert opened(path, from_scratch={"num_classes": 7}).info.trained_classes.count == 7


def opendit_state() -> dict[str, torch.Tensor]:
    """A VDiT of text, one block of 2 heads of 8, by OpenDiT's names and in bf16."""
    width = 16
    linear = {
        "t_embedder.mlp.0": (width, 256),
        "t_embedder.mlp.2": (width, width),
        "y_embedder.output_projection": (width, 16),
        "blocks.0.attn.qkv": (3 * width, width),
        "blocks.0.attn.proj": (width, width),
        "blocks.0.mlp.fc1": (4 * width, width),
        "blocks.0.mlp.fc2": (width, 4 * width),
        "blocks.0.adaLN_modulation.1": (6 * width, width),
        "final_layer.adaLN_modulation.1": (2 * width, width),
        "final_layer.linear": (32, width),
    }
    generator = torch.Generator().manual_seed(0)
    state = {"x_embedder.proj.weight": (width, 4, 1, 2, 2), "x_embedder.proj.bias": (width,)}
    for name, shape in linear.items():
        state |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in state.items()}


def test_opendits_weights_make_a_whole_pipeline(parts: dict[str, str], tmp_path: Path) -> None:
    """The tensors of the file are the state dict's, in its dtype."""
    opendit_tensors = opendit_state()
    save_file(opendit_tensors, tmp_path / "opendit.safetensors")
    path = write_base(
        tmp_path / "base",
        config=CONFIG,
        state_dict=load_file(tmp_path / "opendit.safetensors"),
        **parts,
    )
    (file,) = (path / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    assert torch.equal(
        tensors["transformer_blocks.0.attn.to_k.weight"],
        opendit_tensors["blocks.0.attn.qkv.weight"][16:32],
    )
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(t.numel() for t in tensors.values()) == sum(t.numel() for t in opendit_tensors.values())
    pipeline = opened(path).sampler.pipeline(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline("a horse", num_frames=2, height=16, width=32, num_inference_steps=2).frames
    assert frames.shape == (1, 2, 16, 32, 3)


def test_weights_that_are_not_finite_are_refused(parts: dict[str, str], tmp_path: Path) -> None:
    state = opendit_state()
    state["blocks.0.attn.qkv.bias"][17] = torch.nan
    state["final_layer.linear.weight"][0, :2] = torch.inf
    with pytest.raises(DitLoraError) as refused:
        write_base(tmp_path / "base", config=CONFIG, state_dict=state, **parts)
    assert "transformer_blocks.0.attn.to_k.bias: 1 of 16 values are not finite" in str(refused.value)
    assert "proj_out.weight: 2 of 512 values are not finite" in str(refused.value)
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize("form", ["ema.pt", "shards", "weights.safetensors"])
def test_an_opendit_checkpoint_becomes_a_pipeline(form: str, parts: dict[str, str], tmp_path: Path) -> None:
    """Sizes come from the tensors; the CLI has no more to say than the heads of a width that OpenDiT has not."""
    state = opendit_state() | {
        "pos_embed_spatial": spatial_sines(16, 3, 3)[None],
        "pos_embed_temporal": temporal_sines(16, 2)[None],
    }
    weights_path = tmp_path / form
    if form == "ema.pt":
        torch.save(state, weights_path)
    elif form == "shards":
        weights_path.mkdir()
        names = list(state)
        torch.save({name: state[name] for name in names[:9]}, weights_path / "pytorch_model-00001.bin")
        torch.save({name: state[name] for name in names[9:]}, weights_path / "pytorch_model-00002.bin")
    else:
        save_file(state, weights_path)
    command = ["convert", "opendit", str(tmp_path / "base"), "--weights", str(weights_path)]
    command += ["--vae", parts["vae"], "--text-encoder", parts["text_encoder"]]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, DitLoraError)
    assert "its width of 16 is none of OpenDiT's" in str(refused.exception)
    result = CliRunner().invoke(app, [*command, "--heads", "2"], catch_exceptions=False)
    assert f"{len(state)} tensors of {weights_path}" in result.stdout
    (file,) = (tmp_path / "base" / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    assert torch.equal(tensors["transformer_blocks.0.ff.net.2.weight"], state["blocks.0.mlp.fc2.weight"])
    config = opened(tmp_path / "base").denoiser.load_transformer(torch.float32).config
    assert (config.sample_frames, config.sample_height, config.sample_width) == (2, 6, 6)
    assert (config.num_layers, config.mlp_ratio, config.text_dim) == (1, 4.0, 16)
    assert (config.num_attention_heads, config.out_channels, config.patch_size_t) == (2, 8, 1)


def test_what_is_no_video_model_of_opendit_is_refused(tmp_path: Path) -> None:
    image = opendit_state() | {"pos_embed": torch.zeros(1, 9, 16)}
    torch.save(image, tmp_path / "ema.pt")
    with pytest.raises(DitLoraError, match=r"its image model, DiT, is not supported[\s\S]*temporal"):
        convert_checkpoint(tmp_path / "base", tmp_path / "ema.pt")
    torch.save({"weights": Path("a")}, tmp_path / "code.pt")
    with pytest.raises(DitLoraError, match="can run any code, so it was not opened"):
        convert_checkpoint(tmp_path / "base", tmp_path / "code.pt")
    with pytest.raises(DitLoraError, match="is not a file of weights or a folder"):
        convert_checkpoint(tmp_path / "base", tmp_path / "no.pt")


def test_a_tokenizer_without_a_limit_pads_to_clips_positions(parts: dict[str, str], tmp_path: Path) -> None:
    about = Path(parts["text_encoder"]) / "tokenizer_config.json"
    settings = json.loads(about.read_text())
    del settings["model_max_length"]
    about.write_text(json.dumps(settings))
    path = write_base(tmp_path / "base", config=CONFIG, **parts)
    pipeline = opened(path, from_scratch={}).sampler.pipeline(torch.float32)
    assert pipeline.tokenizer.model_max_length > 10**20
    shapes: list[torch.Size] = []
    pipeline.text_encoder.register_forward_pre_hook(lambda _m, args: shapes.append(args[0].shape))
    pooled = pipeline.encode_prompt(["a horse", "dogs " * 90])
    assert (shapes[0], pooled.shape) == ((2, 77), (2, 16))
