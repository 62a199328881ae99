"""Z-Image's captions are its pipeline's: tokens, layer, template, one length in the cache and their own in a call."""

from pathlib import Path

import torch
from diffusers import ZImagePipeline
from family_cases.subject import CPU
from z_image_cases import CAPTIONS, opened, some_batch

from dit_lora.data.loading.batch import Batch
from dit_lora.families.captions import unpad_captions


def test_the_mask_is_looked_at_on_the_host_alone(path: Path) -> None:
    """A step's masks stay there; to read one that lies on a device, the host would wait."""
    batch = Batch(("a", "b", "c"), (0, 1, 2), some_batch()).to(torch.device("meta"))
    assert batch.tensors["prompt_embeds"].is_meta
    tokens = unpad_captions(batch.tensors["prompt_embeds"], batch.tensors["prompt_attention_mask"])
    assert [(len(ids), ids.is_meta) for ids in tokens] == [(3, True), (512, True), (77, True)]


def test_captions_are_the_pipelines_and_the_callers_list_is_left_alone(path: Path) -> None:
    """`_encode_prompt` writes the chat template into the list that it is given: a second call would have it twice."""
    checkpoint = opened(path)
    captions = list(CAPTIONS)
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encoded = encode(captions)
    assert captions == list(CAPTIONS)
    second_encoding = encode(captions)
    assert all(torch.equal(second_encoding[name], tensor) for name, tensor in encoded.items())
    spec = checkpoint.encoders.text_spec(torch.float32)
    assert {n: (t.shape[1:], t.dtype) for n, t in encoded.items()} == spec
    pipeline = ZImagePipeline.from_pretrained(path)
    theirs = list(CAPTIONS)
    with torch.no_grad():
        for row, caption in enumerate(CAPTIONS):
            (stock,), _ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
            mask = encoded["prompt_attention_mask"][row]
            assert torch.equal(encoded["prompt_embeds"][row][mask], stock)
            assert not encoded["prompt_embeds"][row][~mask].any()
            assert not mask[len(stock) :].any()
        pipeline.encode_prompt(theirs, do_classifier_free_guidance=False)
    assert theirs[1] == "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    half = checkpoint.encoders.load_text_encoder(torch.bfloat16, CPU)(captions)
    assert half["prompt_embeds"].dtype is torch.bfloat16


def test_the_last_hidden_state_but_one_of_a_prompt_that_thinks_is_kept(path: Path) -> None:
    pipeline = ZImagePipeline.from_pretrained(path)
    tokens = pipeline.tokenizer.apply_chat_template(
        [{"role": "user", "content": "a cat"}],
        add_generation_prompt=True,
        enable_thinking=True,
        return_tensors="pt",
    )["input_ids"]
    with torch.no_grad():
        states = pipeline.text_encoder(tokens, output_hidden_states=True).hidden_states
    encoded = opened(path).encoders.load_text_encoder(torch.float32, CPU)(["a cat"])
    embeds = encoded["prompt_embeds"][0][encoded["prompt_attention_mask"][0]]
    assert len(states) == 4
    torch.testing.assert_close(embeds, states[2][0], rtol=1e-5, atol=1e-5)
    assert opened(path).encoders.text_cache_key()["tokens"] == 512


def test_the_chat_template_leaves_a_caption_the_room_that_is_said(path: Path) -> None:
    """A token more, and the end of the template is cut off."""
    checkpoint = opened(path)
    room, pipeline = (
        checkpoint.encoders.load_text_limit().max_tokens,
        checkpoint.encoders.load_text_pipeline(torch.float32, CPU),
    )
    token_ids: list[list[int]] = []
    pipeline.text_encoder.register_forward_pre_hook(
        lambda _m, _args, kwargs: token_ids.append(kwargs["input_ids"][0].tolist()),
        with_kwargs=True,
    )
    for length in (room, room + 1):
        pipeline.encode_prompt("a" * length, do_classifier_free_guidance=False)
    pad = pipeline.tokenizer.pad_token_id
    assert [len(ids) for ids in token_ids] == [512, 512]
    assert pad not in token_ids[0] + token_ids[1]
    assert token_ids[1][-1] == token_ids[0][-2]
    assert token_ids[1][-1] != token_ids[0][-1]


def test_several_prompts_have_an_empty_one_each(path: Path) -> None:
    checkpoint = opened(path)
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    prompt_kwargs = checkpoint.sampler.prompt_kwargs(encode(CAPTIONS[:2]), encode([""]))
    lengths = {name: [len(caption) for caption in captions] for name, captions in prompt_kwargs.items()}
    assert lengths == {"prompt_embeds": [37, 19], "negative_prompt_embeds": [19, 19]}
