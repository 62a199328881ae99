"""Tiny VideoChat2 checkpoints: the same bytes from one seed, small, and with tokenizers that lose nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from dit_lora.errors import DitLoraError
from dit_lora.families.videochat2 import FAMILY
from dit_lora.families.videochat2.tiny import VARIANTS
from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration

END = {"mistral": "</s>", "vicuna": "</s>", "phi3": "<|endoftext|>"}
TEXT = "[INST] <Video></Video> The video contains 4 frames sampled at 0.1, 2.5 seconds. [/INST]"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videochat2")
    for variant in VARIANTS:
        FAMILY.build_tiny_checkpoint(variant, root / variant, 0)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_seed_gives_the_same_bytes_and_another_seed_other_weights(tiny: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    FAMILY.build_tiny_checkpoint("videochat2-hd", tmp_path / "again", 0)
    FAMILY.build_tiny_checkpoint("videochat2-hd", tmp_path / "other", 1)
    assert torch.equal(torch.get_rng_state(), state)
    first_files, other_files = contents(tiny / "videochat2-hd"), contents(tmp_path / "other")
    assert contents(tmp_path / "again") == first_files
    assert {name for name in first_files if first_files[name] != other_files[name]} == {"model.safetensors"}
    assert "qformer_tokenizer/tokenizer.json" in first_files


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_small_and_says_something_else_of_another_picture(variant: str, tiny: Path) -> None:
    files = contents(tiny / variant)
    assert sum(len(data) for data in files.values()) < 1_000_000
    model: Any = VideoChat2ForConditionalGeneration.from_pretrained(tiny / variant).eval()
    assert model.config.prompt_format == VARIANTS[variant]
    tokenizer = AutoTokenizer.from_pretrained(tiny / variant)
    reader = AutoTokenizer.from_pretrained(tiny / variant / "qformer_tokenizer")
    size = (32, 64) if variant == "videochat2-hd" else (32, 32)
    media = [model.config.media_token_id] * model.config.num_media_tokens(*size)
    ids = torch.tensor([[1, *media, *tokenizer(TEXT, add_special_tokens=False).input_ids]] * 2)
    generator = torch.Generator().manual_seed(3)
    logits = model(
        input_ids=ids,
        pixel_values=torch.randn((2, 4, 3, *size), generator=generator),
        instruction_ids=torch.tensor([reader("Watch the video.").input_ids] * 2),
    ).logits
    assert logits.shape == (2, ids.shape[1], len(tokenizer))
    assert float((logits[0, -1] - logits[1, -1]).detach().abs().max()) > 0.05
    # Parameters are as a trained model's: no bias at zero, no norm's weight at one.
    assert not [name for name, p in model.named_parameters() if not p.any() or bool((p == 1).all())]


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_tokenizer_loses_nothing(variant: str, tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny / variant)
    for text in (TEXT, "###Human: What?\n###Assistant: Ünïcode 漢字 🎬\t tab"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
        assert tokenizer(text).input_ids == [tokenizer.bos_token_id, *ids]
    kind = VARIANTS[variant]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<s>",
        END[kind],
        END[kind],
    )
    word_tokens = tokenizer.tokenize("the video contains a red ball")
    assert word_tokens == ["▁the", "▁video", "▁contains", "▁a", "▁red", "▁ball"]
    if kind == "phi3":  # as the published one: a control token takes the white space after it
        ids = tokenizer("<|user|>\nWhat<|end|>\n<|assistant|>\na", add_special_tokens=False).input_ids
        tokens = tokenizer.convert_ids_to_tokens(ids)
        assert [t for t in tokens if t.startswith("<")] == ["<|user|>", "<|end|>", "<|assistant|>"]


def test_its_qformer_tokenizer_reads_every_ascii_text(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny / "videochat2-phi3" / "qformer_tokenizer")
    text = "Watch the video, then (A) answer: x1 = 2.5?"
    tokens = tokenizer.tokenize(text)
    assert tokenizer.unk_token not in tokens
    assert tokens[:3] == ["watch", "the", "video"]
    assert tokenizer.bos_token == "[DEC]"
    assert tokenizer.bos_token_id == len(tokenizer) - 1
    shortened = tokenizer(text, truncation=True, max_length=6).input_ids
    assert tokenizer.decode(shortened).endswith("5? [SEP]")


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match="unknown variant 'videochat2'; choose one of videochat2-mistral"):
        FAMILY.build_tiny_checkpoint("videochat2", tmp_path / "out", 0)
    assert not (tmp_path / "out").exists()
