"""A mask of captions is looked at on the host, and only what it makes goes to the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dit_lora.config.recipe import ModelConfig
from dit_lora.data.loading.batch import Batch
from dit_lora.families import get_family
from dit_lora.families.captions import build_text_attention_bias, trim_text_padding

META = torch.device("meta")


class Asked(nn.Module):
    """A transformer that notes what it is asked, without values."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        self.asked = kwargs
        return (torch.zeros(()),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_the_bias_is_what_the_stock_transformers_make_of_a_mask(dtype: torch.dtype, kind: torch.dtype) -> None:
    mask = (torch.rand(9, 3, generator=torch.Generator().manual_seed(0)) > 0.4).to(kind).T
    assert not mask.is_contiguous()
    bias = build_text_attention_bias(mask, torch.zeros(3, 9, 4, dtype=dtype))
    assert bias is not None
    assert torch.equal(bias, ((1 - mask.to(dtype)) * -10000.0).unsqueeze(1))
    assert bias.dtype is dtype
    assert build_text_attention_bias(torch.ones(3, 9, dtype=kind), torch.zeros(3, 9, 4, dtype=dtype)) is None


def test_text_is_cut_to_the_longest_caption_of_the_batch() -> None:
    """A slice, without a copy; the mask of what is left, in which shorter captions have pads."""
    embeddings = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(3, 9, dtype=torch.int64)
    for row, tokens in enumerate((2, 5, 1)):
        mask[row, :tokens] = 1
    cut, kept_mask = trim_text_padding(embeddings, mask)
    assert torch.equal(cut, embeddings[:, :5])
    assert cut.data_ptr() == embeddings.data_ptr()
    assert kept_mask is not None
    assert torch.equal(kept_mask, mask[:, :5].bool())


def test_pads_in_the_middle_are_left_out_where_no_caption_has_a_token() -> None:
    embeddings = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(2)).transpose(0, 1)
    embeddings = embeddings.transpose(0, 1)
    mask = torch.tensor([[1, 1, 0, 0, 0, 1], [1, 0, 0, 1, 0, 1]], dtype=torch.bool)
    cut, kept_mask = trim_text_padding(embeddings, mask)
    assert torch.equal(cut, embeddings[:, [0, 1, 3, 5]])
    assert kept_mask is not None
    assert torch.equal(kept_mask, mask[:, [0, 1, 3, 5]])


def test_captions_of_one_length_need_no_mask() -> None:
    embeddings = torch.randn(2, 6, 3)
    for columns in ([0, 1, 2], [0, 2, 5], list(range(6))):
        mask = torch.zeros(2, 6, dtype=torch.int64)
        mask[:, columns] = 1
        cut, kept_mask = trim_text_padding(embeddings, mask)
        assert torch.equal(cut, embeddings[:, columns])
        assert kept_mask is None


@pytest.mark.parametrize(("variant", "name"), [("sana-600m", "prompt_attention_mask"), ("latte", "prompt_mask")])
def test_the_mask_of_a_batch_stays_on_the_host_and_its_bias_does_not(
    tiny_checkpoints: dict[str, Path], variant: str, name: str
) -> None:
    family = get_family("latte" if variant == "latte" else "sana")
    checkpoint: Any = family.open(ModelConfig(family=family.name, path=str(tiny_checkpoints[variant])))
    text = {n: torch.zeros(2, *s, dtype=d) for n, (s, d) in checkpoint.encoders.text_spec(torch.bfloat16).items()}
    text[name][0, :7] = 1
    text[name][1, :5] = 1
    noisy = torch.zeros(2, 4, 3, 4, 6) if variant == "latte" else torch.zeros(2, 4, 4, 6)
    batch = Batch(("a", "b"), (1, 2), {"latent_mean": noisy, **text}).to(META)
    assert {n for n, t in batch.tensors.items() if t.device != META} == {name}

    model = Asked()
    checkpoint.denoiser.predict(model, batch.tensors["latent_mean"], torch.zeros(2, device=META), batch.tensors)
    tensors = {n: t for n, t in model.asked.items() if isinstance(t, torch.Tensor)}
    assert {t.device for t in tensors.values()} == {META}
    frames, tokens = (3, 7) if variant == "latte" else (1, 300)
    assert tensors["encoder_attention_mask"].shape == (2 * frames, 1, tokens)
