"""A call that was recorded in somebody else's loop can be run again, whole or one sample of it, bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

from dit_lora.guard.attach.calls import call_log
from dit_lora.guard.attach.calls.call_batch import RecordedCallMicroBatch
from dit_lora.guard.attach.calls.call_log import CallLog
from dit_lora.guard.attach.calls.call_recorder import ModelCallRecorder
from dit_lora.guard.attach.calls.captured_call import CapturedCall, find_main_outputs
from dit_lora.guard.attach.interception import MethodInterceptions
from dit_lora.guard.attach.samples.loaded_batches import LoadedBatches
from dit_lora.guard.diagnose import diagnose
from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.fallbacks import Fallback
from dit_lora.guard.replay import replay_micro_batch

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


class RecordedModel:
    """Records the calls of a model, as a guard does."""

    def __init__(self, model: nn.Module, generator: torch.Generator | None = None) -> None:
        self.log = CallLog(LoadedBatches())
        self.log.generator = generator
        self.recorder = ModelCallRecorder(model, self.log)
        self._interceptions = MethodInterceptions()
        self._interceptions.intercept_method(model, "__call__", self.recorder.run_and_record_call)

    @property
    def calls(self) -> list[CapturedCall]:
        return self.log.calls

    def stop(self) -> None:
        self._interceptions.restore_originals()


def single_row(call: CapturedCall, row: int) -> CapturedCall:
    cutter = call.get_sample_extractor()
    assert cutter is not None
    return call.select_sample_row(row, cutter)


def gradients(model: nn.Module) -> Gradients:
    """The gradients that are there; afterwards none is."""
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


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
    call.compute_replay_losses(model).losses.sum().backward()
    return gradients(model)


def test_a_replayed_call_gives_the_gradients_of_the_loops_own_backward() -> None:
    """Two micro-steps with dropout inside, replayed in the other order."""
    model = Net(dropout=0.4)
    recorded = RecordedModel(model)
    torch.manual_seed(21)
    originals = [loop_step(model, seed) for seed in (3, 4)]
    recorded.stop()
    torch.randn(100)
    assert len(recorded.calls) == 2
    for number in (1, 0, 1):
        assert_same_bits(replayed(recorded.calls[number], model), originals[number])
    assert not torch.equal(originals[0]["out.weight"], originals[1]["out.weight"])
    recorded.calls[0].random_state = recorded.calls[1].random_state
    replay = replayed(recorded.calls[0], model)
    assert not torch.equal(replay["out.weight"], originals[0]["out.weight"]), "dropout drew nothing"


def test_half_precision_calls_come_back_bit_for_bit_too() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 4)).bfloat16()
    recorded = RecordedModel(model)
    model(inputs()[0].bfloat16()).float().sub(0.4).square().mean().backward()
    original = gradients(model)
    assert original["0.weight"].dtype is torch.bfloat16
    assert_same_bits(replayed(recorded.calls[0], model), original)


def test_positional_and_keyword_inputs_are_kept_with_their_names() -> None:
    model = Net()
    recorded = RecordedModel(model)
    latents, keywords = inputs()
    latents.requires_grad_()
    output = model(latents, **keywords)[0]
    assert recorded.calls[0].output_gradients == [None]
    (output * torch.arange(18).view(3, 6)).sum().backward()
    (call,) = recorded.calls
    tensors = call.collect_row_tensors()
    assert tensors.keys() == {"argument 0", "text", "timestep"}
    assert torch.equal(tensors["argument 0"], latents)
    assert torch.equal(tensors["text"], keywords["text"])
    (gradient,) = call.output_gradients
    assert gradient is not None
    assert torch.equal(gradient, torch.arange(18.0).view(3, 6))
    assert not any(tensor.requires_grad for tensor in tensors.values())
    assert call.kwargs["scale"] == 0.7
    assert call.compute_replay_losses(model).timesteps.tolist() == [999, 0, 37]


def test_a_model_without_a_timestep_has_none() -> None:
    model = nn.Linear(6, 4)
    recorded = RecordedModel(model)
    model(inputs()[0])
    assert recorded.calls[0].compute_replay_losses(model).timesteps.tolist() == [-1, -1, -1]


def test_samples_have_the_loops_names_or_the_numbers_of_their_rows() -> None:
    model = nn.Linear(6, 4)
    recorded = RecordedModel(model)
    recorded.log.sample_names = ("cat.mp4", "dog.mp4", "hen.mp4")
    outputs = [model(inputs()[0])]
    recorded.log.sample_names = ()
    outputs.append(model(inputs()[0][:2]))
    named_call, numbered_call = recorded.calls
    batch = RecordedCallMicroBatch.from_call(named_call, model, step=8, micro_step=1, rank=2)
    assert batch.ids == ("cat.mp4", "dog.mp4", "hen.mp4")
    assert (batch.step, batch.micro_step, batch.rank) == (8, 1, 2)
    single = batch.select_sample(1)
    assert (single.ids, single.step, single.micro_step) == (("dog.mp4",), 8, 1)
    assert numbered_call.ids == ("row 0 of micro-batch 1", "row 1 of micro-batch 1")
    assert [call.num_samples for call in recorded.calls] == [3, 2]
    assert [call.can_get_gradient for call in recorded.calls] == [True, True]
    outputs.clear()
    assert [call.can_get_gradient for call in recorded.calls] == [False, False]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_single_samples_gradients_are_those_of_its_row(index: int) -> None:
    model = Net()
    recorded = RecordedModel(model)
    loop_step(model)
    recorded.stop()
    (call,) = recorded.calls
    single = single_row(call, index)
    latents, keywords = call.args[0], call.kwargs
    row = slice(index, index + 1)
    output = model(
        latents[row],
        text=keywords["text"][row],
        timestep=keywords["timestep"][row],
        rotary=keywords["rotary"],
        scale=keywords["scale"],
    )[0]
    (gradient,) = call.output_gradients
    assert gradient is not None
    output.backward(gradient[row])
    expected = gradients(model)
    assert_same_bits(replayed(single, model), expected)
    losses = call.compute_replay_losses(model).losses
    assert single.compute_replay_losses(model).losses.item() == pytest.approx(losses[index].item(), rel=1e-5)
    assert single.num_samples == 1
    assert single.collect_row_tensors()["argument 0"].shape == (1, 6)


class Conditioned(Net):
    """As SDXL takes its pooled embedding: in a dict."""

    def forward(  # type: ignore[override]
        self, latents: torch.Tensor, *, conditions: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        return self.out(torch.cat([self.project(latents), self.text(conditions["pooled"])])[:3])


def test_a_single_sample_has_its_own_row_of_tensors_within_containers() -> None:
    model = Conditioned()
    recorded = RecordedModel(model)
    latents, keywords = inputs()
    model(latents, conditions={"pooled": keywords["text"]})
    single = single_row(recorded.calls[0], 2)
    assert torch.equal(single.kwargs["conditions"]["pooled"], keywords["text"][2:])


def test_recording_leaves_no_trace_on_the_model_and_none_on_its_class_after_its_end() -> None:
    model, other_model = Net(), Net()
    before = dict(vars(model))
    recorded = RecordedModel(model)
    loop_step(model)
    loop_step(other_model)
    assert vars(model) == before
    assert not model._forward_hooks
    assert len(recorded.calls) == 1
    recorded.stop()
    assert "__call__" not in vars(Net)
    loop_step(model)
    assert len(recorded.calls) == 1
    recorded.stop()  # once more does no harm
    recorded_model = RecordedModel(model)
    loop_step(model)
    assert [call.ids[1] for call in recorded_model.calls] == ["row 1 of micro-batch 0"]


def test_calls_without_gradients_or_within_torch_func_are_not_recorded() -> None:
    model = Net()
    recorded = RecordedModel(model)
    latents, keywords = inputs()
    with torch.no_grad():
        model(latents, **keywords)
    torch.func.grad(lambda x: model(x, **keywords)[0].sum())(latents)
    loop_step(model)
    (call,) = recorded.calls
    assert call.has_gradient


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
    recorded = RecordedModel(model, generator)
    output = model(inputs()[0])
    output.square().mean().backward()
    original = gradients(model)
    torch.randn(9, generator=generator)
    assert_same_bits(replayed(recorded.calls[0], model), original)


def test_a_replay_leaves_the_loops_own_generator_where_the_loop_has_it() -> None:
    generator = torch.Generator().manual_seed(40)
    model = Draws(generator)
    recorded = RecordedModel(model, generator)
    model(inputs()[0]).square().mean().backward()
    torch.randn(9, generator=generator)
    state = generator.get_state()
    recorded.stop()
    replay_micro_batch(RecordedCallMicroBatch.from_call(recorded.calls[0], model, step=1, micro_step=0, rank=0), model)
    assert torch.equal(generator.get_state(), state)


def is_same(found: list[torch.Tensor], *expected: torch.Tensor) -> bool:
    return list(map(id, found)) == list(map(id, expected))


def test_the_output_of_the_loss_is_the_first_with_a_gradient() -> None:
    good, better = (torch.randn(3, 4, requires_grad=True) * 2 for _ in range(2))
    plain, ids = torch.randn(3, 4), torch.tensor([1, 2])
    assert is_same(find_main_outputs(good), good)
    assert is_same(find_main_outputs((ids, plain, good)), good)
    assert is_same(find_main_outputs((plain, good, better)), good)
    assert is_same(find_main_outputs({"aux": plain, "sample": good}), good)
    assert is_same(find_main_outputs(Transformer2DModelOutput(sample=good)), good)
    assert is_same(find_main_outputs([ids, plain]), plain)
    assert is_same(find_main_outputs(SimpleNamespace(aux=plain, sample=good)), good)
    # A list has an output for each sample, as Z-Image returns them.
    assert is_same(find_main_outputs([good, better]), good, better)
    assert is_same(find_main_outputs(SimpleNamespace(sample=[good, better])), good, better)
    assert find_main_outputs([ids]) == []
    assert find_main_outputs(0.3) == []


class Listed(nn.Linear):
    """Takes a list of samples of any length, and returns one."""

    def forward(self, samples: list[torch.Tensor]) -> list[torch.Tensor]:  # type: ignore[override]
        return [super(Listed, self).forward(sample) for sample in samples]


def test_a_list_of_samples_has_a_gradient_for_each_of_them() -> None:
    model = Listed(6, 4)
    recorded = RecordedModel(model)
    samples = [torch.randn(length, 6) for length in (2, 5, 3)]
    outputs = model(samples)
    (outputs[0].sum() + 3 * outputs[2].sum()).backward()
    original = gradients(model)
    (call,) = recorded.calls
    assert call.num_samples == 3
    assert [None if g is None else float(g.mean()) for g in call.output_gradients] == [1, None, 3]
    single = single_row(call, 2)
    assert is_same(single.args[0], call.args[0][2])
    assert call.compute_replay_losses(model).losses.shape == (3,)
    call.compute_replay_losses(model).losses[[0, 2]].sum().backward()
    assert_same_bits(gradients(model), original)


def test_a_call_whose_output_is_no_tensor_is_not_kept() -> None:
    model = nn.Identity()
    recorded = RecordedModel(model)
    model([inputs()[0].long()])
    assert recorded.calls == []


def test_two_losses_of_one_output_add_their_gradients() -> None:
    model = nn.Linear(6, 4)
    recorded = RecordedModel(model)
    output = model(inputs()[0])
    output.sum().backward(retain_graph=True)
    (2 * output.sum()).backward()
    (call,) = recorded.calls
    (gradient,) = call.output_gradients
    assert gradient is not None
    assert gradient.unique().tolist() == [3.0]
    assert not call.is_differentiated_twice


def test_a_call_whose_gradient_is_differentiated_is_marked() -> None:
    model = nn.Linear(6, 4)
    recorded = RecordedModel(model)
    latents = inputs()[0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(latents).square().sum(), latents, create_graph=True)
    gradient.square().sum().backward()
    assert recorded.calls[0].is_differentiated_twice


def test_an_argument_that_was_overwritten_since_is_seen() -> None:
    model = nn.Linear(6, 4)
    recorded = RecordedModel(model)
    latents = inputs()[0]
    output = model(latents)
    assert recorded.calls[0].has_unmodified_arguments
    latents[1, 2] = 0.0
    assert not recorded.calls[0].has_unmodified_arguments
    assert output.isfinite().all()


@pytest.mark.parametrize(("is_closed", "num_calls"), [(False, 2), (True, 1)])
def test_calls_are_dropped_when_the_next_begins_after_a_step(is_closed: bool, num_calls: int) -> None:
    model = nn.Linear(6, 4)
    recorded = RecordedModel(model)
    model(inputs()[0]).sum().backward()
    recorded.log.is_step_over = is_closed
    assert len(recorded.calls) == 1
    model(inputs()[0]).sum().backward()
    assert len(recorded.calls) == num_calls


def verdict_of(model: nn.Module, recorded: RecordedModel, *switches: Fallback) -> Any:
    recorded.stop()
    batch = RecordedCallMicroBatch.from_call(recorded.calls[0], model, step=5, micro_step=0, rank=0)
    return diagnose(batch, DiagnosisContext(model, switches), kind="non_finite_loss")


def test_a_bad_output_is_not_blamed_on_the_gradient_that_came_back_to_it() -> None:
    model = Net()
    recorded = RecordedModel(model)

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
    assert not recorded.calls[0].has_finite_output
    verdict = verdict_of(model, recorded, Fallback("norm", "kernel", off, lambda: None, "eager"))
    assert (verdict.cause, verdict.switch) == ("kernel", "norm")
    assert verdict.timesteps == (999, 0, 37)


def test_a_loop_that_never_steps_keeps_its_newest_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_log, "_MAX_CALLS", 4)
    model = Net()
    recorded = RecordedModel(model)
    for seed in range(10):
        latents, keywords = inputs(seed)
        model(latents, **keywords)[0].square().mean().backward()
    recorded.stop()
    assert [call.micro_step for call in recorded.calls] == [6, 7, 8, 9]
    assert all(call.has_gradient for call in recorded.calls)


@pytest.mark.parametrize(("value", "is_bad"), [(torch.nan, True), (1e25, True), (1e15, False)])
def test_a_bad_gradient_for_a_good_output_is_seen_with_its_row(value: float, is_bad: bool) -> None:
    """It is the loop's affair: no fact about a sample, which the row says nothing about."""
    model = Net()
    recorded = RecordedModel(model)
    latents, keywords = inputs()
    target = torch.zeros(3, 6)
    target[2, 1] = value
    (model(latents, **keywords)[0] - target).square().mean().backward()
    (call,) = recorded.calls
    assert call.has_finite_output
    assert call.has_bad_gradient is is_bad
    assert call.bad_gradient_rows == ([2] if is_bad else [])
    if value == value:
        assert call.gradient_peak == pytest.approx(value * 2 / 18, rel=1e-5)


def test_an_overflow_of_the_backward_comes_back_at_the_recorded_gradients_size() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).half()
    with torch.no_grad():
        model[1].weight.fill_(30)
    recorded = RecordedModel(model)
    latents = torch.randn(8, 4, generator=torch.Generator().manual_seed(2)) * 0.01
    (model(latents.half()).float() * 600).sum().backward()
    original = gradients(model)
    assert not original["0.weight"].isfinite().all()
    assert not replayed(recorded.calls[0], model)["0.weight"].isfinite().all()
    assert verdict_of(model, recorded).cause == "precision"


def test_an_index_that_no_table_has_is_named_with_its_sample() -> None:
    model = Net()
    recorded = RecordedModel(model)
    latents, keywords = inputs()
    assert recorded.recorder.find_out_of_range_ids() == []
    keywords["timestep"] = torch.tensor([999, 1000, 37])
    with pytest.raises(IndexError):
        model(latents, **keywords)
    assert recorded.recorder.find_out_of_range_ids() == ["row 1 of micro-batch 0: timestep has 1000, time has 0..999"]
