"""VideoChat2 in training: dtypes, checkpoints, adapters, gradient checkpointing, stochastic depth, new queries."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from videochat2_reference import TILE, tiny_batch, tiny_config, tiny_model

from dit_lora.models.videochat2.configuration import QFORMER_DEFAULTS, VideoChat2Config
from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration
from dit_lora.models.videochat2.qformer import (
    VideoChat2QFormerLayer,
    VideoChat2QFormerOutput,
    VideoChat2QFormerSelfAttention,
)
from dit_lora.models.videochat2.vision import (
    DropPath,
    VideoChat2VisionAttention,
    VideoChat2VisionBlock,
    build_position_table,
)

DROPOUT = {
    "vision_config": {"drop_path_rate": 0.3},
    "qformer_config": {
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.2,
        "drop_path_rate": 0.3,
    },
}


def test_a_saved_model_loads_equal(tmp_path: Path) -> None:
    config = tiny_config("phi3", legacy=True, add_global=False)
    model = tiny_model(config)
    model.save_pretrained(tmp_path)
    loaded = VideoChat2ForConditionalGeneration.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert isinstance(loaded.config, VideoChat2Config)
    keys = (
        "vision_config",
        "qformer_config",
        "legacy",
        "add_global",
        "media_token_id",
        "tile_size",
    )
    assert all(getattr(loaded.config, key) == getattr(config, key) for key in keys)
    batch = tiny_batch(config)
    assert torch.equal(model(**batch).logits, loaded(**batch).logits)


def test_one_dtype_whatever_the_language_model_was_saved_in(tmp_path: Path) -> None:
    config = tiny_config(text_config={"dtype": "bfloat16"})
    model = VideoChat2ForConditionalGeneration(config)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = VideoChat2ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    model = tiny_model(tiny_config(text_config={"tie_word_embeddings": True}))
    model.save_pretrained(tmp_path)
    loaded = VideoChat2ForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_bf16_weights_leave_the_positions_fp32(tmp_path: Path) -> None:
    """Patches and positions are added in fp32 and the sum rounded once."""
    tiny_model(tiny_config()).save_pretrained(tmp_path)
    model = VideoChat2ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    captured: dict[str, torch.Tensor] = {}
    encoder = model.model.vision_encoder.encoder
    encoder.patch_embed.register_forward_hook(lambda _m, _i, output: captured.update(patches=output))
    encoder.blocks[0].register_forward_pre_hook(lambda _m, args: captured.update(tokens=args[0]))
    logits = model(**tiny_batch(model.config)).logits
    assert logits.dtype == torch.bfloat16
    assert torch.isfinite(logits).all()
    table = build_position_table(20, 3, 3, 2, torch.device("cpu"), pretrained_side=14)
    expected = (captured["patches"].float() + table).bfloat16()
    assert torch.equal(captured["tokens"], expected)
    assert not torch.equal(captured["patches"] + table.bfloat16(), expected)


@pytest.mark.parametrize("kind", ["vision", "qformer"])
def test_fp16_attention_survives_products_that_fp16_cannot_store(kind: str) -> None:
    """q.k reaches 1e5, beyond fp16's 65504; the original's product of q and k is infinite there."""
    torch.manual_seed(0)
    attention: nn.Module
    if kind == "vision":
        attention = VideoChat2VisionAttention(32, 1)
        weights = [attention.qkv.weight.data[:64]]
    else:
        sizes = QFORMER_DEFAULTS | {"hidden_size": 32, "num_attention_heads": 1}
        attention = VideoChat2QFormerSelfAttention(sizes, 32).eval()
        weights = [attention.query.weight.data, attention.key.weight.data]
    for weight in weights:
        weight.copy_(30 * torch.eye(32).repeat(len(weight) // 32, 1))
    tokens = 2.5 * torch.randn(2, 7, 32)
    inputs = (tokens,) if kind == "vision" else (tokens, tokens, None)
    assert (30 * tokens @ (30 * tokens).mT).abs().max() > 1e5
    expected = attention(*inputs)
    half = attention.half()(*(x if x is None else x.half() for x in inputs))
    torch.testing.assert_close(half.float(), expected, atol=2e-2, rtol=1e-2)


def test_checkpointing_changes_no_bit_with_dropout() -> None:
    """Every block of all three networks runs again in backward; loss and gradients are those of the plain run."""
    model = tiny_model(tiny_config(**DROPOUT)).train()
    batch = tiny_batch(model.config, 3, TILE, 2 * TILE)
    labels = batch["input_ids"].clamp(max=70)
    blocks = (VideoChat2VisionBlock, VideoChat2QFormerLayer, MistralDecoderLayer)
    runs: list[list[torch.Tensor]] = []
    entered: list[nn.Module] = []
    for block in (m for m in model.modules() if isinstance(m, blocks)):
        # A layer's own hooks stay outside of its checkpoint.
        next(block.children()).register_forward_pre_hook(lambda module, _: entered.append(module))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(3)
        loss = model(**batch, labels=labels, use_cache=False).loss
        loss.backward()
        runs.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert len(entered) == 3 * len(set(entered)) == 3 * (3 + 3 + 2)
    assert all(torch.equal(plain, checkpointed) for plain, checkpointed in zip(*runs, strict=True))
    torch.manual_seed(4)
    assert model(**batch, labels=labels, use_cache=False).loss != runs[0][0]


def test_stochastic_depth_drops_whole_branches_of_samples() -> None:
    torch.manual_seed(0)
    drop = DropPath(0.25)
    branch = torch.randn(4000, 3, 2)
    assert torch.equal(drop.eval()(branch), branch)
    dropped = drop.train()(branch)
    is_retained = dropped.flatten(1).any(1)
    assert abs(is_retained.float().mean() - 0.75) < 0.03
    torch.testing.assert_close(dropped[is_retained], branch[is_retained] / 0.75)


def test_stochastic_depth_drops_every_branch_and_no_residual() -> None:
    """With all branches dropped a vision block returns its input, and a Q-Former branch its normed residual."""
    torch.manual_seed(0)
    almost_surely = 1 - 1e-9
    tokens = torch.randn(2, 5, 20)
    block = VideoChat2VisionBlock(20, 2, 2.0, almost_surely)
    assert torch.equal(block.train()(tokens), tokens)
    assert not torch.equal(block.eval()(tokens), tokens)
    sizes = QFORMER_DEFAULTS | {"hidden_size": 20, "hidden_dropout_prob": 0.5}
    output = VideoChat2QFormerOutput(7, sizes, 1e-6, almost_surely).train()
    assert torch.equal(output(torch.randn(2, 5, 7), tokens), output.LayerNorm(tokens))


def test_stochastic_depth_grows_with_depth() -> None:
    """Over all blocks of the pretrained encoder (the last block is not built) and over the Q-Former's layers."""
    model = VideoChat2ForConditionalGeneration(tiny_config(**DROPOUT)).model
    blocks = [block.drop_path.rate for block in model.vision_encoder.encoder.blocks]
    assert blocks == pytest.approx([0.0, 0.1, 0.2])
    rates = [{m.rate for m in layer.modules() if isinstance(m, DropPath)} for layer in model.qformer.encoder.layer]
    assert [len(values) for values in rates] == [1, 1, 1]
    assert [values.pop() for values in rates] == pytest.approx([0.0, 0.15, 0.3])
    layers = [m for m in model.qformer.modules() if isinstance(m, VideoChat2QFormerLayer)]
    assert ["crossattention" in dict(layer.named_children()) for layer in layers] == [1, 0, 1]


def test_queries_that_a_checkpoint_lacks_are_drawn_and_not_zero(tmp_path: Path) -> None:
    """A stage-2 checkpoint has no extra queries; stage 3 begins with N(0, 0.02)."""
    before = tiny_model(tiny_config(num_extra_query_tokens=0))
    assert "model.extra_query_tokens" not in before.state_dict()
    assert torch.isfinite(before(**tiny_batch(before.config)).logits).all()
    before.save_pretrained(tmp_path)
    torch.manual_seed(0)
    after = VideoChat2ForConditionalGeneration.from_pretrained(tmp_path, config=tiny_config(num_extra_query_tokens=50))
    queries = after.model.extra_query_tokens
    assert queries.shape == (1, 50, 18)
    assert queries.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(after.model.query_tokens, before.model.query_tokens)


def test_zero_queries_have_a_sane_gradient_without_legacy() -> None:
    """LayerNorm of a constant row has the gradient 1/sqrt(eps): 1e6 with the original's 1e-12."""
    norms = {}
    for legacy in (False, True):
        model = tiny_model(tiny_config(legacy=legacy))
        model.model.extra_query_tokens.data.zero_()
        batch = tiny_batch(model.config)
        model(**batch, labels=batch["input_ids"].clamp(max=70)).loss.backward()
        gradient = model.model.extra_query_tokens.grad
        assert torch.isfinite(gradient).all()
        norms[legacy] = gradient.norm().item()
    assert norms[True] > 1e4
    assert norms[False] < 300
    fresh = VideoChat2ForConditionalGeneration(tiny_config(legacy=True))
    assert fresh.model.extra_query_tokens.std().item() == pytest.approx(0.02, rel=0.5)


def test_peft_adapters_attach_save_and_load(tmp_path: Path) -> None:
    """LoRA on all three networks, the fused qkv among them."""
    config = tiny_config()
    model, batch = tiny_model(config), tiny_batch(config)
    plain = model(**batch).logits
    targets = ["qkv", "query", "projection", "q_proj", "lm_head"]
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    adapted = model(**batch).logits
    assert (adapted - plain).abs().max() > 1e-2
    adapted.square().mean().backward()
    lora = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in lora} == set(targets)
    assert all(parameter.grad.abs().sum() > 0 for parameter in lora.values())
    model.save_pretrained(tmp_path)
    reloaded = tiny_model(config)
    reloaded.load_adapter(str(tmp_path))
    torch.testing.assert_close(reloaded(**batch).logits, adapted, atol=1e-5, rtol=0)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in reloaded.state_dict().items())
