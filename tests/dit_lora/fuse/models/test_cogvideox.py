"""CogVideoX on fused ops is the stock model: values, gradients, memory, checkpointing, and undone without a trace."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from fuse_checks import (
    IMPLEMENTATIONS,
    adapted,
    assert_equal,
    assert_no_worse,
    by,
    fuse_all,
    values,
)
from kernel_checks import saved_bytes
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.fuse import attention
from dit_lora.fuse.api import fuse, unfuse
from dit_lora.fuse.models import cogvideox
from dit_lora.fuse.patches import get_fusion
from dit_lora.guard.comparison.parity import find_first_difference
from dit_lora.guard.fallbacks import find_fallback, list_model_fallbacks

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2", "norm1.linear"]
OPS = ("lora_linear", "qk_norm_rope", "ada_norm")
HEADS, HEAD_DIM, TEXT = 2, 16, 5


@pytest.fixture(params=["rotary", "sincos"])
def inputs(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    return make_inputs(rotary=request.param == "rotary")


def make_inputs(*, rotary: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Two different samples of 3 latent frames of 4 x 6."""
    generator = torch.Generator().manual_seed(3)
    model_inputs: dict[str, Any] = {
        "hidden_states": torch.randn(2, 3, 4, 4, 6, generator=generator),
        "encoder_hidden_states": torch.randn(2, TEXT, 12, generator=generator),
    }
    model_inputs = {name: tensor.to(dtype).requires_grad_() for name, tensor in model_inputs.items()}
    model_inputs["timestep"] = torch.tensor([17, 803])
    if rotary:
        model_inputs["image_rotary_emb"] = get_3d_rotary_pos_embed(HEAD_DIM, ((0, 0), (2, 3)), (2, 3), temporal_size=3)
    return model_inputs


def build(
    *,
    rotary: bool = True,
    targets: list[str] = TARGETS,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
) -> nn.Module:
    torch.manual_seed(0)
    model = CogVideoXTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        in_channels=4,
        out_channels=4,
        time_embed_dim=10,
        text_embed_dim=12,
        num_layers=2,
        sample_width=6,
        sample_height=4,
        sample_frames=9,
        patch_size=2,
        max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=rotary,
    )
    return adapted(model, targets)


@pytest.fixture
def model(inputs: dict[str, torch.Tensor]) -> nn.Module:
    return build(rotary="image_rotary_emb" in inputs)


@pytest.fixture(autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """References, which are quick on a CPU, but where a test asks for kernels."""
    chosen = getattr(request, "param", "reference")
    with by(chosen, monkeypatch):
        yield chosen


def run(model: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    return values(model, lambda m: m(**inputs, return_dict=False), tensors)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_values_and_gradients_are_the_stock_models(model: nn.Module, inputs: dict[str, Any]) -> None:
    expected = run(model, inputs)
    fuse_all(model)
    assert set(get_fusion(model).get_active_ops()) == set(OPS)
    assert_equal(run(model, inputs), expected)


def test_every_weight_has_the_stock_models_gradient() -> None:
    model, inputs = build().requires_grad_(True), make_inputs()
    expected = run(model, inputs)
    assert_equal(run(fuse_all(model), inputs), expected, 5e-5)


@pytest.mark.parametrize("op", OPS)
def test_each_op_can_be_off_alone(op: str) -> None:
    model, inputs = build(), make_inputs()
    expected = run(model, inputs)
    fuse_all(model)
    with get_fusion(model).disable_op(op):
        assert_equal(run(model, inputs), expected)


def test_bf16_under_autocast_is_no_worse_than_the_stock_model() -> None:
    model, inputs = build(), make_inputs()
    exact = run(model, inputs)
    halved(model)
    lower = make_inputs(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        stock = run(model, lower)
        fused = run(fuse_all(model), lower)
    assert_no_worse(fused, stock, exact)


def halved(model: nn.Module) -> nn.Module:
    """bf16 base, fp32 adapters: the policy of a run."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return model


def test_undone_it_is_the_stock_model_bit_for_bit() -> None:
    model, inputs = build(), make_inputs()
    keys, before = list(model.state_dict()), [dict(vars(m)) for m in model.modules()]
    expected = run(model, inputs)
    fuse_all(model)
    assert list(model.state_dict()) == keys
    with get_fusion(model).use_stock_code():
        assert_equal(run(model, inputs), expected, 0.0)
    unfuse(model)
    assert_equal(run(model, inputs), expected, 0.0)
    patched_attributes = [set(vars(m)) - set(old) for m, old in zip(model.modules(), before, strict=True)]
    assert not any(patched_attributes), patched_attributes


def test_checkpointing_gives_the_same_gradients() -> None:
    model, inputs = fuse_all(build()), make_inputs()
    expected = run(model, inputs)
    model.enable_gradient_checkpointing()
    assert_equal(run(model, inputs), expected, 0.0)


def test_a_copy_is_fused_and_its_own() -> None:
    model, inputs = fuse_all(build()), make_inputs()
    copied = copy.deepcopy(model)
    expected = run(model, inputs)
    assert_equal(run(copied, inputs), expected, 0.0)
    unfuse(model)
    assert get_fusion(model) is None
    assert set(get_fusion(copied).get_active_ops()) == set(OPS)
    with torch.no_grad():
        next(p for p in copied.parameters() if p.requires_grad).add_(1.0)
    assert_equal(run(model, inputs), expected, 2e-5)


def test_a_block_compiles_whole() -> None:
    model, inputs = fuse_all(build()), make_inputs()
    expected = run(model, inputs)
    for block in model.transformer_blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    try:
        assert_equal(run(model, inputs), expected)
    finally:
        torch._dynamo.reset()


def block_bytes(model: nn.Module) -> float:
    """What a block's forward keeps for its backward, in units of one bf16 activation of all tokens."""
    generator = torch.Generator().manual_seed(5)
    rotary = get_3d_rotary_pos_embed(64, ((0, 0), (8, 8)), (8, 8), temporal_size=3)
    video = torch.randn(2, 3 * 64, 512, generator=generator).bfloat16().requires_grad_()
    text = torch.randn(2, 24, 512, generator=generator).bfloat16().requires_grad_()
    temb = torch.randn(2, 10, generator=generator).bfloat16()
    excluded = [*model.parameters(), *model.buffers(), *rotary, temb]
    block = model.transformer_blocks[0]
    with torch.autocast("cpu", torch.bfloat16):
        num_bytes = saved_bytes(lambda: block(video, text, temb, rotary), excluded)
    return num_bytes / (2 * (3 * 64 + 24) * 512 * 2)


def test_a_block_keeps_ten_activations() -> None:
    """kernels.md's plan is 10.1. A GPU's autocast makes the stock block keep 20.4, a CPU's norms stay in bf16."""
    model = halved(build(targets=["to_q", "to_k", "to_v", "to_out.0"], heads=8, head_dim=64))
    assert block_bytes(model) > 16.2
    assert block_bytes(fuse_all(model)) < 10.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_row_is_found_by_the_parity_probe(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 it may be smaller than rounding; the comparison in fp32 tells them apart."""
    model, inputs = fuse_all(build()), make_inputs(dtype=dtype)
    if dtype is torch.bfloat16:
        halved(model)
    joint_ada_norm = cogvideox.joint_ada_norm

    def wrong(streams: Any, *args: Any, **kwargs: Any) -> Any:
        rolled = [s._replace(scale=s.scale.roll(1, 0)) for s in streams]
        return joint_ada_norm(rolled, *args, **kwargs)

    def losses() -> torch.Tensor:
        return model(**inputs, return_dict=False)[0].float().flatten(1).square().mean(1)

    switch = find_fallback(list_model_fallbacks(model), "ada_norm")
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        assert find_first_difference(switch, losses, model) is None
        monkeypatch.setattr(cogvideox, "joint_ada_norm", wrong)
        difference = find_first_difference(switch, losses, model)
    assert difference is not None
    assert "transformer_blocks.0" in difference.module


def test_projections_that_diffusers_fused_are_refused() -> None:
    model = fuse_all(build())
    with pytest.raises(DitLoraError, match="drops the adapters of q, k and v"):
        model.fuse_qkv_projections()
    with pytest.raises(DitLoraError, match="can use silu_dwconv_glu"):
        fuse(model, {"silu_dwconv_glu": "on"})
    model.fuse_qkv_projections()
    with pytest.raises(DitLoraError, match="unfuse_qkv_projections"):
        fuse(model)


def each(stream: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A mutant of `joint_ada_norm`: every stream changed."""
    return lambda op: lambda streams, *a, **k: op([stream(s) for s in streams], *a, **k)


def first_row(table: torch.Tensor) -> torch.Tensor:
    return table[:1].expand_as(table)


MUTANTS = {
    "every sample by the first one's shift": (
        "joint_ada_norm",
        each(lambda s: s._replace(shift=first_row(s.shift))),
    ),
    "no gate": ("joint_ada_norm", each(lambda s: s._replace(gate=None))),
    "shift and scale swapped": (
        "joint_ada_norm",
        each(lambda s: s._replace(shift=s.scale, scale=s.shift)),
    ),
    "streams modulated by each other": (
        "joint_ada_norm",
        lambda op: (
            lambda streams, *a, **k: op(
                [s._replace(scale=o.scale) for s, o in zip(streams, streams[::-1], strict=True)],
                *a,
                **k,
            )
        ),
    ),
    "another eps": (
        "joint_ada_norm",
        lambda op: lambda *a, eps, **k: op(*a, eps=eps + 0.02, **k),
    ),
    "text rotated too": (
        "qk_norm_rope",
        lambda op: lambda *a, first, **k: op(*a, first=first - 1, **k),
    ),
    "rotated the other way": (
        "qk_norm_rope",
        lambda op: lambda x, w, b, cos, sin, **k: op(x, w, b, cos, -sin, **k),
    ),
    "no bias in the norm of q and k": (
        "qk_norm_rope",
        lambda op: lambda x, w, b, *a, **k: op(x, w, None, *a, **k),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_parity_probe_finds_mutants_at_run_time(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model and batch of the user's, with no test of the kernel in sight."""
    model, inputs = fuse_all(build()), make_inputs()
    name, mutate = MUTANTS[mutant]
    target_module = attention if name == "qk_norm_rope" else cogvideox
    monkeypatch.setattr(target_module, name, mutate(getattr(target_module, name)))

    def losses() -> torch.Tensor:
        return model(**inputs, return_dict=False)[0].flatten(1).square().mean(1)

    op = "ada_norm" if name == "joint_ada_norm" else name
    for switch in (op, "kernels"):
        assert find_first_difference(find_fallback(list_model_fallbacks(model), switch), losses, model)
