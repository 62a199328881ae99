"""What the guard watches and goes back to: several models and optimizers, what is given later, what a resume loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from loop_helpers import bad_batch, batch, everything, fresh_accelerator, same, spoil_once
from torch import nn

import dit_lora
from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.guard import Guard


class TextEncoder(nn.Linear):
    """The model before the denoiser."""


class Denoiser(nn.Linear):
    """The model that gives the prediction."""


class Two:
    """A denoiser after a text encoder, one optimizer over both; the denoiser alone is given to the guard."""

    def __init__(self, folder: Path | None = None, *, split: bool = False, **ladder: Any) -> None:
        self.accelerator = fresh_accelerator()
        torch.manual_seed(0)
        self.models = [TextEncoder(4, 4), Denoiser(4, 2)]
        parameters = [list(model.parameters()) for model in self.models]
        groups = parameters if split else [[*parameters[0], *parameters[1]]]
        optimizers = [torch.optim.AdamW(group, lr=0.1) for group in groups]
        prepared_parts = self.accelerator.prepare(*self.models, *optimizers)
        self.optimizers = list(prepared_parts[2:])
        self.guard = Guard.attach(
            self.accelerator,
            self.models[1],
            self.optimizers if split else self.optimizers[0],
            folder=folder,
            config=dit_lora.RecoveryConfig(**ladder),
        )

    def step(self, x: torch.Tensor, target: float = 0.0) -> None:
        encoder, denoiser = self.models
        loss = (denoiser(encoder(x).tanh()) - target).square().mean()
        self.accelerator.backward(loss)
        if len(self.optimizers) == 1:  # clipping spreads what is bad to the weights of both
            self.accelerator.clip_grad_norm_([p for m in self.models for p in m.parameters()], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        return everything(self.models, self.optimizers)


def test_a_bad_gradient_that_no_optimizer_clears_does_not_outlive_its_step() -> None:
    """Diffusers' scripts let a text encoder's embeddings have gradients, clip by them too, and never clear them."""
    accelerator = fresh_accelerator()
    torch.manual_seed(0)
    encoder, denoiser = TextEncoder(4, 4), Denoiser(4, 2)
    parameters = [encoder.bias, *denoiser.parameters()]
    encoder, denoiser, optimizer = accelerator.prepare(encoder, denoiser, torch.optim.AdamW(parameters, lr=0.1))
    guard = Guard.attach(accelerator, denoiser, optimizer)
    for x in (batch(1), bad_batch(2), batch(3), batch(4)):
        accelerator.backward(denoiser(encoder(x).tanh()).square().mean())
        accelerator.clip_grad_norm_([*encoder.parameters(), *denoiser.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert [event["step"] for event in guard.events] == [2]
    guard.require_finite()
    assert len(guard.events) == 1
    assert encoder.weight.grad is not None


@pytest.mark.parametrize("split", [False, True], ids=["one optimizer", "an optimizer each"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_bad_gradient_of_either_model_stops_the_step_of_its_optimizer_and_is_named(which: int, split: bool) -> None:
    loop = Two(split=split)
    loop.step(batch(1))
    before = loop.state()
    spoil_once(loop.models[which].weight, torch.inf)
    loop.step(batch(2))
    is_kept = [torch.equal(old, new) for old, new in zip(before, loop.state(), strict=True)][:4]
    # Weights and biases of the encoder, then of the denoiser.
    assert is_kept == [not split or which == 0] * 2 + [not split or which == 1] * 2
    (event,) = loop.guard.events
    assert (event["kind"], event["action"]) == ("non_finite_gradient", "skip")
    name = f"{type(loop.models[which]).__name__}.weight"
    assert f"the gradient of {name} was not finite" in event["verdict"]["words"]
    before = loop.state()
    loop.step(batch(3))
    state_after = loop.state()
    assert not any(map(torch.equal, before[:4], state_after[:4]))  # weights and biases of both


@pytest.mark.parametrize("what", ["weight", "moment"])
def test_a_bad_weight_or_moment_of_the_second_model_is_named_and_both_go_back(what: str) -> None:
    loop = Two()
    start = [p.detach().clone() for m in loop.models for p in m.parameters()]
    for number in range(3):
        loop.step(batch(number))
    encoder = loop.models[0]
    if what == "weight":
        encoder.weight.data.view(-1)[3] = torch.nan
    else:
        loop.optimizers[0].state[encoder.weight]["exp_avg"].view(-1)[3] = torch.nan
    # What a bad moment has spoiled is put back in the same step.
    loop.step(batch(3))
    (event,) = loop.guard.events
    assert (event["step"], event["action"]) == (4, "rollback")
    assert "TextEncoder.weight" in event["verdict"]["words"]
    assert same([p.detach() for m in loop.models for p in m.parameters()], start)
    assert not loop.optimizers[0].state


def test_what_a_sample_or_a_target_spoils_is_blamed_on_the_call_that_was_given_it() -> None:
    loop = Two()
    loop.step(batch(1))
    loop.step(bad_batch(2))
    loop.step(batch(3), target=torch.nan)
    first_diagnosis, second = (event["verdict"] for event in loop.guard.events)
    assert first_diagnosis["words"] == "TextEncoder: argument 0 has 1 NaN among 4 values"
    assert first_diagnosis["sample_ids"] == ["row 1 of micro-batch 0"]
    # What comes back from outside is no fact about a sample; it came to the denoiser first.
    message = "Denoiser: the model's output is finite, but the gradient of the output is not: the cause is a target"
    assert second["words"].startswith(message)
    assert (second["cause"], second["sample_ids"]) == ("unknown", [])


def test_what_an_optimizer_holds_of_no_model_is_guarded_too() -> None:
    accelerator, model = fresh_accelerator(), Denoiser(4, 2)
    vector = nn.Parameter(torch.ones(4))
    optimizer = accelerator.prepare(torch.optim.AdamW([*model.parameters(), vector], lr=0.1))
    guard = Guard.attach(accelerator, model, optimizer)
    for number in range(3):
        if number == 1:
            spoil_once(vector, torch.nan)
        accelerator.backward(model(batch(number) * vector).square().mean())
        before = vector.detach().clone()
        optimizer.step()
        assert torch.equal(vector, before) is (number == 1)
        optimizer.zero_grad()
    assert "optimizer.parameter_0" in guard.events[0]["verdict"]["words"]


def test_an_optimizer_of_another_model_is_refused_in_one_line() -> None:
    accelerator, optimizer = fresh_accelerator(), torch.optim.AdamW(Denoiser(2, 2).parameters())
    with pytest.raises(DitLoraError, match="holds no parameter of the TextEncoder"):
        Guard.attach(accelerator, TextEncoder(2, 2), optimizer)
    with pytest.raises(DitLoraError, match=r"Accelerator, or None .* got str"):
        Guard.attach("cpu", TextEncoder(2, 2), optimizer)  # type: ignore[arg-type]
    with pytest.raises(DitLoraError, match=r"model must be a torch.nn.Module; got none"):
        Guard.attach(accelerator, None, optimizer)  # type: ignore[arg-type]


class Resumable:
    """A prepared loop whose checkpoints Accelerate writes."""

    def __init__(self) -> None:
        self.accelerator = fresh_accelerator()
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.guard = Guard.attach(self.accelerator, self.model, self.optimizer)

    def step(self, number: int) -> None:
        self.accelerator.backward((self.model(batch(number)) - 3).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        return everything([self.model], [self.optimizer])

    def resume(self, how: str, folder: Path, weights: Any, moments: Any) -> None:
        if how == "accelerator.load_state":
            self.accelerator.load_state(str(folder))
        elif how == "load_state_dict":
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(moments)
        elif how == "the moments alone":
            self.optimizer.load_state_dict(moments)
        else:  # by a module around it, as an adapter is loaded
            nn.Sequential(self.model).load_state_dict({f"0.{n}": t for n, t in weights.items()})


@pytest.mark.parametrize(
    "how", ["accelerator.load_state", "load_state_dict", "the weights alone", "the moments alone"]
)
def test_a_rollback_after_a_resume_goes_back_to_what_was_loaded(how: str, tmp_path: Path) -> None:
    first_run = Resumable()
    for number in range(10):
        first_run.step(number)
    first_run.accelerator.save_state(str(tmp_path), safe_serialization=False)
    weights = {n: t.clone() for n, t in first_run.model.state_dict().items()}
    moments = first_run.optimizer.state_dict()
    second = Resumable()
    second.resume(how, tmp_path, weights, moments)
    loaded = second.state()
    for number in range(10, 13):
        second.step(number)
    with torch.no_grad():
        second.optimizer.state[second.model.weight]["exp_avg"].view(-1)[0] = torch.nan
    second.step(13)
    (event,) = second.guard.events
    assert (event["step"], event["action"], event["weights_of_step"]) == (4, "rollback", 0)
    assert same(second.state(), loaded)
    if how != "the moments alone":
        assert torch.equal(second.model.weight, weights["weight"])


def test_what_an_optimizer_is_given_later_is_guarded_from_then_on() -> None:
    accelerator, model = fresh_accelerator(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = accelerator.prepare(torch.optim.AdamW(model[1].parameters(), lr=0.1))
    guard = Guard.attach(accelerator, model, optimizer)
    for number in range(4):
        if number == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        if number == 2:
            before = everything([model], [optimizer])
            spoil_once(model[0].weight, torch.nan)
        accelerator.backward(model(batch(number)).square().mean())
        optimizer.step()
        assert number != 2 or same(everything([model], [optimizer]), before)
        optimizer.zero_grad()
    assert "the gradient of 0.weight was not finite" in guard.events[0]["verdict"]["words"]
