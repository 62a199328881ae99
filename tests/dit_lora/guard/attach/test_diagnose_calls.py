"""What a failed step is put down to: facts about inputs, the loop's own loss, and experiments that may fail."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loop_helpers import bad_batch, batch, causes, everything, same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.guard.attach.guard import Guard

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def train(
    model: nn.Module,
    loss_of: Loss,
    batches: list[torch.Tensor],
    config: RecoveryConfig | None = None,
) -> Guard:
    """Train a plain loop whose weights must stay finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard.watch(model, optimizer, config=config)
    for x in batches:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return guard


def root_of_zero(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that is finite with a gradient that is not: NaN goes through the branch that is not taken."""
    output = model(x)
    zero = output - output.detach()
    return torch.where(zero > 0, zero.sqrt(), zero).mean()


def across_the_batch(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Divides by the spread of the batch, which is 0 where all rows are alike."""
    output = model(x)
    return ((output - output.mean(0)) / output.std(0)).square().mean() + output.mean()


def by_a_teacher(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The teacher gives NaN for what the model takes well."""
    teacher = (x - 100).log()
    return (model(x) - teacher.mean(1, keepdim=True)).square().mean()


@pytest.mark.parametrize(
    ("loss_of", "x", "is_seen"),
    [
        (root_of_zero, batch(2), "non_finite_gradient"),
        (across_the_batch, batch(2, 1).repeat(3, 1), "non_finite_loss"),
        (by_a_teacher, batch(2), "non_finite_loss"),
    ],
)
def test_what_the_loops_own_loss_makes_is_no_samples_fault(loss_of: Loss, x: torch.Tensor, is_seen: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)

    def loss(net: nn.Module, given: torch.Tensor) -> torch.Tensor:
        return loss_of(net, given) if given is x else net(given).square().mean()

    guard = train(model, loss, [batch(1), x, batch(3)])
    (event,) = guard.events
    assert (event["step"], event["kind"], event["action"]) == (2, is_seen, "skip")
    assert event["sample_ids"] == []
    assert event["verdict"]["cause"] == "unknown"
    message = "the model's output is finite, but the gradient of the output is not: the cause is a target, "
    assert event["verdict"]["words"].startswith(message)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_bad_target_is_its_items_fault_if_a_loader_handed_it_out(loaded: bool) -> None:
    torch.manual_seed(0)
    inputs, targets = batch(1, 8), batch(2, 8)
    targets[5, 3] = torch.nan
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard.watch(model, optimizer)
    pairs: Any = DataLoader(TensorDataset(inputs, targets), batch_size=4)
    if not loaded:
        pairs = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    for x, y in pairs:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    (event,) = guard.events
    diagnosis = (event["verdict"]["cause"], event["sample_ids"])
    assert diagnosis == (("data", ["dataset index 5"]) if loaded else ("unknown", []))
    if loaded:
        assert event["verdict"]["words"].startswith("batch[1] has 1 NaN among 4 values")


def test_a_gradient_that_is_differentiated_itself_is_not_run_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    scale = 1.0

    def penalty(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).sum() * scale, x, create_graph=True)
        return (gradient.square().sum(1).sqrt() - 1).square().mean()

    assert train(model, penalty, [batch(1), batch(2)]).events == []
    scale = 0.0  # and the root of 0 has no gradient
    (event,) = train(model, penalty, [batch(3)]).events
    assert (event["verdict"]["cause"], event["action"]) == ("unknown", "skip")
    assert event["sample_ids"] == []
    assert "create_graph=True" in event["verdict"]["words"]


def test_a_batch_without_samples_is_told_and_its_step_taken() -> None:
    torch.manual_seed(0)
    guard = train(
        nn.Linear(4, 2),
        lambda model, x: model(x).square().mean(),
        [batch(1), torch.zeros(0, 4), batch(2)],
    )
    (event,) = guard.events
    assert (event["step"], event["kind"], event["action"]) == (2, "non_finite_loss", "report")
    assert event["verdict"]["cause"] == "inputs"
    assert event["verdict"]["words"] == "the batch has no samples"
    assert guard.format_summary() is None


class Fussy(nn.Module):
    """Takes batches of three only, counts, draws and remembers; a value of 7 breaks it."""

    def __init__(self, sizes: tuple[int, ...] = (3,)) -> None:
        super().__init__()
        self.sizes = sizes
        self.out = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.num_calls = 0
        self.history: list[int] = []
        self.lengths = {"last": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in self.sizes:
            raise ValueError("three rows, please")
        self.seen += 1
        self.num_calls += 1
        random_int = np.random.randint(100)  # noqa: NPY002  the global generator, as many loops use it
        self.history.append(random.randrange(100) + int(random_int))
        self.lengths["last"] = self.num_calls
        noise = torch.randn(len(x), 2)
        return self.out(x) / (x != 7).all(1, keepdim=True) + noise

    def traces(self) -> list[Any]:
        return [int(self.seen), self.num_calls, list(self.history), dict(self.lengths)]


def seven(number: int) -> torch.Tensor:
    x = batch(number)
    x[1, 2] = 7
    return x


@pytest.mark.parametrize("sizes", [(3,), (1, 3)], ids=["not alone", "alone too"])
def test_experiments_leave_no_trace_and_their_errors_end_nothing(sizes: tuple[int, ...]) -> None:
    """A loop that leaves out its bad steps itself, without a guard, comes to the same."""
    results: list[list[Any]] = []
    for guarded in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        model = Fussy(sizes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        guard = Guard.watch(model, optimizer) if guarded else None
        for number in range(5):
            optimizer.zero_grad()
            model((seven if number == 2 else batch)(number)).square().mean().backward()
            if guarded or number != 2:
                optimizer.step()
        results.append([model.traces(), everything([model], [optimizer]), torch.rand(2)])
    (unguarded_traces, unguarded, unguarded_draws), (traces, watched, draws) = results
    assert traces == unguarded_traces
    assert same(watched, unguarded)
    assert torch.equal(draws, unguarded_draws)
    assert guard is not None
    (event,) = guard.events
    assert (event["step"], event["action"]) == (3, "skip")
    assert event["sample_ids"] == ["row 1 of micro-batch 0"]


def test_a_model_that_cannot_be_run_again_is_told_so() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, tickets: list[int], x: torch.Tensor) -> torch.Tensor:
            tickets.pop()
            return self.layer(x) / (x != 7).all(1, keepdim=True)

    model = Once()
    guard = train(model, lambda net, x: net([1], x).square().mean(), [batch(1), seven(2), batch(3)])
    (event,) = guard.events
    assert (event["verdict"]["cause"], event["action"]) == ("unknown", "skip")
    assert event["sample_ids"] == []
    assert "the call cannot be replayed by itself (IndexError: pop from" in event["verdict"]["words"]


def test_memory_that_runs_out_in_an_experiment_ends_only_that() -> None:
    torch.manual_seed(0)

    class Full(nn.Linear):
        num_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            if self.num_calls > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x) / (x != 7).all(1, keepdim=True)

    guard = train(Full(4, 2), lambda net, x: net(x).square().mean(), [batch(1), seven(2)])
    (event,) = guard.events
    assert (event["verdict"]["cause"], event["action"]) == ("unknown", "skip")


def test_arguments_that_were_overwritten_since_prove_nothing() -> None:
    torch.manual_seed(0)

    class InPlace(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x.clone()) / (x != 7).all(1, keepdim=True)
            x.zero_()
            return output

    guard = train(InPlace(4, 2), lambda net, x: net(x).square().mean(), [batch(1), seven(2)])
    (event,) = guard.events
    assert (event["verdict"]["cause"], event["sample_ids"]) == ("unknown", [])
    assert event["verdict"]["words"].startswith("not replayed: the call's inputs have been overwritten")


def test_after_many_failed_steps_in_a_row_only_facts_are_looked_at() -> None:
    torch.manual_seed(0)
    guard = train(
        Fussy((1, 3)),
        lambda net, x: net(x).square().mean(),
        [batch(0), *(seven(number) for number in range(1, 13)), bad_batch(13)],
    )
    *earlier_verdicts, last_verdict, fact = (event["verdict"] for event in guard.events)
    assert [verdict["sample_ids"] for verdict in earlier_verdicts[:10]] == [["row 1 of micro-batch 0"]] * 10
    assert last_verdict["words"] == "not replayed: too many consecutive steps have failed"
    assert (fact["cause"], fact["sample_ids"]) == ("inputs", ["row 1 of micro-batch 0"])
    assert len(guard.events) == 13


@pytest.mark.parametrize(
    ("loss_of", "x"),
    [
        (lambda net, x: net(x * 0.5).square().mean(), bad_batch(2)[1:2]),
        (lambda net, x: net(x).square().mean() + net.bias.sum() * torch.nan, batch(2)),
    ],
    ids=["the only row of a batch", "a gradient of no call"],
)
def test_a_failed_step_costs_one_of_the_skips_that_a_stop_leaves(loss_of: Loss, x: torch.Tensor) -> None:
    """With a stop in the ladder, `max_skips` decides when it comes, though no sample can be named."""
    torch.manual_seed(0)

    def loss(net: nn.Module, given: torch.Tensor) -> torch.Tensor:
        return loss_of(net, given) if given is x else net(given).square().mean()

    guard = train(nn.Linear(4, 2), loss, [batch(1), x, batch(3)], config=RecoveryConfig(max_skips=2))
    assert [event["action"] for event in guard.events] == ["skip"]
    assert guard.format_summary() == "1 of 3 optimizer steps were not taken"


def test_two_optimizers_of_one_failed_step_have_the_same_cause() -> None:
    """The first to step puts the weight back; what the second finds still came from it."""
    torch.manual_seed(0)
    enter, leave = nn.Linear(4, 3), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (enter, leave)]
    guard = Guard.watch(nn.Sequential(enter, leave), optimizers)
    for number in range(4):
        if number == 2:
            enter.weight.data[1, 2] = torch.nan
        for optimizer in optimizers:
            optimizer.zero_grad()
        leave(enter(batch(number)).tanh()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert {cause for cause, _ in causes(guard.events)} == {"weights"}
    assert {event["step"] for event in guard.events} == {3}
