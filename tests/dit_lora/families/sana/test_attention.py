"""Sana's linear attention: fp32 whatever autocast does, fp16's limit where a checkpoint relies on it."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import SanaPipeline, SanaTransformer2DModel
from diffusers.models.attention_processor import Attention, SanaLinearAttnProcessor2_0
from diffusers.models.transformers.transformer_sana_video import (
    SanaLinearAttnProcessor3_0,
    WanRotaryPosEmbed,
)
from family_cases.sana import saturating
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.diffusers_format import save_pipeline
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.families import get_family
from dit_lora.families.sana.attention import Fp32LinearAttention, SaturatingLinearAttention
from dit_lora.families.sana.checkpoint import is_trained_in_fp16
from dit_lora.numerics.precision import choose_precision
from dit_lora.numerics.saturation import FP16_MAX, has_fp16_saturation
from dit_lora.numerics.streams import RandomStreams

CPU = torch.device("cpu")
WIDTH, HEADS = 32, 2
Processor = Callable[..., torch.Tensor]


def layer(processor: Any, qk_norm: str | None, dtype: torch.dtype = torch.float32) -> Attention:
    generator = torch.Generator().manual_seed(4)
    attention = Attention(
        query_dim=WIDTH,
        heads=HEADS,
        kv_heads=HEADS if qk_norm else None,
        dim_head=WIDTH // HEADS,
        qk_norm=qk_norm,
        bias=False,
        processor=processor,
    )
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) + 0.1)
    return attention.to(dtype)


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """3 samples of 24 tokens, of different sizes."""
    generator = torch.Generator().manual_seed(5)
    scale = torch.tensor([0.5, 1.0, 3.0]).view(3, 1, 1)
    return (scale * torch.randn(3, 24, WIDTH, generator=generator)).to(dtype)


def rotary() -> dict[str, Any]:
    rope = WanRotaryPosEmbed(WIDTH // HEADS, (1, 2, 2), 16)
    return {"rotary_emb": rope(torch.zeros(1, 4, 2, 8, 6))}


KINDS = {
    "sana": (SanaLinearAttnProcessor2_0, None, dict),
    "sana-1.5": (SanaLinearAttnProcessor2_0, "rms_norm_across_heads", dict),
    "sana-video": (SanaLinearAttnProcessor3_0, "rms_norm_across_heads", rotary),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_without_autocast_it_is_the_stock_processor_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    """Values and gradients."""
    stock, qk_norm, extra = KINDS[kind]
    results = []
    for processor in (stock(), Fp32LinearAttention(stock())):
        attention, x = layer(processor, qk_norm, dtype), tokens(dtype).requires_grad_()
        result = attention(x, **extra())
        (result.float() * torch.linspace(-1, 2, WIDTH)).sum().backward()
        results.append([result, x.grad, *(p.grad for p in attention.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing_beyond_the_projections(kind: str) -> None:
    """Given the q, k and v that autocast computed, what reaches `to_out` is the stock processor's without it."""
    stock, qk_norm, extra = KINDS[kind]
    attention = layer(Fp32LinearAttention(stock()), qk_norm)
    outputs: dict[str, torch.Tensor] = {}
    output_inputs: list[torch.Tensor] = []
    for name in ("to_q", "to_k", "to_v", "norm_q", "norm_k"):
        if (module := getattr(attention, name)) is not None:
            module.register_forward_hook(lambda _m, _a, output, name=name: outputs.update({name: output}))
    attention.to_out[0].register_forward_pre_hook(lambda _m, args: output_inputs.append(args[0]))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(tokens(), **extra()).dtype is torch.bfloat16
    assert outputs["to_q"].dtype is torch.bfloat16

    def replayed(name: str) -> Any:
        return (lambda _x: outputs[name]) if name in outputs else None

    names = ("to_q", "to_k", "to_v", "norm_q", "norm_k")
    fake_attention = SimpleNamespace(heads=HEADS, to_out=[lambda x: x] * 2, **{name: replayed(name) for name in names})
    assert torch.equal(output_inputs[0], stock()(fake_attention, tokens(), **extra()))
    assert output_inputs[0].dtype is torch.float32


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Linear attention in fp64, token by token (arXiv 2410.10629, section 2.2)."""
    q, k, v = (t.double().unflatten(-1, (HEADS, -1)) for t in (q, k, v))
    weights = torch.einsum("bnhc,bmhc->bhnm", q.relu(), k.relu())
    attended = torch.einsum("bhnm,bmhc->bnhc", weights / weights.sum(-1, keepdim=True), v)
    return attended.flatten(-2)


@pytest.mark.parametrize(("wrap", "bound"), [(Fp32LinearAttention, 2e-6), (lambda p: p, 1.0)])
def test_under_autocast_it_is_the_fp64_result_and_the_stock_processor_is_not(
    wrap: Callable[[Any], Processor], bound: float
) -> None:
    attention = layer(wrap(SanaLinearAttnProcessor2_0()), None)
    outputs, recorded = {}, []
    for name in ("to_q", "to_k", "to_v"):
        getattr(attention, name).register_forward_hook(
            lambda _m, _a, output, name=name: outputs.update({name: output})
        )
    attention.to_out[0].register_forward_pre_hook(lambda _m, args: recorded.append(args[0]))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        attention(tokens())
    expected = exact(outputs["to_q"], outputs["to_k"], outputs["to_v"])
    error = ((recorded[0].double() - expected).abs().max() / expected.abs().max()).item()
    assert error < bound
    if bound == 1.0:
        assert error > 1e-3  # what autocast costs, so that the test above tells the two apart


def test_it_repeats_in_fp32_what_the_stock_processor_does_in_fp16() -> None:
    """Outputs beyond 65504 (the published checkpoints reach 1e6): the same values saturate, the others agree."""
    half = layer(SanaLinearAttnProcessor2_0(), None)
    with torch.no_grad():
        half.to_out[0].weight *= 3e4
    full = copy.deepcopy(half)
    full.set_processor(SaturatingLinearAttention(SanaLinearAttnProcessor2_0()))
    unpatched = copy.deepcopy(half)
    with torch.no_grad():
        fp16 = half.half()(tokens(torch.float16)).float()
        ours, unclamped = full(tokens()), unpatched(tokens())
    saturated = fp16.abs() == FP16_MAX
    assert 0.1 < saturated.float().mean() < 0.9
    assert unclamped.abs().max() > 3 * FP16_MAX
    assert ours.abs().max() == FP16_MAX
    torch.testing.assert_close(ours, fp16, rtol=0.02, atol=300)  # fp16's steps near 65504 are 32


@pytest.mark.parametrize(
    ("name", "dtype", "file", "expected"),
    [
        ("mine", torch.float16, "model.safetensors", True),
        ("mine", torch.float32, "model.fp16.safetensors", True),
        ("mine", torch.float32, "model.safetensors", False),
        ("mine", torch.bfloat16, "model.safetensors", False),
        ("Sana_600M_512px_diffusers", torch.float32, "model.safetensors", True),
        ("Sana_1600M_1024px_MultiLing_diffusers", torch.float32, "model.safetensors", True),
        ("Sana_1600M_1024px_BF16_diffusers", torch.float32, "model.safetensors", False),
        ("Sana_1600M_4Kpx_BF16_diffusers", torch.float32, "model.safetensors", False),
        ("SANA1.5_1.6B_1024px_diffusers", torch.float32, "model.safetensors", False),
    ],
)
def test_a_checkpoint_trained_in_fp16_is_known_by_its_files_or_its_published_name(
    tmp_path: Path, name: str, dtype: torch.dtype, file: str, expected: bool
) -> None:
    folder = tmp_path / name / "transformer"
    folder.mkdir(parents=True)
    (tmp_path / name / "model_index.json").write_text("{}")
    save_file({"weight": torch.ones(3, dtype=dtype)}, folder / file)
    for path in (tmp_path / name, f"owner/{name}", f"{tmp_path / name}/"):
        model = ModelConfig(family="sana", path=str(path))
        assert is_trained_in_fp16(tmp_path / name, model) is expected


def cached_batch(checkpoint: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    captions = [f"a thing, {index}" for index in range(2)]
    encode = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    images = [torch.randint(0, 256, (1, 3, 64, 96), generator=generator, dtype=torch.uint8) for _ in captions]
    text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(captions)
    return text | {"latent_mean": torch.stack([encode(image)["latent_mean"] for image in images])}


def steps(checkpoint: Any, transformer: Any, batch: dict[str, torch.Tensor], count: int) -> list[float]:
    """Losses of plain AdamW steps at learning rate 6e-6, ending with the first that is not finite."""
    attach_lora(transformer, LoraConfig(rank=4), get_family("sana").lora_targets, seed=0)
    trained = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=6e-6)
    losses = []
    for step in range(count):
        streams = RandomStreams(0, [2 * step, 2 * step + 1])
        loss = checkpoint.denoiser.losses(transformer, batch, streams).losses.mean()
        losses.append(loss.item())
        if not torch.isfinite(loss):
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.1)  # as Sana's own configs
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in trained) or not torch.isfinite(loss)
    return losses


@pytest.mark.thorough
def test_500_steps_at_6e_6_stay_finite_where_plain_fp16_does_not(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The published case (NVlabs/Sana issue 65), as far as a tiny model can show it.

    The checkpoint is the tiny fp16 one with weights scaled up until its attention saturates, as that of the
    published fp16 ones does. The plain path is the stock model in fp16 under fp16 autocast, as
    `--mixed_precision fp16` has it: its processor asks for fp32 and autocast takes it back, sums over the tokens
    overflow, and inf / inf is NaN. (In fp16 without autocast the stock processor keeps its fp32 part and its
    clamp, and stays finite.) Being scaled beyond the edge and not at it, this one fails at once, where users saw a
    stable time before.
    """
    path = saturating(tiny_checkpoints["sana-fp16"], tmp_path / "saturating")
    checkpoint: Any = get_family("sana").open(ModelConfig(family="sana", path=str(path)))
    batch = cached_batch(checkpoint)

    plain = SanaTransformer2DModel.from_pretrained(path, subfolder="transformer", dtype=torch.float16).requires_grad_(
        False
    )
    halves = {name: t.half() if "embeds" in name else t for name, t in batch.items()}
    with torch.autocast("cpu", dtype=torch.float16):
        failed = steps(checkpoint, plain, halves, 500)
    assert not torch.isfinite(torch.tensor(failed[-1]))

    policy = choose_precision("auto", CPU).dtype
    transformer = checkpoint.denoiser.load_transformer(policy)
    assert has_fp16_saturation(transformer)
    peaks = [
        (module, [])
        for module in transformer.modules()
        if isinstance(module, Attention) and isinstance(module.processor, SaturatingLinearAttention)
    ]
    for module, module_peaks in peaks:
        module.register_forward_hook(
            lambda _m, _a, output, peak_values=module_peaks: peak_values.append(output.abs().max().item())
        )
    losses = steps(checkpoint, transformer, batch, 500)
    assert len(losses) == 500
    assert torch.isfinite(torch.tensor(losses)).all()
    for _, module_peaks in peaks:
        assert max(module_peaks) == FP16_MAX  # it did saturate


def test_in_fp32_a_saturating_checkpoint_is_the_function_that_it_is_in_fp16(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """With the clamp. Without it the whole network computes another one."""
    path = saturating(tiny_checkpoints["sana-fp16"], tmp_path / "saturating")
    checkpoint: Any = get_family("sana").open(ModelConfig(family="sana", path=str(path)))
    batch = cached_batch(checkpoint)

    def losses(dtype: torch.dtype, transformer: Any) -> torch.Tensor:
        tensors = {name: t.to(dtype) if "embeds" in name else t for name, t in batch.items()}
        with torch.no_grad():
            return checkpoint.denoiser.losses(transformer, tensors, RandomStreams(0, [0, 1])).losses

    def stock(dtype: torch.dtype) -> Any:
        return SanaTransformer2DModel.from_pretrained(path, subfolder="transformer", dtype=dtype)

    in_fp16 = losses(torch.float16, stock(torch.float16))
    ours = losses(torch.float32, checkpoint.denoiser.load_transformer(torch.float32))
    unclamped = losses(torch.float32, stock(torch.float32))
    torch.testing.assert_close(ours, in_fp16, rtol=5e-3, atol=0)
    assert ((unclamped - in_fp16).abs() > 0.03 * in_fp16).any()


def test_sampling_in_the_stock_pipeline_saturates_too(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = saturating(tiny_checkpoints["sana-fp16"], tmp_path / "saturating")
    checkpoint = get_family("sana").open(ModelConfig(family="sana", path=str(path)))
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    assert isinstance(pipeline, SanaPipeline)
    assert has_fp16_saturation(pipeline.transformer)
    trained = get_family("sana").open(ModelConfig(family="sana", path=str(tiny_checkpoints["sana-600m"])))
    assert not has_fp16_saturation(trained.sampler.pipeline(torch.float32).transformer)
    assert not has_fp16_saturation(trained.denoiser.load_transformer(torch.float32))


def test_a_whole_pipeline_trained_from_it_still_saturates(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """It is stored in fp32 and has a name of its own, so its index says so; the stock pipeline loads it."""
    base = get_family("sana").open(ModelConfig(family="sana", path=str(tiny_checkpoints["sana-fp16"])))
    output_dir = tmp_path / "model"
    transformer = base.denoiser.load_transformer(torch.float32)
    save_pipeline(transformer, base.path, output_dir, {}, base.info.model_index_changes())
    reopened = get_family("sana").open(ModelConfig(family="sana", path=str(output_dir)))
    assert has_fp16_saturation(reopened.denoiser.load_transformer(torch.float32))
    assert not has_fp16_saturation(SanaPipeline.from_pretrained(output_dir).transformer)
    trained = get_family("sana").open(ModelConfig(family="sana", path=str(tiny_checkpoints["sana-600m"])))
    assert trained.info.model_index_changes() == {}
