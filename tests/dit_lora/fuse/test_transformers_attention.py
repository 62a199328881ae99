"""Attention of Transformers' models: the accepted names, the guard's fallback, and the side of the padding.

What only a GPU can show: that flash-attn's own kernels agree (its package does not import without CUDA), and
that they are right for batches padded on the left.
"""

from collections import Counter
from typing import Any

import pytest
import tiny_chat_models as tiny
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dit_lora.errors import DitLoraError
from dit_lora.families.answer_losses import add_answer_losses
from dit_lora.fuse import transformers_attention
from dit_lora.fuse.api import fuse, unfuse
from dit_lora.fuse.patches import OPS
from dit_lora.fuse.transformers_attention import list_implementations
from dit_lora.guard.attention_backends import (
    measure_backend_parity,
    record_attention_calls,
    use_only_backend,
)
from dit_lora.guard.fallbacks import find_fallback, list_attention_fallbacks, list_model_fallbacks

OFF = dict.fromkeys(OPS, "off")
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Calls(TorchDispatchMode):
    """How often each op ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def logits(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def attention_ops(model: nn.Module, batch: dict[str, torch.Tensor]) -> Counter[str]:
    with Calls() as calls, torch.no_grad():
        model(**batch)
    return calls.ops


@pytest.mark.parametrize("name", ["mistral", "llava", "videochat2"])
def test_auto_is_sdpa_whose_backends_the_guard_switches(name: str) -> None:
    model = add_answer_losses(tiny.MODELS[name]().eval())
    fuse(model, OFF)
    assert {choice for _, choice in list_implementations(model)} == {"sdpa"}
    assert list_model_fallbacks(model) == []
    batch = tiny.batch(tiny.samples(name))
    with torch.no_grad():
        expected = model(**batch)
    assert attention_ops(model, batch)[FLASH]
    flash = find_fallback(list_attention_fallbacks(), "attention:flash")
    with flash.disable_temporarily(), torch.no_grad():
        assert not attention_ops(model, batch)[FLASH]
        torch.testing.assert_close(model(**batch), expected)
    with use_only_backend("math"):
        assert not attention_ops(model, batch)[FLASH]
    assert attention_ops(model, batch)[FLASH]


@pytest.mark.parametrize("name", tiny.MODELS)
def test_preflight_sees_their_calls_and_can_check_each(name: str) -> None:
    model = add_answer_losses(tiny.MODELS[name]().eval())
    with record_attention_calls() as calls, torch.no_grad():
        model(**tiny.batch(tiny.samples(name)))
    causal = [call for call in calls if call.is_causal]
    assert causal  # the language model's own
    assert all(call.mask is None for call in causal)
    assert all(call.enable_gqa for call in causal)  # 4 heads of queries, 2 of keys
    for call in calls:
        assert measure_backend_parity(call, "math").is_accurate, call
        assert measure_backend_parity(call, "flash").is_accurate, call


@pytest.mark.parametrize("name", tiny.MODELS)
def test_eager_in_fp32_is_taken_switched_and_given_back(name: str) -> None:
    model = add_answer_losses(tiny.MODELS[name]().eval())
    batch = tiny.batch(tiny.samples(name))
    with torch.no_grad():
        expected = model(**batch)
    before = list_implementations(model)
    fuse(model, OFF, attention="eager", check=False)
    assert {choice for _, choice in list_implementations(model)} == {"eager"}
    ops = attention_ops(model, batch)
    assert ops["aten::_softmax"] >= tiny.TEXT["num_hidden_layers"]
    with torch.no_grad():
        torch.testing.assert_close(model(**batch), expected)
    (switch,) = list_model_fallbacks(model)
    assert switch.name == "attention:eager"
    assert switch.cause == "attention_backend"
    with switch.disable_temporarily():
        assert {choice for _, choice in list_implementations(model)} == {"sdpa"}
        assert attention_ops(model, batch)[FLASH] > ops[FLASH]
    assert {choice for _, choice in list_implementations(model)} == {"eager"}
    unfuse(model)
    assert list_implementations(model) == before
    assert list_model_fallbacks(model) == []
    fuse(model, OFF, attention="eager", check=False)
    find_fallback(list_model_fallbacks(model), "attention:eager").disable()
    assert {choice for _, choice in list_implementations(model)} == {"sdpa"}


def test_the_first_training_forward_compares_it() -> None:
    """With answers, the model gives only losses."""
    model = add_answer_losses(tiny.mistral())
    fuse(model, OFF, attention="eager")
    model(**tiny.batch(tiny.samples("mistral"))).sum().backward()
    assert {choice for _, choice in list_implementations(model)} == {"eager"}
    from transformers import AttentionInterface

    def wrong(module, query, key, value, mask, **kwargs):  # type: ignore[no-untyped-def]
        return query.transpose(1, 2).contiguous(), None

    unfuse(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "eager", wrong)
        fuse(model, OFF, attention="eager")
        with pytest.raises(DitLoraError, match="kernel attention:eager differs"):
            model(**tiny.batch(tiny.samples("mistral")))


def test_eager_in_half_precision_is_refused_and_says_why() -> None:
    model = tiny.mistral().to(torch.bfloat16)
    with pytest.raises(DitLoraError, match="rounds attention's scores to half precision"):
        fuse(model, OFF, attention="eager")
    assert {choice for _, choice in list_implementations(model)} == {"sdpa"}
    assert not model.model.layers[0].self_attn.__dict__.get("_fusion")


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_is_refused_without_its_package_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(transformers_attention._AVAILABILITY_CHECKS, name, lambda: False)
    with pytest.raises(DitLoraError) as error:
        fuse(tiny.mistral(), OFF, attention=name)
    assert str(error.value) == (
        f"kernels.attention: {name} cannot be used here: Transformers finds no package for it that runs on "
        "this device; use auto"
    )


@pytest.mark.parametrize("name", ["native", "flex_attention", "sage"])
def test_other_names_are_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(DitLoraError, match=f"{name} does not work with Transformers models") as error:
        fuse(tiny.mistral(), OFF, attention=name)
    assert "flash_attention_3" in str(error.value)


def test_a_part_that_cannot_take_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transformers_attention._AVAILABILITY_CHECKS, "flash_attention_2", lambda: True)
    model = tiny.mistral()
    with pytest.raises(DitLoraError, match="flash_attention_2"):
        fuse(model, OFF, attention="flash_attention_2")
    assert {choice for _, choice in list_implementations(model)} == {"sdpa"}
    assert list_model_fallbacks(model) == []


@pytest.mark.parametrize("backend", ["flash", "math", "eager"])
@pytest.mark.parametrize("name", tiny.MODELS)
def test_pads_on_the_right_are_not_seen_without_a_mask(name: str, backend: str) -> None:
    """Logits of every real token, on each backend that a CPU has."""
    model, samples = tiny.MODELS[name]().eval(), tiny.samples(name)
    batch, mask = tiny.batch(samples), tiny.mask(samples)
    inputs = {n: t for n, t in batch.items() if not n.startswith("answer")}
    if backend == "eager":
        fuse(model, OFF, attention="eager", check=False)
        maskless, masked = logits(model, **inputs), logits(model, **inputs, attention_mask=mask)
    else:
        with use_only_backend(backend):
            maskless = logits(model, **inputs)
        masked = logits(model, **inputs, attention_mask=mask)
    torch.testing.assert_close(maskless[mask == 1], masked[mask == 1])
    for row, sample in enumerate(samples):
        expected = logits(model, **sample.inputs)[0]
        torch.testing.assert_close(maskless[row, : len(expected)], expected)


def together(rows: list[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    """Prompts (L,) in one batch, padded on that side, with a mask."""
    max_length = max(len(row) for row in rows)
    ids, mask = torch.zeros(2, len(rows), max_length, dtype=torch.long)
    for index, row in enumerate(rows):
        positions = slice(max_length - len(row), None) if side == "left" else slice(0, len(row))
        ids[index, positions], mask[index, positions] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prompts_that_are_answered_together_are_padded_on_the_left(attention: str) -> None:
    """Not on the right: the next token would follow a pad. One at a time needs no pad."""
    model = tiny.mistral(initializer_range=0.5).eval()
    model.generation_config.eos_token_id = None
    fuse(model, OFF, attention=attention, check=False)
    rows = [sample.inputs["input_ids"][0] for sample in tiny.samples("mistral")]
    generation_kwargs: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    expected = torch.cat([model.generate(row[None], **generation_kwargs)[:, len(row) :] for row in rows])
    generated = model.generate(**together(rows, "left"), **generation_kwargs)[:, -5:]
    assert torch.equal(generated, expected)
    right = model.generate(**together(rows, "right"), **generation_kwargs)[:, -5:]
    assert not torch.equal(right, expected)
