"""A replay gives the same bits every time and leaves gradients and random state as they were."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from micro_batches import fake_batch
from torch import nn

from dit_lora.guard.diagnosis import Diagnosis
from dit_lora.guard.replay import MicroBatch, ReplayOutcome, probe_micro_batch, replay_micro_batch
from dit_lora.numerics.objectives import LossOutput

Replay = Callable[[MicroBatch, nn.Module], object]
NAMES = ["0.weight", "0.bias", "3.weight", "3.bias"]


class Unstable(torch.autograd.Function):
    """Right in the forward; one value of its gradient is not finite."""

    @staticmethod
    def forward(context: object, values: torch.Tensor) -> torch.Tensor:
        return values * 1.5

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        factors = torch.ones_like(gradient)
        factors[1, 4] = 0
        return gradient / factors


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(7, 12), nn.Dropout(0.4), nn.GELU(), nn.Linear(12, 3))
    return net.train()


def micro_batch(
    model: nn.Module,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda losses: losses,
    *,
    seed: int = 23,
) -> MicroBatch:
    """Three different rows; `change` is applied to their losses."""
    latents = torch.randn(3, 7, generator=torch.Generator().manual_seed(2))

    def forward() -> LossOutput:
        torch.manual_seed(seed)
        losses = model(latents).square().flatten(1).mean(1)
        return LossOutput(change(losses), torch.tensor([901, 17, 440]))

    return fake_batch(
        ids=("a.mp4", "b.mp4", "c.mp4"),
        step=6,
        micro_step=1,
        rank=0,
        tensors={"latents": latents},
        run=forward,
        select=lambda index: pytest.fail("nothing asked for a single sample"),
    )


def give_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients of a step under way: random, and none for one parameter."""
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == "3.bias" else torch.randn_like(parameter)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("replay", [replay_micro_batch, probe_micro_batch])
def test_a_replay_leaves_gradients_and_random_state_as_they_were(model: nn.Module, replay: Replay) -> None:
    grads = give_gradients(model)
    values = {n: g.clone() for n, g in grads.items() if g is not None}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(77)
    before = torch.get_rng_state()
    replay(micro_batch(model), model)
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name]
        assert parameter.grad is None or torch.equal(parameter.grad, values[name])
        assert torch.equal(parameter, weights[name])


@pytest.mark.parametrize("replay", [replay_micro_batch, probe_micro_batch])
def test_a_replay_that_raises_leaves_gradients_and_random_state_too(model: nn.Module, replay: Replay) -> None:
    def fail(losses: torch.Tensor) -> torch.Tensor:
        losses.sum().backward()
        raise RuntimeError("out of memory")

    grads = give_gradients(model)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="out of memory"):
        replay(micro_batch(model, fail), model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is grads[name] for name, parameter in model.named_parameters())


def seen_gradients(model: nn.Module, batch: MicroBatch) -> tuple[ReplayOutcome, dict[str, torch.Tensor]]:
    """The outcome of a run, and the gradients that it made and took away again."""
    grads: dict[str, torch.Tensor] = {}
    handles = [
        p.register_post_accumulate_grad_hook(lambda p, n=name: grads.update({n: p.grad.clone()}))
        for name, p in model.named_parameters()
    ]
    outcome = replay_micro_batch(batch, model)
    for handle in handles:
        handle.remove()
    return outcome, grads


def test_two_runs_are_equal_bit_for_bit_with_dropout_inside(model: nn.Module) -> None:
    give_gradients(model)  # none of which a run may add to
    first_loss, gradients = seen_gradients(model, micro_batch(model))
    torch.randn(4)
    second, repeated_grads = seen_gradients(model, micro_batch(model))
    assert first_loss == second
    assert sorted(gradients) == sorted(NAMES)
    assert all(torch.equal(gradients[name], repeated_grads[name]) for name in NAMES)
    other_losses, _ = seen_gradients(model, micro_batch(model, seed=24))
    assert other_losses.losses != first_loss.losses, "dropout draws nothing"


def test_a_run_is_the_backward_of_the_mean_loss(model: nn.Module) -> None:
    outcome, gradients = seen_gradients(model, micro_batch(model))
    losses, timesteps = micro_batch(model).forward()
    losses.mean().backward()
    assert outcome.losses == tuple(losses.tolist())
    assert len(set(outcome.losses)) == 3
    assert outcome.timesteps == tuple(timesteps.tolist()) == (901, 17, 440)
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert all(torch.equal(gradients[name], expected[name]) for name in NAMES)
    assert outcome.bad_gradients == ()
    assert not outcome.has_zero_gradient
    assert outcome.is_healthy(needs_gradient=True)


def test_a_loss_that_is_a_sum_has_as_many_times_the_gradient_as_there_are_samples(
    model: nn.Module,
) -> None:
    _, mean = seen_gradients(model, micro_batch(model))
    _, total = seen_gradients(model, replace(micro_batch(model), loss_is_sum=True))
    for name in NAMES:
        torch.testing.assert_close(total[name], mean[name] * 3)


def test_only_parameters_upstream_of_a_bad_backward_have_bad_gradients(model: nn.Module) -> None:
    model[2].register_forward_hook(lambda _module, _args, output: Unstable.apply(output))
    outcome = replay_micro_batch(micro_batch(model), model)
    assert outcome.bad_gradients == ("0.weight", "0.bias")
    assert outcome.has_finite_losses
    assert not outcome.is_finite
    assert not outcome.is_healthy(needs_gradient=False)
    assert not outcome.has_zero_gradient


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_loss_that_is_not_finite_is_kept_at_its_row(model: nn.Module, value: float) -> None:
    factors = torch.tensor([1.0, 1.0, value])
    outcome = replay_micro_batch(micro_batch(model, lambda losses: losses * factors), model)
    assert [loss - loss == 0 for loss in outcome.losses] == [True, True, False]
    assert str(outcome.losses[2]) == str(value)
    assert list(outcome.bad_gradients) == NAMES
    assert not outcome.has_finite_losses
    assert not outcome.is_healthy(needs_gradient=False)


def test_a_loss_is_bad_though_its_gradients_are_finite(model: nn.Module) -> None:
    shift = torch.tensor([0.0, torch.inf, 0.0])
    outcome = replay_micro_batch(micro_batch(model, lambda losses: losses + shift), model)
    assert outcome.bad_gradients == ()
    assert not outcome.has_finite_losses
    assert not outcome.is_healthy(needs_gradient=False)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda losses: losses * 0, id="times zero"),
        pytest.param(lambda losses: losses.detach(), id="no graph"),
        pytest.param(lambda losses: losses.detach().requires_grad_() * 2, id="graph of another"),
    ],
)
def test_a_loss_without_a_gradient_is_healthy_only_where_none_is_needed(
    model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    outcome = replay_micro_batch(micro_batch(model, change), model)
    assert outcome.has_zero_gradient
    assert outcome.is_healthy(needs_gradient=False)
    assert not outcome.is_healthy(needs_gradient=True)


def test_a_gradient_for_a_single_parameter_is_not_zero(model: nn.Module) -> None:
    model.requires_grad_(False)
    model[3].bias.requires_grad_()
    outcome = replay_micro_batch(micro_batch(model), model)
    assert not outcome.has_zero_gradient


def test_a_probed_replay_shows_the_op_that_failed_in_it(model: nn.Module) -> None:
    model[2].register_forward_hook(lambda _module, _args, output: Unstable.apply(output))
    origin = probe_micro_batch(micro_batch(model), model).first_bad_op
    assert origin is not None
    assert (origin.module, origin.direction, origin.op) == ("2", "backward", "aten.div.Tensor")
    assert probe_micro_batch(micro_batch(model, torch.Tensor.detach), model).first_bad_op is None


def test_a_verdicts_record_leaves_out_what_is_not_known_and_holds_lists() -> None:
    verdict = Diagnosis("data", "a has 1 NaN", 4, 1, sample_ids=("a", "b"), evidence={"losses": [0.2]})
    assert verdict.to_record() == {
        "cause": "data",
        "words": "a has 1 NaN",
        "step": 4,
        "rank": 1,
        "sample_ids": ["a", "b"],
        "timesteps": [],
        "evidence": {"losses": [0.2]},
    }


def test_a_sample_that_comes_twice_in_a_micro_batch_is_told_from_itself() -> None:
    """Two of one name are compared by identity: Python cannot say whether their tensors are equal."""

    def alone(row: int) -> MicroBatch:
        latents = torch.full((1, 4), float(row))
        forward = lambda: pytest.fail("nothing runs")  # noqa: E731
        return fake_batch(("a.mp4",), 1, 0, 0, {"latents": latents}, forward, alone)

    first_sample, second = alone(0), alone(1)
    assert second not in [first_sample]
    assert second in [first_sample, second]
