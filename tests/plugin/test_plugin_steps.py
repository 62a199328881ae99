"""What the guard does in a step: with a scaler, a closure, several models or optimizers, after a resume, in plain PyTorch."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import dit_lora
from dit_lora.errors import DitLoraError
from dit_lora.numerics.gate import NonFiniteError
from dit_lora.numerics.guard import Guard
from dit_lora.numerics.plugin.checks import CHECKS

Events = list[dict[str, Any]]


class TextEncoder(nn.Linear):
    """The model before the denoiser."""


class Denoiser(nn.Linear):
    """The model that gives the prediction."""


def fresh_accelerator(**how: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **how)


def batch(number: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(number))


def bad_batch(number: int) -> torch.Tensor:
    x = batch(number)
    x[1, 2] = torch.nan
    return x


def everything(models: list[nn.Module], optimizers: list[Any]) -> list[torch.Tensor]:
    states = [state for one in optimizers for state in one.state.values()]
    moments = [value for state in states for value in state.values() if torch.is_tensor(value)]
    return [t.detach().clone() for t in [*(p for m in models for p in m.parameters()), *moments]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def causes(events: Events) -> list[tuple[str, str]]:
    return [(event["verdict"]["cause"], event["action"]) for event in events]


class Two:
    """A denoiser after a text encoder, one optimizer over both; the denoiser alone is given to the guard."""

    def __init__(self, folder: Path | None = None, *, split: bool = False, **ladder: Any) -> None:
        self.accelerator = fresh_accelerator()
        torch.manual_seed(0)
        self.models = [TextEncoder(4, 4), Denoiser(4, 2)]
        parameters = [list(model.parameters()) for model in self.models]
        groups = parameters if split else [[*parameters[0], *parameters[1]]]
        optimizers = [torch.optim.AdamW(group, lr=0.1) for group in groups]
        prepared = self.accelerator.prepare(*self.models, *optimizers)
        self.optimizers = list(prepared[2:])
        self.guard = Guard.attach(
            self.accelerator,
            self.models[1],
            self.optimizers if split else self.optimizers[0],
            folder=folder,
            config=dit_lora.LadderConfig(**ladder),
        )

    def step(self, x: torch.Tensor, target: float = 0.0) -> None:
        encoder, denoiser = self.models
        loss = (denoiser(encoder(x).tanh()) - target).square().mean()
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_([p for m in self.models for p in m.parameters()], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        return everything(self.models, self.optimizers)


def spoil_once(parameter: nn.Parameter, value: float) -> None:
    """One element of the next gradient."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        gradient = gradient.clone()
        gradient.view(-1)[1] = value
        return gradient

    handle = parameter.register_hook(hook)


@pytest.mark.parametrize("split", [False, True], ids=["one optimizer", "an optimizer each"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_bad_gradient_of_either_model_stops_the_step_of_both_and_is_named(
    which: int, split: bool
) -> None:
    loop = Two(split=split)
    loop.step(batch(1))
    before = loop.state()
    spoil_once(loop.models[which].weight, torch.inf)
    loop.step(batch(2))
    assert same(loop.state(), before)
    (event,) = loop.guard.events
    assert (event["kind"], event["action"]) == ("non_finite_gradient", "skip")
    name = f"{type(loop.models[which]).__name__}.weight"
    assert f"the gradient of {name} was not finite" in event["verdict"]["words"]
    loop.step(batch(3))
    now = loop.state()
    assert not any(map(torch.equal, before[:4], now[:4]))  # weights and biases of both


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
        loop.step(batch(3))
    loop.step(batch(4))
    (event,) = loop.guard.events
    assert event["action"] == "rollback"
    assert "TextEncoder.weight" in event["verdict"]["words"]
    assert same([p.detach() for m in loop.models for p in m.parameters()], start)
    assert not loop.optimizers[0].state


def test_what_a_sample_or_a_target_spoils_is_blamed_on_the_call_that_was_given_it() -> None:
    loop = Two()
    loop.step(batch(1))
    loop.step(bad_batch(2))
    loop.step(batch(3), target=torch.nan)
    first, second = (event["verdict"] for event in loop.guard.events)
    assert first["words"] == "TextEncoder: argument 0 has 1 NaN among 4 values"
    assert first["sample_ids"] == ["sample 1 of micro-batch 0"]
    assert "gradient of the output has 2 NaN" in second["words"]  # of the denoiser's 2, not 4


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
    with pytest.raises(DitLoraError, match=r"model is a torch.nn.Module; got none"):
        Guard.attach(accelerator, None, optimizer)  # type: ignore[arg-type]


def test_a_bad_loss_in_fp16_leaves_scaler_schedule_and_weights_as_they_were() -> None:
    """Clipping unscales before the loss is judged; the next iteration must not find it done."""
    accelerator = fresh_accelerator()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = Denoiser(4, 2)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    optimizer, schedule = accelerator.prepare(plain, schedule)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    guard = Guard.attach(accelerator, model, optimizer)
    for number in range(1, 6):
        before, rate = everything([model], [optimizer]), schedule.get_last_lr()
        accelerator.backward(
            model((bad_batch if number in (2, 3) else batch)(number)).square().mean()
        )
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        is_bad = number in (2, 3)
        assert same(everything([model], [optimizer]), before) is is_bad
        assert (schedule.get_last_lr() == rate) is is_bad
    assert accelerator.scaler.get_scale() == 8.0
    assert causes(guard.events) == [("data", "skip")] * 2


def plain_loop(optimizer_of: Callable[..., Any], steps: int, guarded: bool, **how: Any) -> Any:
    """A closure each step, in plain PyTorch; NaN in the steps of `bad`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = optimizer_of(model.parameters())
    guard = Guard.attach(None, model, optimizer) if guarded else None
    states = []
    for number in range(steps):
        x = bad_batch(number) if number in how.get("bad", ()) else batch(number)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        returned = optimizer.step(closure)
        assert torch.is_tensor(returned)
        states.append(everything([model], [optimizer]))
    return states, guard


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_is_judged_after_it_ran_and_a_healthy_run_is_bit_for_bit_as_without(
    name: str,
) -> None:
    bare, _ = plain_loop(OPTIMIZERS[name], 5, guarded=False)
    guarded, guard = plain_loop(OPTIMIZERS[name], 5, guarded=True)
    assert guard.events == []
    assert all(same(one, other) for one, other in zip(bare, guarded, strict=True))
    states, guard = plain_loop(OPTIMIZERS[name], 5, guarded=True, bad=(2,))
    assert causes(guard.events) == [("data", "skip")]
    weights = [[t for t in state if t.dtype is torch.float32][:4] for state in states]
    assert same(weights[2], weights[1])
    assert not same(weights[3], weights[2])


def test_a_closure_that_goes_bad_after_weights_were_moved_goes_back_to_a_snapshot() -> None:
    model = nn.Linear(4, 1)
    start = everything([model], [])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    guard = Guard.attach(None, model, optimizer)
    evaluations: list[int] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        evaluations.append(1)
        loss = model(bad_batch(0) if len(evaluations) == 3 else batch(0)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(evaluations) == 3
    assert guard.events[0]["weights_of_step"] == 0
    assert same(everything([model], []), start)


def test_a_plain_loop_is_guarded_without_accelerate(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    guard = Guard.attach(None, model, optimizer, lr_scheduler=schedule)
    for number in range(4):
        before, rate = everything([model], [optimizer]), schedule.get_last_lr()
        loss = model(bad_batch(number) if number == 2 else batch(number)).square().mean()
        optimizer.zero_grad()  # between forward and backward, as many loops have it
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        assert same(everything([model], [optimizer]), before) is (number == 2)
        assert (schedule.get_last_lr() == rate) is (number == 2)
    assert causes(guard.events) == [("data", "skip")]
    assert guard.events[0]["sample_ids"] == ["sample 1 of micro-batch 0"]
    with caplog.at_level(logging.WARNING, logger="dit_lora"):
        guard.detach()
    assert "1 of 4 optimizer steps were not taken" in caplog.text


@pytest.mark.parametrize("fused", [False, True])
def test_a_plain_loops_own_scaler_finds_its_scale_unhindered(fused: bool) -> None:
    results = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1e38, growth_interval=2)
        guard = Guard.attach(None, model, optimizer) if guarded else None
        for number in range(8):
            scaler.scale(model(batch(number)).square().sum() * 8).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([*everything([model], [optimizer]), torch.tensor(scaler.get_scale())])
        assert guard is None or (guard.events == [] and guard._watched.calls == [])
    assert results[0][-1] < 1e38
    assert same(*results)


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
        else:  # by a module around it, as an adapter is loaded
            nn.Sequential(self.model).load_state_dict({f"0.{n}": t for n, t in weights.items()})


@pytest.mark.parametrize("how", ["accelerator.load_state", "load_state_dict", "the weights alone"])
def test_a_rollback_after_a_resume_goes_back_to_what_was_loaded(how: str, tmp_path: Path) -> None:
    first = Resumable()
    for number in range(10):
        first.step(number)
    first.accelerator.save_state(str(tmp_path), safe_serialization=False)
    weights = {n: t.clone() for n, t in first.model.state_dict().items()}
    moments = first.optimizer.state_dict()
    second = Resumable()
    second.resume(how, tmp_path, weights, moments)
    loaded = second.state()
    for number in range(10, 13):
        second.step(number)
    with torch.no_grad():
        second.optimizer.state[second.model.weight]["exp_avg"].view(-1)[0] = torch.nan
    second.step(13)
    second.step(14)
    (event,) = second.guard.events
    assert (event["action"], event["weights_of_step"]) == ("rollback", 0)
    assert same(second.state(), loaded)
    assert torch.equal(second.model.weight, weights["weight"])


def test_zero_gradients_that_the_loss_asks_for_are_taken_as_without_a_guard() -> None:
    """GRPO with equal rewards: the advantages, and so loss and gradient, are 0; AdamW still moves."""
    results = []
    for guarded in (False, True):
        accelerator, model = fresh_accelerator(), nn.Linear(4, 2, dtype=torch.float32)
        with torch.no_grad():
            model.weight.fill_(0.3)
            model.bias.fill_(0.1)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
        guard = Guard.attach(accelerator, model, optimizer) if guarded else None
        for number in range(30):
            advantage = float(number == 0)
            constant = 1.0 if number > 15 else 0.0  # a loss that says nothing and is not 0
            accelerator.backward((model(batch(number)) * advantage).sum() + constant)
            optimizer.step()
            optimizer.zero_grad()
        results.append(everything([model], [optimizer]))
        assert guard is None or guard.events == []
    assert same(*results)


class Cut(nn.Linear):
    """A backward that gives zeros while `is_cut`."""

    is_cut = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.requires_grad and self.is_cut:
            y.register_hook(torch.zeros_like)
            return y * 1.0
        return y


def cut_loop(steps: int, is_cut: Callable[[int], bool], **how: Any) -> Guard:
    accelerator, model = fresh_accelerator(), Cut(4, 2)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    guard = Guard.attach(accelerator, model, optimizer, **how)
    for number in range(steps):
        model.is_cut = is_cut(number)
        accelerator.backward((model(batch(number)) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return guard


def test_gradients_that_are_lost_now_and_then_do_not_end_a_run_and_lost_for_good_do(
    tmp_path: Path,
) -> None:
    guard = cut_loop(60, lambda number: number % 3 == 0)
    assert {event["action"] for event in guard.events} == {"skip"}
    assert len(guard.events) == 20
    with pytest.raises(NonFiniteError, match="no gradient reached a trained weight in 11 steps"):
        cut_loop(60, lambda number: number > 5, folder=tmp_path)


def test_each_check_can_be_turned_off() -> None:
    without = {name: [one for one in CHECKS if one != name] for name in CHECKS}
    assert cut_loop(20, lambda _: True, checks=without["zero_gradient"]).events == []
    kinds = []
    for checks in (CHECKS, without["loss"], ["zero_gradient", "weights"], []):
        accelerator, model = fresh_accelerator(), nn.Linear(4, 2)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
        guard = Guard.attach(accelerator, model, optimizer, checks=checks)
        for number in range(2):
            accelerator.backward(model(bad_batch(0) if not number else batch(0)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        kinds.append([event["kind"] for event in guard.events])
    assert kinds[:2] == [["non_finite_loss"], ["non_finite_gradient"]]
    assert kinds[2][0] == "non_finite_weights"
    assert kinds[3] == []
    with pytest.raises(DitLoraError, match="checks are some of loss, gradient, zero_gradient"):
        Guard.attach(accelerator, model, optimizer, checks=["losses"])


def test_norms_that_squares_would_overflow_or_lose_are_no_fault() -> None:
    for scale in (1e25, 1e-30):
        accelerator, model = fresh_accelerator(), nn.Linear(4, 2)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
        guard = Guard.attach(accelerator, model, optimizer)
        accelerator.backward(model(batch(0)).mean() * scale)
        optimizer.step()
        assert guard.events == []
        assert optimizer.state


class Timed(nn.Linear):
    """Fails late in the schedule, whatever the sample is."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.where(timestep > 900, torch.nan, 1.0)[:, None]


@pytest.mark.parametrize("rows", [1, 3])
def test_what_depends_on_the_timestep_is_not_called_data(rows: int) -> None:
    accelerator, model = fresh_accelerator(), Timed(4, 2)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    guard = Guard.attach(accelerator, model, optimizer)
    for number in range(4):
        timesteps = torch.full((rows,), 100)
        timesteps[-1] = 950 if number == 2 else 100
        accelerator.backward(model(batch(number, rows), timestep=timesteps).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    (event,) = guard.events
    assert (event["verdict"]["cause"], event["action"]) == ("inputs", "skip")
    assert event["sample_ids"] == [f"sample {rows - 1} of micro-batch 0"]


class Counting(nn.Linear):
    """Counts its calls and rescales in buffers, as quantized layers do; has a frozen weight."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("calls", torch.zeros(3))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1.0
        return super().forward(self.frozen(x))


def counting_loop(spoil: Callable[[int, Counting, torch.Tensor], None]) -> Guard:
    accelerator, model = fresh_accelerator(), Counting()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = accelerator.prepare(torch.optim.AdamW(trained))
    guard = Guard.attach(accelerator, model, optimizer)
    for number in range(5):
        x = batch(number)
        spoil(number, model, x)
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return guard


def test_buffers_that_the_loop_itself_changes_are_not_damage_and_frozen_weights_that_memory_changes_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def in_the_data(number: int, model: Counting, x: torch.Tensor) -> None:
        if number == 3:
            x[1, 2] = torch.nan

    def in_memory(number: int, model: Counting, x: torch.Tensor) -> None:
        if number == 3:
            model.frozen.weight.data[0, 0] = 3e38

    assert causes(counting_loop(in_the_data).events) == [("data", "skip")]
    with pytest.raises(NonFiniteError, match=r"of the step before; they are in .*frozen") as error:
        counting_loop(in_memory)
    assert error.value.event["verdict"]["cause"] == "weights"
    assert error.value.event["sample_ids"] == []


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
