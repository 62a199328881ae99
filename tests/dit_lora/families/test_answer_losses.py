"""The losses of answers are the stock model's own, of each sample alone."""

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_chat_models as tiny
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from dit_lora.errors import DitLoraError
from dit_lora.families import answer_losses
from dit_lora.families.answer_losses import add_answer_losses

WEIGHTS = torch.tensor([0.3, 1.7, -0.9])


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_losses, "CHUNK_ROWS", 4)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", tiny.MODELS)
def test_losses_and_gradients_are_the_stock_models_of_each_sample_alone(name: str) -> None:
    model, samples = tiny.MODELS[name]().eval(), tiny.samples(name)
    single_losses = torch.stack([model(**sample.inputs, labels=sample.labels).loss for sample in samples])
    (single_losses @ WEIGHTS).backward()
    expected = gradients(model)
    model.zero_grad()
    losses = add_answer_losses(model)(**tiny.batch(samples))
    assert losses.dtype is torch.float32
    (losses @ WEIGHTS).backward()
    actual = gradients(model)
    torch.testing.assert_close(losses, single_losses)
    assert actual.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(actual[parameter], gradient, msg=parameter)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_padding_on_the_right_needs_no_mask(name: str) -> None:
    model, samples = add_answer_losses(tiny.MODELS[name]().eval()), tiny.samples(name)
    batch, mask = tiny.batch(samples), tiny.mask(samples)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch), model(**batch, attention_mask=mask))
        # Whatever the pads are.
        changed_batch = {**batch, "input_ids": torch.where(mask == 1, batch["input_ids"], 59)}
        assert torch.equal(model(**batch), model(**changed_batch))


def test_without_answers_the_stock_forward_runs() -> None:
    model, (sample, *_) = tiny.mistral().eval(), tiny.samples("mistral")
    expected = model(**sample.inputs, labels=sample.labels)
    answer = model.generate(**sample.inputs, max_new_tokens=4, do_sample=False)
    assert add_answer_losses(model) is model
    actual = model(**sample.inputs, labels=sample.labels)
    assert torch.equal(actual.logits, expected.logits)
    assert torch.equal(actual.loss, expected.loss)
    assert torch.equal(model.generate(**sample.inputs, max_new_tokens=4, do_sample=False), answer)
    assert inspect.signature(model.forward) == inspect.signature(type(model)(model.config).forward)


def test_a_deep_copy_has_losses_of_its_own_weights() -> None:
    model, batch = add_answer_losses(tiny.mistral()), tiny.batch(tiny.samples("mistral"))
    before = model(**batch)
    twin = copy.deepcopy(model)
    nn.init.normal_(twin.model.layers[0].mlp.up_proj.weight)
    nn.init.normal_(twin.lm_head.weight)
    twin(**batch).sum().backward()
    assert torch.equal(model(**batch), before)
    assert not torch.allclose(twin(**batch), before)
    assert not gradients(model)


def test_an_adapter_on_the_head_and_in_the_blocks_trains() -> None:
    model = add_answer_losses(tiny.mistral())
    model.requires_grad_(False)
    targets = ["q_proj", "down_proj", "lm_head"]
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    samples = tiny.samples("mistral")
    single_losses = torch.stack([model(**sample.inputs, labels=sample.labels).loss for sample in samples])
    (single_losses @ WEIGHTS).backward()
    expected = gradients(model)
    model.zero_grad()
    (model(**tiny.batch(samples)) @ WEIGHTS).backward()
    actual = gradients(model)
    assert sum("lm_head" in parameter for parameter in expected) == 2
    torch.testing.assert_close(actual, expected)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerates_autocast_reaches_trunk_and_head(accelerator: Accelerator) -> None:
    model, batch = add_answer_losses(tiny.mistral()), tiny.batch(tiny.samples("mistral"))
    stock = model(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch)
    prepared = accelerator.prepare(model)
    actual = prepared(**batch)
    assert actual.dtype is torch.float32
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, stock)
    actual.sum().backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    twin = copy.deepcopy(prepared)
    nn.init.normal_(twin.lm_head.weight)
    assert not torch.allclose(twin(**batch), expected)


def test_ddp_gives_the_same_gradients(tmp_path: Path) -> None:
    model, batch = add_answer_losses(tiny.mistral()), tiny.batch(tiny.samples("mistral"))
    model(**batch).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(model)(**batch).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(gradients(model), expected)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_it_runs_on_tensors_without_values(name: str) -> None:
    model, batch = add_answer_losses(tiny.MODELS[name]()), tiny.batch(tiny.samples(name))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        weights = {n: fake.from_tensor(t) for n, t in model.state_dict(keep_vars=True).items()}
        pixels = {n: fake.from_tensor(t) for n, t in batch.items() if t.is_floating_point()}
    losses = functional_call(model, weights, kwargs={**batch, **pixels})
    losses.sum().backward()
    assert losses.shape == (3,)


def test_answers_are_asked_for_whole_and_by_name() -> None:
    model, batch = add_answer_losses(tiny.mistral()), tiny.batch(tiny.samples("mistral"))
    ids = batch.pop("input_ids")
    with pytest.raises(DitLoraError, match="all other inputs by name"):
        model(ids, **batch)
    with pytest.raises(DitLoraError, match="answer_positions, answer_labels"):
        model(input_ids=ids, answer_labels=batch["answer_labels"])


def capped() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    # Small logits stay the same bits under a cap that is a power of two.
    return Gemma2ForCausalLM(Gemma2Config(**tiny.TEXT, head_dim=8, final_logit_softcapping=64.0))


def scaled() -> nn.Module:
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(**tiny.TEXT, logits_scaling=4.0))


@pytest.mark.parametrize("build", [capped, scaled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_that_are_more_than_linear_are_refused(build, dtype: torch.dtype) -> None:
    model = build().to(dtype)
    with pytest.raises(DitLoraError, match="more than its output layer makes"):
        add_answer_losses(model)
    assert "forward" not in model.__dict__
    assert "forward" not in model.model.__dict__


def test_a_model_without_a_trunk_is_refused() -> None:
    from transformers import MistralModel

    with pytest.raises(DitLoraError, match="not a trunk with an output layer"):
        add_answer_losses(MistralModel(tiny.mistral().config))


def test_a_wrapped_model_is_refused() -> None:
    model = tiny.mistral()
    model.forward = lambda **_: None
    with pytest.raises(DitLoraError, match="wrapped already"):
        add_answer_losses(model)
