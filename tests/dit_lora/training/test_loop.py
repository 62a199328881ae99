"""The loop on a model small enough to check by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from dit_lora.config import GroupConfig, GroupsConfig, OptimConfig
from dit_lora.data.loader import Batch
from dit_lora.numerics.gate import NonFiniteError
from dit_lora.numerics.streams import Streams, integers
from dit_lora.objectives import LossOutput
from dit_lora.training.loop import Loop, StepResult, train
from dit_lora.training.optimizer import build_optimizer, build_schedule


def batches(count: int, size: int = 2) -> list[Batch]:
    g = torch.Generator().manual_seed(0)
    return [
        Batch(
            ids=tuple(f"{k}-{row}" for row in range(size)),
            draws=tuple(range(k * size, (k + 1) * size)),
            tensors={"x": torch.randn(size, 3, generator=g)},
        )
        for k in range(count)
    ]


def losses_of(model: nn.Module, batch: Batch, streams: Streams) -> LossOutput:
    timesteps = integers(0, 1000, streams("timestep"))
    return LossOutput(model(batch.tensors["x"]).square().flatten(1).mean(1) + 1, timesteps)


def build(accumulate: int = 1, clip: float | None = 1.0, losses: Callable = losses_of) -> Loop:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    names = [name for name, _ in model.named_parameters()]
    group = {"name": "adapter", "params": list(model.parameters()), "param_names": names, "lr": 0.1}
    optim = OptimConfig(groups=GroupsConfig(adapter=GroupConfig(lr=0.1)), clip=clip, weight_decay=0)
    prepared, optimizer = accelerator.prepare(model, build_optimizer([group], optim))
    schedule = build_schedule(optim, 10)
    return Loop(accelerator, prepared, losses, optimizer, schedule, optim, accumulate, seed=7)


def run(loop: Loop, steps: int, data: list[Batch]) -> list[StepResult]:
    results: list[StepResult] = []
    train(loop, data, start_step=0, steps=steps, stop_asked=lambda: 0, on_step=results.append)
    return results


def test_gradients_reach_the_optimizer_clipped_and_are_reported_unclipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = build(clip=0.01)
    seen = []
    inner = loop.optimizer.optimizer  # type: ignore[attr-defined]
    step = inner.step

    def spy(*arguments: Any) -> None:
        grads = [p.grad for group in inner.param_groups for p in group["params"]]
        seen.append(torch.nn.utils.get_total_norm(grads).item())
        step(*arguments)

    monkeypatch.setattr(inner, "step", spy)
    results = run(loop, 2, batches(2))
    assert seen == pytest.approx([0.01, 0.01], rel=1e-3)
    assert all(result.grad_norm > 0.05 for result in results)
    assert results[0].grad_norm_groups["adapter"] == pytest.approx(results[0].grad_norm)


def test_every_micro_step_and_rank_seeds_dropout_anew_and_repeats_by_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(seeds: list[int]) -> Callable:
        def losses(model: nn.Module, batch: Batch, streams: Streams) -> LossOutput:
            seeds.append(torch.initial_seed())
            return losses_of(model, batch, streams)

        return losses

    first: list[int] = []
    again: list[int] = []
    run(build(accumulate=3, losses=record(first)), 2, batches(6))
    torch.manual_seed(99)
    run(build(accumulate=3, losses=record(again)), 2, batches(6))
    assert len(set(first)) == 6
    assert first == again

    other_rank: list[int] = []
    monkeypatch.setattr(Accelerator, "process_index", 1)
    run(build(accumulate=3, losses=record(other_rank)), 2, batches(6))
    assert not set(first) & set(other_rank)


def test_a_result_tells_every_samples_loss_and_timestep() -> None:
    (result,) = run(build(accumulate=2), 1, batches(2))
    expected = integers(0, 1000, Streams(7, range(4))("timestep")).tolist()
    assert result.timesteps == expected
    assert len(result.losses) == 4
    assert result.loss == pytest.approx(sum(result.losses) / 4)
    assert result.lr_groups == {"adapter": 0.1}
    assert result.seconds > result.data_seconds > 0


def test_a_bad_loss_is_stopped_before_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under DeepSpeed, backward also steps the optimizer."""

    def losses(model: nn.Module, batch: Batch, streams: Streams) -> LossOutput:
        output = losses_of(model, batch, streams)
        return output._replace(losses=output.losses * torch.tensor([1.0, torch.nan]))

    loop = build(losses=losses)
    called: list[int] = []
    monkeypatch.setattr(loop.accelerator, "backward", lambda loss: called.append(1))
    before = [p.clone() for p in loop.model.parameters()]
    with pytest.raises(NonFiniteError, match="0-1"):
        run(loop, 1, batches(1))
    assert not called
    assert all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    assert all(p.grad is None for p in loop.model.parameters())


def test_a_stop_code_reaches_the_result() -> None:
    loop, results = build(), []
    train(loop, batches(1), start_step=0, steps=1, stop_asked=lambda: 143, on_step=results.append)
    assert results[0].stop_code == 143
