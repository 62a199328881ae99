"""Output preservation: the second loss and its gradient against plain fp64 code, and the parts off for its target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME, FROZEN_ADAPTER_PREFIX
from dit_lora.adapters.under import disable_trained_adapter
from dit_lora.config.optim import PreserveConfig
from dit_lora.data.loading.batch import PRESERVE_PREFIX, PRESERVE_WEIGHT, Batch
from dit_lora.data.loading.encoded import SampleCacheKeys
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import DrawFunctions, RandomStreams
from dit_lora.training.guided_target import record_model_outputs
from dit_lora.training.replayable_batch import compute_training_losses, mean_squared_difference

ROWS, WIDTH = 3, 5


class Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2 * WIDTH, 7)
        self.leave = nn.Linear(7, WIDTH)

    def forward(self, noisy: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.leave(torch.tanh(self.enter(torch.cat([noisy, text], 1)))),)


class Plain:
    """A checkpoint whose draws are noise; its loss is the error of that noise."""

    path = Path("plain")

    def get_random_input_samplers(self, batch: Mapping[str, torch.Tensor]) -> DrawFunctions:
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: RandomStreams) -> LossOutput:
        noise = self.noise(streams).to(batch["latent"].dtype)
        predicted = model(batch["latent"] + noise, batch["text"])[0]
        return LossOutput((predicted - noise).square().mean(1), torch.zeros(len(noise)))

    @staticmethod
    def noise(streams: RandomStreams) -> torch.Tensor:
        return torch.stack([torch.randn(WIDTH, generator=generator) for generator in streams("noise")])


def adapted(*names: str) -> Any:
    """A model in fp64 with LoRAs whose B is not zero."""
    torch.manual_seed(0)
    model: Any = Predictor()
    for name in names:
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["enter", "leave"])
        peft.inject_adapter_in_model(config, model, adapter_name=name)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter)
    for layer in (model.enter, model.leave):
        layer._active_adapter = list(names)
    return model.double()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    latent, text, preserved_text = torch.randn(3, ROWS, WIDTH, generator=generator).double()
    weight = torch.tensor([0.7, 0.0, 1.9])
    return {
        "latent": latent,
        "text": text,
        f"{PRESERVE_PREFIX}text": preserved_text,
        PRESERVE_WEIGHT: weight,
    }


def plain(weights: Mapping[str, torch.Tensor], x: torch.Tensor, lora: bool) -> torch.Tensor:
    """The model's output by its matrices."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ weights[f"{name}.base_layer.weight"].T + weights[f"{name}.base_layer.bias"]
        a, b = (weights[f"{name}.lora_{matrix}.{ADAPTER_NAME}.weight"] for matrix in "AB")
        return y + 1.5 * (x @ a.T) @ b.T if lora else y

    return linear("leave", torch.tanh(linear("enter", x)))


def test_loss_and_gradient_are_those_of_plain_code() -> None:
    model, tensors, streams = adapted(ADAPTER_NAME), batch(), RandomStreams(5, [4, 9, 2])
    output = compute_training_losses(Plain(), model, tensors, streams)
    output.losses.sum().backward()
    weights = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    noise = Plain.noise(streams).double()
    noisy, (text, preserved_text) = (
        tensors["latent"] + noise,
        (tensors["text"], tensors[f"{PRESERVE_PREFIX}text"]),
    )
    learned = plain(weights, torch.cat([noisy, text], 1), lora=True)
    ours = plain(weights, torch.cat([noisy, preserved_text], 1), lora=True)
    base = plain(weights, torch.cat([noisy, preserved_text], 1), lora=False).detach()
    expected = (learned - noise).square().mean(1)
    expected = expected + tensors[PRESERVE_WEIGHT] * (ours - base).square().mean(1)
    expected.sum().backward()
    torch.testing.assert_close(output.losses, expected, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-5, atol=1e-7)
        else:
            assert parameter.grad is None


def test_without_such_captions_the_loss_is_the_familys_own() -> None:
    model, streams = adapted(ADAPTER_NAME), RandomStreams(5, [4, 9, 2])
    tensors = {name: tensor for name, tensor in batch().items() if not name.startswith("preserve")}
    expected = Plain().losses(model, tensors, streams).losses
    assert torch.equal(compute_training_losses(Plain(), model, tensors, streams).losses, expected)


def test_frozen_adapters_stay_on_for_the_target() -> None:
    """They are what training begins with."""
    model, frozen = (
        adapted(ADAPTER_NAME, f"{FROZEN_ADAPTER_PREFIX}0"),
        adapted(f"{FROZEN_ADAPTER_PREFIX}0"),
    )
    with torch.no_grad():
        for name, parameter in frozen.named_parameters():
            parameter.copy_(model.get_parameter(name))
    x = torch.randn(2, 2, WIDTH, dtype=torch.float64)
    both = model(*x)[0]
    with disable_trained_adapter(model):
        assert torch.equal(model(*x)[0], frozen(*x)[0])
    assert torch.equal(model(*x)[0], both)
    assert not torch.equal(both, frozen(*x)[0])
    requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
    assert requires_grad["enter.lora_A.default.weight"]


def test_every_output_of_a_model_counts() -> None:
    """Pictures and sound are added."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(3, 4, 2), (3, 7)]
    ours, theirs = ([torch.randn(s, generator=generator) for s in sizes] for _ in range(2))
    pairs = list(zip(ours, theirs, strict=True))
    expected = [sum((a[i] - b[i]).square().mean() for a, b in pairs) for i in range(3)]
    rows, target_rows = ([list(tensor) for tensor in tensors] for tensors in (ours, theirs))
    torch.testing.assert_close(mean_squared_difference(rows, target_rows), torch.stack(expected))


@pytest.mark.parametrize("calls", ["batch", "rows", "list"])
def test_samples_of_all_calls_are_recorded_in_order(calls: str) -> None:
    """A list has a tensor for each sample, even if there are as many samples as channels."""
    outputs = torch.randn(3, 3, 2)

    class Model(nn.Module):
        def forward(self, rows: list[int]) -> Any:
            return ([outputs[row] for row in rows],) if calls == "list" else (outputs[rows],)

    model, rows = Model(), list[list[torch.Tensor]]()
    with record_model_outputs(model, rows):
        for numbers in [[0], [1], [2]] if calls == "rows" else [[0, 1, 2]]:
            model(numbers)
    assert len(rows) == 1
    assert torch.equal(torch.stack(rows[0]), outputs)


def test_of_several_class_words_each_draw_has_one() -> None:
    entry = SampleCacheKeys("a", "video", "text", preserve_text_keys=("dog", "puppy", "hound"))
    keys = [entry.choose_preserve_text_key(draw) for draw in range(300)]
    assert keys == [entry.choose_preserve_text_key(draw) for draw in range(300)]
    assert all(60 < keys.count(key) < 140 for key in entry.preserve_text_keys)
    assert SampleCacheKeys("a", "video", "text").choose_preserve_text_key(3) is None


def test_masks_of_its_captions_stay_on_the_host_too() -> None:
    """Where those of the others stay: the host would wait for their values."""
    mask = torch.ones(1, 4)
    names = (
        "prompt_attention_mask",
        f"{PRESERVE_PREFIX}prompt_attention_mask",
        f"{PRESERVE_PREFIX}embeds",
    )
    batch = Batch(("a",), (0,), dict.fromkeys(names, mask)).to(torch.device("meta"))
    assert [batch.tensors[name].device.type for name in names] == ["cpu", "cpu", "meta"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"trigger": " ", "class_words": "dog"}, "must not be empty"),
        ({"trigger": "sks", "class_words": "sks dog"}, "contains the trigger 'sks'"),
        ({"trigger": "sks", "class_words": []}, "must not be empty"),
        ({"trigger": "sks", "class_words": "dog", "weight": 0}, "greater than 0"),
    ],
)
def test_words_that_keep_nothing_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PreserveConfig(**wrong)
