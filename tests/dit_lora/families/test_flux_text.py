"""FLUX.1's and FLUX.2's text is their pipelines': tokens, layers, templates, and what the cache is keyed by."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, Flux2Pipeline
from flux_cases import CPU, every_variant, open_checkpoint
from tokenizers.processors import TemplateProcessing

from dit_lora.commands.caption import shorten_caption
from dit_lora.config.data import VideoShape
from dit_lora.families.captions import compute_caption_token_limit
from dit_lora.families.flux2.checkpoint import load_tokenizer


@every_variant
def test_captions_are_encoded_as_the_pipeline_does_whatever_their_neighbours(
    tiny_checkpoints: dict[str, Path], variant: str
) -> None:
    """All have the same length; the bf16 that is asked for is that of the cache."""
    path = tiny_checkpoints[variant]
    checkpoint, pipeline = open_checkpoint(path), DiffusionPipeline.from_pretrained(path)
    captions = ["A Red cat on\na mat", "", "fish"]
    encoded = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(captions)
    spec = checkpoint.encoders.text_spec(torch.float32)
    assert {n: (t.shape[1:], t.dtype) for n, t in encoded.items()} == spec
    for row, caption in enumerate(captions):
        with torch.no_grad():
            stock = pipeline.encode_prompt(caption)
        for tensor, theirs in zip(encoded.values(), stock, strict=False):
            assert torch.equal(tensor[row], theirs[0])
    assert not torch.equal(encoded["prompt_embeds"][0], encoded["prompt_embeds"][2])
    half = checkpoint.encoders.load_text_encoder(torch.bfloat16, CPU)(captions)
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("variant", "end"), [("flux2-klein", 6), ("flux2-dev", 1)])
def test_the_chat_template_leaves_a_caption_the_room_that_is_said(
    tiny_checkpoints: dict[str, Path], variant: str, end: int
) -> None:
    """A token more, and the end of the template is cut off."""
    checkpoint = open_checkpoint(tiny_checkpoints[variant])
    limit, pipeline = (
        checkpoint.encoders.load_text_limit(),
        checkpoint.encoders.load_text_pipeline(torch.float32, CPU),
    )
    token_ids: list[list[int]] = []
    pipeline.text_encoder.register_forward_pre_hook(
        lambda _m, _args, kwargs: token_ids.append(kwargs["input_ids"][0].tolist()),
        with_kwargs=True,
    )
    for length in (1, limit.max_tokens, limit.max_tokens + 1):
        pipeline.encode_prompt("a" * length)
    short, full, over = token_ids
    pad = limit.tokenizer.pad_token_id
    template = [token for token in short if token != pad]
    assert full.count(pad) == over.count(pad) == 0
    assert full[-end:] == template[-end:]
    assert over[-end:] == full[-end - 1 : -1] != full[-end:]


def test_special_tokens_that_each_caption_is_counted_with_take_no_room(tiny_checkpoints: dict[str, Path]) -> None:
    """The template has its own beginning, and the tokenizer puts one before every text."""
    tokenizer = load_tokenizer(open_checkpoint(tiny_checkpoints["flux2-dev"]).info)
    plain = compute_caption_token_limit(Flux2Pipeline, tokenizer, 512)
    begin = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin[0]} $A", pair=f"{begin[0]} $A $B", special_tokens=[begin]
    )
    assert len(tokenizer("fish").input_ids) == 1 + len("fish")
    limit = compute_caption_token_limit(Flux2Pipeline, tokenizer, 512)
    assert limit.max_tokens == plain.max_tokens + 1
    fitting = "a" * plain.max_tokens
    assert shorten_caption(fitting, limit) == (fitting, False)
    assert shorten_caption(fitting + "a", limit) == ("", True)


def test_a_processors_text_is_the_tokenizers(tiny_checkpoints: dict[str, Path]) -> None:
    """dev is published with a processor of pictures around its tokenizer, which here is loaded without it."""
    from transformers import AutoTokenizer
    from transformers.processing_utils import ProcessorMixin

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints["flux2-dev"] / "tokenizer")
    pipeline = DiffusionPipeline.from_pretrained(tiny_checkpoints["flux2-dev"])
    single_embeds = pipeline.encode_prompt("a cat, [IMG] of one")[0]
    pipeline.tokenizer = ProcessorMixin.__new__(ProcessorMixin)
    pipeline.tokenizer.tokenizer = tokenizer
    pipeline.tokenizer.chat_template = tokenizer.chat_template
    assert torch.equal(pipeline.encode_prompt("a cat, [IMG] of one")[0], single_embeds)


@pytest.mark.parametrize("variant", ["flux2-klein", "flux2-dev"])
def test_what_text_depends_on_is_in_its_cache_key(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    facts = open_checkpoint(tiny_checkpoints[variant]).encoders.text_cache_key()
    assert facts["layers"] == ([9, 18, 27] if variant == "flux2-klein" else [10, 20, 30])
    assert facts["tokens"] == 512
    assert ("reasons about image" in str(facts["system_message"])) == (variant == "flux2-dev")


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_unequal_captions_is_one_call_of_the_pipeline(
    tiny_checkpoints: dict[str, Path], variant: str, dtype: torch.dtype
) -> None:
    """Bit for bit, in bf16 too, where the timestep's rounding shows."""
    path = tiny_checkpoints[variant]
    checkpoint = open_checkpoint(path)
    captions = ("a cat", "", "a longer caption, of a green square below a blue disc")
    text = checkpoint.encoders.load_text_encoder(dtype, CPU)(captions)
    pipeline = checkpoint.sampler.pipeline(dtype, text=False)
    pipeline.set_progress_bar_config(disable=True)
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    pipeline.transformer.register_forward_hook(
        lambda _m, _args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    pipeline(
        **checkpoint.sampler.prompt_kwargs(text),
        **checkpoint.sampler.shape_kwargs(VideoShape(1, 48, 80)),
        num_inference_steps=3,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(1),
    )
    transformer = checkpoint.denoiser.load_transformer(dtype).eval()
    batch = {"latent_mean": torch.empty(3, 4, 6, 10), **text}
    assert len(calls) == 3
    for (call, expected), t in zip(calls, pipeline.scheduler.timesteps, strict=True):
        with torch.no_grad():
            prediction = checkpoint.denoiser.predict(transformer, call["hidden_states"], t.repeat(3), batch)
        assert prediction.dtype is expected.dtype is dtype
        assert torch.equal(prediction, expected)
    assert len({tuple(row.flatten().tolist()) for row in expected}) == 3
