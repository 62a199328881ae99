"""A call that was recorded in somebody else's loop can be run again, whole or one sample of it, bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

from dit_lora.guard.attach.call_recorder import (
    OUTPUT_GRADIENT,
    CapturedCall,
    Recorder,
    main_output,
)
from dit_lora.guard.diagnose import diagnose
from dit_lora.guard.replay import run
from dit_lora.guard.suspects import Suspects
from dit_lora.guard.switches import Switch

Gradients = dict[str, torch.Tensor]


class Net(nn.Module):
    """Latents by position, the rest by keyword; `spoil` is done to what comes out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(14)
        self.project, self.text = nn.Linear(6, 8), nn.Linear(5, 8)
        self.time, self.out = nn.Embedding(1000, 8), nn.Linear(8, 6)
        self.dropout = nn.Dropout(dropout)
        self.spoil: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(
        self,
        latents: torch.Tensor,
        *,
        text: torch.Tensor,
        timestep: torch.Tensor,
        rotary: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor]:
        hidden = (self.project(latents) + self.text(text) * scale + self.time(timestep)) * rotary
        output = self.out(self.dropout(hidden.tanh()))
        return (output if self.spoil is None else self.spoil(output),)


def inputs(seed: int = 3) -> tuple[torch.Tensor, dict[str, Any]]:
    draws = torch.Generator().manual_seed(seed)
    keywords = {
        "text": torch.randn(3, 5, generator=draws),
        "timestep": torch.tensor([999, 0, 37]),
        "rotary": torch.randn(8, generator=draws),  # of no sample
        "scale": 0.7,
    }
    return torch.randn(3, 6, generator=draws), keywords


def recorder(model: nn.Module, **facts: Any) -> Recorder:
    made = Recorder(
        model, lambda call, count: tuple(f"{call}.{row}" for row in range(count)), **facts
    )
    made.start()
    return made


def gradients(model: nn.Module) -> Gradients:
    """The gradients that are there; afterwards none is."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def loop_step(model: nn.Module, seed: int = 3) -> Gradients:
    """One micro-step of a loop that draws noise from torch's own generator."""
    latents, keywords = inputs(seed)
    noise = torch.randn_like(latents)
    output = model(latents + 0.3 * noise, **keywords)[0]
    weights = torch.tensor([0.2, 3.0, 1.1])
    ((output - noise).square().mean(1) * weights).mean().div(2).backward()
    return gradients(model)


def assert_same_bits(ours: Gradients, theirs: Gradients) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def replayed(call: CapturedCall, model: nn.Module) -> Gradients:
    call.run(model).losses.sum().backward()
    return gradients(model)


def test_a_replayed_call_gives_the_gradients_of_the_loops_own_backward() -> None:
    """Two micro-steps with dropout inside, replayed in the other order."""
    model = Net(dropout=0.4)
    recorded = recorder(model)
    torch.manual_seed(21)
    originals = [loop_step(model, seed) for seed in (3, 4)]
    recorded.stop()
    torch.randn(100)
    assert len(recorded.calls) == 2
    for number in (1, 0, 1):
        assert_same_bits(replayed(recorded.calls[number], model), originals[number])
    assert not torch.equal(originals[0]["out.weight"], originals[1]["out.weight"])
    recorded.calls[0].random_state = recorded.calls[1].random_state
    again = replayed(recorded.calls[0], model)
    assert not torch.equal(again["out.weight"], originals[0]["out.weight"]), "dropout drew nothing"


def test_half_precision_calls_come_back_bit_for_bit_too() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 4)).bfloat16()
    recorded = recorder(model)
    model(inputs()[0].bfloat16()).float().sub(0.4).square().mean().backward()
    original = gradients(model)
    assert original["0.weight"].dtype is torch.bfloat16
    assert_same_bits(replayed(recorded.calls[0], model), original)


def test_positional_and_keyword_inputs_are_kept_with_their_names() -> None:
    model = Net()
    recorded = recorder(model)
    latents, keywords = inputs()
    latents.requires_grad_()
    output = model(latents, **keywords)[0]
    assert recorded.calls[0].tensors().keys() == {"argument 0", "text", "timestep"}
    (output * torch.arange(18).view(3, 6)).sum().backward()
    (call,) = recorded.calls
    tensors = call.tensors()
    assert tensors.keys() == {"argument 0", "text", "timestep", OUTPUT_GRADIENT}
    assert torch.equal(tensors["argument 0"], latents)
    assert torch.equal(tensors["text"], keywords["text"])
    assert torch.equal(tensors[OUTPUT_GRADIENT], torch.arange(18.0).view(3, 6))
    assert not any(tensor.requires_grad for tensor in tensors.values())
    assert call.kwargs["scale"] == 0.7
    assert call.run(model).timesteps.tolist() == [999, 0, 37]


def test_a_model_without_a_timestep_has_none() -> None:
    model = nn.Linear(6, 4)
    recorded = recorder(model)
    model(inputs()[0])
    assert recorded.calls[0].run(model).timesteps.tolist() == [-1, -1, -1]


def test_samples_are_named_by_call_and_row() -> None:
    asked: list[tuple[int, int]] = []

    def names(call: int, count: int) -> tuple[str, ...]:
        asked.append((call, count))
        return ("cat.mp4", "dog.mp4", "hen.mp4")[:count]

    model = nn.Linear(6, 4)
    recorded = Recorder(model, names)
    recorded.start()
    model(inputs()[0])
    model(inputs()[0][:2])
    assert asked == [(0, 3), (1, 2)]
    batch = recorded.calls[0].micro_batch(model, step=8, micro_step=1, rank=2)
    assert batch.ids == ("cat.mp4", "dog.mp4", "hen.mp4")
    assert (batch.step, batch.micro_step, batch.rank) == (8, 1, 2)
    single = batch.single(1)
    assert (single.ids, single.step, single.micro_step) == (("dog.mp4",), 8, 1)
    assert [call.batch_size for call in recorded.calls] == [3, 2]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_single_samples_gradients_are_those_of_its_row(index: int) -> None:
    model = Net()
    recorded = recorder(model)
    loop_step(model)
    recorded.stop()
    (call,) = recorded.calls
    single = call.single(index)
    latents, keywords = call.args[0], call.kwargs
    row = slice(index, index + 1)
    output = model(
        latents[row],
        text=keywords["text"][row],
        timestep=keywords["timestep"][row],
        rotary=keywords["rotary"],
        scale=keywords["scale"],
    )[0]
    assert call.output_gradient is not None
    output.backward(call.output_gradient[row])
    expected = gradients(model)
    assert_same_bits(replayed(single, model), expected)
    losses = call.run(model).losses
    assert single.run(model).losses.item() == pytest.approx(losses[index].item(), rel=1e-5)
    assert single.batch_size == 1
    assert single.tensors()["argument 0"].shape == (1, 6)


class Conditioned(Net):
    """As SDXL takes its pooled embedding: in a dict."""

    def forward(  # type: ignore[override]
        self, latents: torch.Tensor, *, conditions: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        return self.out(torch.cat([self.project(latents), self.text(conditions["pooled"])])[:3])


def test_a_single_sample_has_its_own_row_of_tensors_within_containers() -> None:
    model = Conditioned()
    recorded = recorder(model)
    latents, keywords = inputs()
    model(latents, conditions={"pooled": keywords["text"]})
    single = recorded.calls[0].single(2)
    assert torch.equal(single.kwargs["conditions"]["pooled"], keywords["text"][2:])


def test_stop_takes_every_hook_away_and_start_records_again() -> None:
    model = Net()
    recorded = recorder(model)
    loop_step(model)
    recorded.stop()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    loop_step(model)
    assert len(recorded.calls) == 1
    recorded.stop()  # once more does no harm
    recorded.calls.clear()
    recorded.start()
    loop_step(model)
    assert [call.ids[1] for call in recorded.calls] == ["0.1"]


def test_calls_without_gradients_are_not_recorded() -> None:
    model = Net()
    recorded = recorder(model)
    latents, keywords = inputs()
    with torch.no_grad():
        model(latents, **keywords)
    loop_step(model)
    assert len(recorded.calls) == 1
    assert recorded.calls[0].output_gradient is not None


class Draws(nn.Module):
    """Draws noise inside, from the loop's own generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        torch.manual_seed(15)
        self.linear, self.generator = nn.Linear(6, 4), generator

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values + torch.randn(values.shape, generator=self.generator))


def test_a_loops_own_generator_is_put_back_to_where_it_was_at_the_call() -> None:
    generator = torch.Generator().manual_seed(40)
    model = Draws(generator)
    recorded = recorder(model, generator=generator)
    output = model(inputs()[0])
    output.square().mean().backward()
    original = gradients(model)
    torch.randn(9, generator=generator)
    assert_same_bits(replayed(recorded.calls[0], model), original)


def test_a_replay_leaves_the_loops_own_generator_where_the_loop_has_it() -> None:
    generator = torch.Generator().manual_seed(40)
    model = Draws(generator)
    recorded = recorder(model, generator=generator)
    model(inputs()[0]).square().mean().backward()
    torch.randn(9, generator=generator)
    state = generator.get_state()
    recorded.stop()
    run(recorded.calls[0].micro_batch(model, step=1, micro_step=0, rank=0), model)
    assert torch.equal(generator.get_state(), state)


def test_the_output_of_the_loss_is_the_first_with_a_gradient() -> None:
    good = torch.randn(3, 4, requires_grad=True) * 2
    plain, ids = torch.randn(3, 4), torch.tensor([1, 2])
    assert main_output(good) is good
    assert main_output((ids, plain, good)) is good
    assert main_output({"aux": plain, "sample": good}) is good
    assert main_output(Transformer2DModelOutput(sample=good)) is good
    assert main_output([ids, plain]) is plain
    assert main_output(SimpleNamespace(aux=plain, sample=good)) is good
    assert main_output([ids]) is None
    assert main_output(0.3) is None


def test_a_call_whose_output_is_no_tensor_is_not_kept() -> None:
    model = nn.Identity()
    recorded = recorder(model)
    model([inputs()[0].long()])
    assert recorded.calls == []


def verdict_of(model: nn.Module, recorded: Recorder, *switches: Switch) -> Any:
    recorded.stop()
    batch = recorded.calls[0].micro_batch(model, step=5, micro_step=0, rank=0)
    return diagnose(batch, Suspects(model, lambda: [], switches), kind="non_finite_loss")


def test_a_bad_output_is_not_blamed_on_the_gradient_that_came_back_to_it() -> None:
    model = Net()
    recorded = recorder(model)

    @contextmanager
    def off() -> Iterator[None]:
        model.spoil = None
        yield
        model.spoil = broken

    def broken(output: torch.Tensor) -> torch.Tensor:
        factors = torch.ones(3, 6)
        factors[1, 2] = torch.nan
        return output * factors

    model.spoil = broken
    assert loop_step(model)["out.weight"].isnan().any()
    assert OUTPUT_GRADIENT not in recorded.calls[0].tensors()
    verdict = verdict_of(model, recorded, Switch("norm", "kernel", off, lambda: None, "eager"))
    assert (verdict.cause, verdict.switch) == ("kernel", "norm")
    assert verdict.timesteps == (999, 0, 37)


def test_a_bad_gradient_for_a_good_output_is_the_samples() -> None:
    model = Net()
    recorded = recorder(model)
    latents, keywords = inputs()
    target = torch.zeros(3, 6)
    target[2, 1] = torch.nan
    (model(latents, **keywords)[0] - target).square().mean().backward()
    verdict = verdict_of(model, recorded)
    assert (verdict.cause, verdict.sample_ids) == ("data", ("0.2",))
    assert verdict.words == f"{OUTPUT_GRADIENT} has 1 NaN among 6 values"


def test_an_overflow_of_the_backward_comes_back_at_the_recorded_gradients_size() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).half()
    with torch.no_grad():
        model[1].weight.fill_(30)
    recorded = recorder(model)
    latents = torch.randn(8, 4, generator=torch.Generator().manual_seed(2)) * 0.01
    (model(latents.half()).float() * 600).sum().backward()
    original = gradients(model)
    assert not original["0.weight"].isfinite().all()
    assert not replayed(recorded.calls[0], model)["0.weight"].isfinite().all()
    assert verdict_of(model, recorded).cause == "precision"


def test_an_index_that_no_table_has_is_named_with_its_sample() -> None:
    model = Net()
    recorded = recorder(model)
    latents, keywords = inputs()
    assert recorded.out_of_range() == []
    keywords["timestep"] = torch.tensor([999, 1000, 37])
    with pytest.raises(IndexError):
        model(latents, **keywords)
    assert recorded.out_of_range() == ["0.1: timestep has 1000, time has 0..999"]
