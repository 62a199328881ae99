"""VDiT against a plain fp64 forward under OpenDiT's own parameter names: values, gradients, conversion, positions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from dit_lora.errors import DitLoraError
from dit_lora.models.opendit import CLIP_PREFIX, convert_opendit
from dit_lora.models.video_dit import (
    AdaLayerNorm,
    VideoDiTTransformer3DModel,
    sincos_positions,
)

HEADS, HEAD_DIM, LAYERS, CLASSES, TEXT = 3, 8, 2, 5, 7
WIDTH = HEADS * HEAD_DIM
State = dict[str, torch.Tensor]


def config(patch_t: int = 1, text: bool = False, **changes: Any) -> dict[str, Any]:
    """Odd sizes: 3 heads, 2 * patch_t frames, 6 by 10 latents."""
    condition = {"text_dim": TEXT} if text else {"num_classes": CLASSES}
    sizes = {"sample_frames": 3 * patch_t, "sample_height": 6, "sample_width": 10}
    return {
        "num_attention_heads": HEADS,
        "attention_head_dim": HEAD_DIM,
        "num_layers": LAYERS,
        "patch_size_t": patch_t,
        **sizes,
        **condition,
        **changes,
    }


def sines(places: torch.Tensor, width: int) -> torch.Tensor:
    """Sines, then cosines, of place / 10000^(i / (width / 2))."""
    rates = 10000.0 ** (-torch.arange(width // 2).double() / (width / 2))
    angles = places.double()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def tables(frames: int, height: int, columns: int) -> State:
    """OpenDiT's buffers: column sines in the first half of the channels, row sines in the second."""
    across = sines(torch.arange(columns), WIDTH // 2).repeat(height, 1)
    down = sines(torch.arange(height), WIDTH // 2).repeat_interleave(columns, dim=0)
    return {
        "pos_embed_spatial": torch.cat([across, down], dim=1)[None],
        "pos_embed_temporal": sines(torch.arange(frames), WIDTH)[None],
    }


def opendit_state(patch_t: int = 1, text: bool = False, seed: int = 0) -> State:
    """Random fp64 weights by OpenDiT's names; nothing is zero or one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)

    state = {
        "x_embedder.proj.weight": draw(WIDTH, 4, patch_t, 2, 2),
        "x_embedder.proj.bias": draw(WIDTH),
    }
    linear = {"t_embedder.mlp.0": (WIDTH, 256), "t_embedder.mlp.2": (WIDTH, WIDTH)}
    if text:
        linear["y_embedder.output_projection"] = (WIDTH, TEXT)
        state[f"{CLIP_PREFIX}text_model.final_layer_norm.weight"] = draw(TEXT)
    else:
        state["y_embedder.embedding_table.weight"] = draw(CLASSES + 1, WIDTH)
    for n in range(LAYERS):
        linear[f"blocks.{n}.attn.qkv"] = (3 * WIDTH, WIDTH)
        linear[f"blocks.{n}.attn.proj"] = (WIDTH, WIDTH)
        linear[f"blocks.{n}.mlp.fc1"] = (4 * WIDTH, WIDTH)
        linear[f"blocks.{n}.mlp.fc2"] = (WIDTH, 4 * WIDTH)
        linear[f"blocks.{n}.adaLN_modulation.1"] = (6 * WIDTH, WIDTH)
    linear["final_layer.adaLN_modulation.1"] = (2 * WIDTH, WIDTH)
    linear["final_layer.linear"] = (patch_t * 4 * 8, WIDTH)
    for name, shape in linear.items():
        state |= {f"{name}.weight": draw(*shape), f"{name}.bias": draw(shape[0])}
    return state | tables(3, 3, 5)


def linear(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def normed(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def reference(state: State, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """VDiT's forward in plain fp64 torch: x (B, 4, F, H, W), t (B,), y labels (B,) or text (B, TEXT)."""
    kernel = state["x_embedder.proj.weight"]
    patch = kernel.shape[2:]
    tokens = functional.conv3d(x, kernel, state["x_embedder.proj.bias"], stride=tuple(patch))
    grid = tokens.shape[2:]
    tokens = tokens.flatten(3).permute(0, 2, 3, 1)  # (B, f, s, D)
    tokens = tokens + state["pos_embed_spatial"][0][None, None]
    tokens = (tokens + state["pos_embed_temporal"][0][None, :, None]).flatten(1, 2)
    angles = t.double()[:, None] * torch.exp(-torch.arange(128).double() * (9.210340371976184 / 128))
    c = torch.cat([angles.cos(), angles.sin()], dim=1)
    c = linear(state, "t_embedder.mlp.2", functional.silu(linear(state, "t_embedder.mlp.0", c)))
    table = state.get("y_embedder.embedding_table.weight")
    c = c + (table[y] if table is not None else linear(state, "y_embedder.output_projection", y))
    for n in range(LAYERS):
        name = f"blocks.{n}"
        mod = linear(state, f"{name}.adaLN_modulation.1", functional.silu(c))[:, None].chunk(6, -1)
        q, k, v = linear(state, f"{name}.attn.qkv", normed(tokens) * (1 + mod[1]) + mod[0]).chunk(3, -1)
        heads = [part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for part in (q, k, v)]
        weights = (heads[0] @ heads[1].transpose(2, 3) / HEAD_DIM**0.5).softmax(-1)
        mixed = (weights @ heads[2]).transpose(1, 2).flatten(2)
        tokens = tokens + mod[2] * linear(state, f"{name}.attn.proj", mixed)
        hidden = linear(state, f"{name}.mlp.fc1", normed(tokens) * (1 + mod[4]) + mod[3])
        hidden = functional.gelu(hidden, approximate="tanh")
        tokens = tokens + mod[5] * linear(state, f"{name}.mlp.fc2", hidden)
    shift, scale = linear(state, "final_layer.adaLN_modulation.1", functional.silu(c)).chunk(2, -1)
    output = linear(state, "final_layer.linear", normed(tokens) * (1 + scale[:, None]) + shift[:, None])
    output = output.reshape(len(x), *grid, *patch, 8)
    return torch.einsum("nthwrpqc->nctrhpwq", output).reshape(len(x), 8, *x.shape[2:])


def converted(state: State, config_values: dict[str, Any]) -> Any:
    model: Any = VideoDiTTransformer3DModel.from_config(config_values)
    weights = convert_opendit(state, config_values)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
    return model


def inputs(patch_t: int = 1, text: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three rows that differ in everything; one is of the null class."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(3, 4, 3 * patch_t, 6, 10, generator=generator, dtype=torch.float64)
    t = torch.tensor([0, 437, 999])
    text_rows = torch.randn(3, TEXT, generator=generator, dtype=torch.float64)
    return x, t, text_rows if text else torch.tensor([4, 0, CLASSES])


def condition(y: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pooled_projections": y.float()} if y.is_floating_point() else {"class_labels": y}


CASES = [(1, False), (2, False), (1, True)]


@pytest.mark.parametrize(("patch_t", "text"), CASES)
def test_a_converted_model_computes_what_opendits_does(patch_t: int, text: bool) -> None:
    """Values and the gradients of every weight, against fp64."""
    state = opendit_state(patch_t, text)
    model = converted(state, config(patch_t, text))
    x, t, y = inputs(patch_t, text)
    weights = torch.randn(3, 8, *x.shape[2:], generator=torch.Generator().manual_seed(1))
    trained = {name: value for name, value in state.items() if "pos_embed" not in name}
    leaves = {name: value.clone().requires_grad_() for name, value in trained.items()}
    expected = reference({**state, **leaves}, x, t, y)
    (expected * weights).sum().backward()
    output = model(x.float(), t, **condition(y)).sample
    torch.testing.assert_close(output.double(), expected, rtol=2e-4, atol=2e-4)
    (output * weights).sum().backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    ours = convert_opendit({**gradients, **tables(3, 3, 5)}, config(patch_t, text))
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        scale = float(ours[name].abs().max())
        off = float((parameter.grad.double() - ours[name]).abs().max())
        # A softmax does not see its keys' bias, whose exact gradient is zero.
        assert off < 1e-4 * scale + 1e-6 * largest, (name, off / scale)
        assert scale > 1e-3 * largest or name.endswith("to_k.bias"), name


def test_conversion_keeps_every_tensor_but_the_text_encoder_and_tables() -> None:
    state = opendit_state(text=True)
    kept = [t for name, t in state.items() if "pos_embed" not in name and not name.startswith(CLIP_PREFIX)]
    converted = convert_opendit(state, config(text=True))
    assert sum(t.numel() for t in converted.values()) == sum(t.numel() for t in kept)


def test_conversion_lists_all_that_is_wrong() -> None:
    state = opendit_state()
    state["blocks.0.attn.q_norm.weight"] = torch.ones(HEAD_DIM)
    del state["blocks.1.mlp.fc1.bias"]
    state["final_layer.linear.bias"] = torch.zeros(5)
    state["pos_embed_temporal"] = 1.01 * state["pos_embed_temporal"]
    state["blocks.7.attn.proj.bias"] = torch.zeros(WIDTH)
    with pytest.raises(DitLoraError) as error:
        convert_opendit(state, config())
    message = str(error.value)
    assert "blocks.0.attn.q_norm.weight: VDiT has no such tensor" in message
    assert "transformer_blocks.1.ff.net.0.proj.bias: missing" in message
    assert "proj_out.bias: shape; got (5,), the config makes (32,)" in message
    assert "pos_embed_temporal: is not the table of sines; off by 0.01" in message
    assert "transformer_blocks.7.attn.to_out.0.bias: not of this model" in message
    with pytest.raises(DitLoraError, match=r"got \(1, 15, 24\), the config makes \(1, 60, 24\)"):
        convert_opendit(opendit_state(), config(sample_height=12, sample_width=20))


def test_tables_that_were_cast_with_the_model_are_known() -> None:
    """OpenDiT keeps them as buffers, in bf16 with the rest."""
    state = {name: tensor.bfloat16() for name, tensor in opendit_state().items()}
    placed = convert_opendit(state, config())
    assert {tensor.dtype for tensor in placed.values()} == {torch.bfloat16}


def test_positions_are_the_tables_of_any_shape_and_no_cast_rounds_them() -> None:
    model: Any = VideoDiTTransformer3DModel.from_config(config()).to(torch.bfloat16)
    assert not list(model.buffers())
    for frames, height, columns in ((1, 3, 5), (5, 1, 7), (3, 3, 5)):
        state = tables(frames, height, columns)
        expected = (state["pos_embed_temporal"][0][:, None] + state["pos_embed_spatial"]).flatten(0, 1)
        table = sincos_positions(WIDTH, frames, height, columns, torch.device("cpu"))
        assert table.dtype is torch.float32
        torch.testing.assert_close(table.double(), expected, rtol=0, atol=1e-7)


def test_a_new_model_is_initialised_as_dit() -> None:
    """adaLN-zero: no output, and blocks that add nothing; queries as rows of one fused matrix."""
    torch.manual_seed(0)
    model: Any = VideoDiTTransformer3DModel.from_config(config(num_attention_heads=8, num_classes=101))
    x, t, y = inputs()
    assert not model(x.float(), t, class_labels=y).sample.any()
    for module in model.modules():
        if isinstance(module, AdaLayerNorm):
            assert not module.linear.weight.any()
    width = 64
    bound = (6 / (width + 3 * width)) ** 0.5
    block = model.transformer_blocks[0]
    for part in (block.attn.to_q, block.attn.to_k, block.attn.to_v):
        assert 0.95 * bound < part.weight.abs().max() <= bound
    bound = (6 / (width + width)) ** 0.5
    assert 0.95 * bound < block.attn.to_out[0].weight.abs().max() <= bound
    bound = (6 / (width + 16)) ** 0.5  # patches of 1 x 2 x 2 x 4 channels
    assert 0.95 * bound < model.patch_embed.proj.weight.abs().max() <= bound
    assert model.class_embed is not None
    assert 0.018 < model.class_embed.weight.std() < 0.022
    assert 0.018 < model.time_embed.linear_1.weight.std() < 0.022


def test_checkpointing_changes_no_bit_of_values_or_gradients() -> None:
    x, t, y = inputs()
    runs = []
    for checkpointing in (False, True):
        model = converted(opendit_state(), config())
        if checkpointing:
            model.enable_gradient_checkpointing()
        output = model(x.float(), t, class_labels=y).sample
        output.square().sum().backward()
        runs.append([output, *(p.grad for p in model.parameters())])
    for plain, checkpointed in zip(*runs, strict=True):
        assert torch.equal(plain, checkpointed)


def test_saved_and_loaded_it_is_the_same_model(tmp_path: Path) -> None:
    model = converted(opendit_state(), config())
    model.save_pretrained(tmp_path)
    loaded: Any = VideoDiTTransformer3DModel.from_pretrained(tmp_path)
    x, t, y = inputs()
    with torch.no_grad():
        expected = model(x.float(), t, class_labels=y).sample
        assert torch.equal(loaded(x.float(), t, class_labels=y).sample, expected)
        half: Any = VideoDiTTransformer3DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
        rounded = half(x.bfloat16(), t, class_labels=y).sample
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected, rtol=0.1, atol=0.15)


def test_modulation_in_bf16_is_rounded_once() -> None:
    """Against fp64, every entry is within one rounding step at its magnitude."""
    generator = torch.Generator().manual_seed(0)
    model: Any = VideoDiTTransformer3DModel.from_config(config())
    tokens = (3 + torch.randn(2, 15, WIDTH, generator=generator)).bfloat16()
    shift, scale = (torch.randn(2, WIDTH, generator=generator).bfloat16() for _ in range(2))
    exact = normed(tokens.double()) * (1 + scale.double()[:, None]) + shift.double()[:, None]
    ours = model.norm_out(tokens, shift, scale).double()
    assert bool(((ours - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all())


def test_wrong_conditions_and_shapes_are_refused() -> None:
    with pytest.raises(DitLoraError, match="give num_classes or text_dim"):
        VideoDiTTransformer3DModel.from_config({**config(), "text_dim": 3})
    with pytest.raises(DitLoraError, match="multiple of 4; got 1 heads of 6"):
        VideoDiTTransformer3DModel.from_config(config(num_attention_heads=1, attention_head_dim=6))
    model: Any = VideoDiTTransformer3DModel.from_config(config(patch_t=2))
    x, t, y = inputs()
    with pytest.raises(DitLoraError, match=r"do not divide into patches of \(2, 2, 2\)"):
        model(x.float(), t, class_labels=y)
    with pytest.raises(DitLoraError, match="conditioned on class_labels and nothing else"):
        model(x.float()[:, :, :2], t, pooled_projections=torch.zeros(3, 7))
