"""Learning rates by step, clipping by group."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dit_lora.config.optim import GroupConfig, GroupsConfig, OptimConfig
from dit_lora.config.optimizers import OPTIMIZERS
from dit_lora.errors import DitLoraError
from dit_lora.training.optim.build import (
    LearningRateSchedule,
    apply_schedule,
    build_optimizer,
    clip_gradients,
    compute_gradient_norms,
    compute_schedule_factor,
    require_optimizer,
)


def test_warm_up_rises_from_the_first_step_and_constant_stays() -> None:
    factors = [compute_schedule_factor("constant", step, warmup=4, steps=10) for step in range(1, 11)]
    assert factors == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]


def test_linear_and_cosine_fall_from_the_peak_towards_zero() -> None:
    linear = [compute_schedule_factor("linear", step, warmup=2, steps=6) for step in range(1, 7)]
    assert linear == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = [compute_schedule_factor("cosine", step, warmup=0, steps=4) for step in range(1, 5)]
    assert cosine == pytest.approx([1.0, 0.8535533906, 0.5, 0.1464466094])
    assert compute_schedule_factor("cosine", 9, warmup=0, steps=4) == 0.0  # past the end, never negative


def test_each_group_has_its_own_schedule() -> None:
    optim = OptimConfig(
        groups=GroupsConfig(
            adapter=GroupConfig(lr=1.0),
            connector=GroupConfig(lr=10.0, schedule="linear", warmup_steps=0),
        ),
        schedule="constant",
        warmup_steps=2,
    )
    schedule = LearningRateSchedule(optim, steps=4)
    groups: list[dict] = [{"name": "adapter", "lr": 0}, {"name": "connector", "lr": 0}]
    assert apply_schedule(groups, schedule, 1) == {"adapter": 0.5, "connector": 10.0}
    assert apply_schedule(groups, schedule, 3) == {"adapter": 1.0, "connector": 5.0}
    assert [group["lr"] for group in groups] == [1.0, 5.0]


def groups_with(*gradients: list[float]) -> list[dict]:
    groups = []
    for name, values in zip(("adapter", "connector", "backbone"), gradients, strict=False):
        parameter = nn.Parameter(torch.zeros(len(values)))
        parameter.grad = torch.tensor(values)
        groups.append({"name": name, "params": [parameter], "param_names": [name], "lr": 1.0})
    return groups


def config(**clips: float | None) -> OptimConfig:
    shared = clips.pop("shared")
    group_configs = {name: GroupConfig(lr=1, clip=clip) for name, clip in clips.items()}
    return OptimConfig(groups=GroupsConfig(**group_configs), clip=shared)


def test_the_shared_clip_bounds_the_joint_norm() -> None:
    groups = groups_with([3.0, 0.0], [0.0, 4.0])
    norm = clip_gradients(groups, compute_gradient_norms(groups), config(adapter=None, connector=None, shared=1.0))
    assert norm.item() == 5.0
    assert groups[0]["params"][0].grad.tolist() == pytest.approx([0.6, 0.0], rel=1e-5)
    assert groups[1]["params"][0].grad.tolist() == pytest.approx([0.0, 0.8], rel=1e-5)


def test_gradients_of_several_dtypes_are_scaled_as_each_alone() -> None:
    values = torch.randn(33, generator=torch.Generator().manual_seed(3)).double()
    groups = groups_with([], [])
    for group, dtypes in zip(groups, [[torch.bfloat16, torch.float32], [torch.float64]], strict=True):
        group["params"] = [nn.Parameter(torch.zeros(33, dtype=dtype)) for dtype in dtypes]
        for parameter in group["params"]:
            parameter.grad = values.to(parameter.dtype, copy=True)
    norms = compute_gradient_norms(groups)
    norm = clip_gradients(groups, norms, config(adapter=None, connector=None, shared=0.7))
    factor = 0.7 / (norm.item() + 1e-6)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        expected = values.to(parameter.dtype).double() * factor
        eps = torch.finfo(parameter.dtype).eps
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=eps, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_clipping_takes_few_launches_of_many_gradients() -> None:
    """With a factor of another dtype PyTorch multiplies one gradient at a time."""
    groups = groups_with([])
    groups[0]["params"] = [nn.Parameter(torch.zeros(7, 5, device="cuda")) for _ in range(100)]
    for parameter in groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter)
    norms, optim = compute_gradient_norms(groups), config(adapter=None, shared=1.0)
    clip_gradients(groups, norms, optim)  # loads what is loaded once
    with torch.profiler.profile() as profiled:
        clip_gradients(groups, norms, optim)
    launches = [e for e in profiled.events() if e.name == "cudaLaunchKernel"]
    assert 0 < len(launches) < 20


def test_a_groups_own_clip_leaves_the_others_alone() -> None:
    """One exploding group must not scale the others to nothing (N25)."""
    groups = groups_with([300.0], [0.5], [0.25])
    optim = config(adapter=2.0, connector=None, backbone=None, shared=10.0)
    norm = clip_gradients(groups, compute_gradient_norms(groups), optim)
    assert norm.item() == pytest.approx((300**2 + 0.5**2 + 0.25**2) ** 0.5)
    grads = [group["params"][0].grad.item() for group in groups]
    assert grads == pytest.approx([2.0, 0.5, 0.25], rel=1e-5)


def test_the_shared_clip_still_holds_beside_a_groups_own() -> None:
    groups = groups_with([300.0], [3.0], [4.0])
    optim = config(adapter=2.0, connector=None, backbone=None, shared=1.0)
    clip_gradients(groups, compute_gradient_norms(groups), optim)
    grads = [group["params"][0].grad.item() for group in groups]
    assert grads == pytest.approx([2.0, 0.6, 0.8], rel=1e-5)


def test_betas_and_eps_reach_adamw() -> None:
    optim = OptimConfig(betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3)
    optimizer = build_optimizer(groups_with([1.0]), optim)
    assert optimizer.defaults["betas"] == (0.8, 0.99)
    assert optimizer.defaults["eps"] == 1e-6
    assert optimizer.param_groups[0]["weight_decay"] == 0.3
    assert optimizer.defaults["fused"]


class WithoutEps(torch.optim.Optimizer):
    """Takes the arguments of Lion, which has no `eps`."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


def test_an_optimizer_is_given_what_its_constructor_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    record = replace(OPTIMIZERS["adamw"], class_path=f"{__name__}:WithoutEps", class_kwargs={})
    monkeypatch.setitem(OPTIMIZERS, "without_eps", record)
    optim = OptimConfig(name="without_eps", betas=(0.8, 0.99), weight_decay=0.3)
    optimizer = build_optimizer(groups_with([1.0], [2.0]), optim)
    assert optimizer.defaults == {"lr": 1e-4, "betas": (0.8, 0.99), "weight_decay": 0.3}
    with pytest.raises(DitLoraError, match=r"^optim\.eps=1e-06: without_eps has no eps; remove it from the recipe$"):
        require_optimizer(optim.model_copy(update={"eps": 1e-6}), torch.device("cpu"))
    require_optimizer(optim, torch.device("cpu"))
    monkeypatch.setitem(OPTIMIZERS, "without_eps", replace(record, decay_in_groups=True))
    groups = build_optimizer(groups_with([1.0], [2.0]), optim).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.3]


def test_no_clip_scales_nothing() -> None:
    groups = groups_with([300.0])
    clip_gradients(groups, compute_gradient_norms(groups), config(adapter=None, shared=None))
    assert groups[0]["params"][0].grad.item() == 300.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_bad_element_makes_its_groups_norm_bad_and_no_other(value: float) -> None:
    groups = groups_with([1.0, value, 2.0], [1.0])
    norms = compute_gradient_norms(groups)
    assert not torch.isfinite(norms["adapter"])
    assert norms["connector"].item() == 1.0


def test_groups_decay_and_step_at_their_own_rates() -> None:
    """AdamW's first step moves by lr for every gradient, and decays by lr * weight_decay."""
    groups = groups_with([3.0], [-0.1])
    for group in groups:
        group["params"][0].data.fill_(1.0)
    groups[1] |= {"weight_decay": 0.5}
    optim = OptimConfig(
        groups=GroupsConfig(adapter=GroupConfig(lr=0.1), connector=GroupConfig(lr=0.01)),
        weight_decay=0.0,
    )
    optimizer = build_optimizer(groups, optim)
    apply_schedule(optimizer.param_groups, LearningRateSchedule(optim, 1), 1)
    optimizer.step()
    assert groups[0]["params"][0].item() == pytest.approx(1 - 0.1, rel=1e-5)
    assert groups[1]["params"][0].item() == pytest.approx(1 - 0.01 * 0.5 + 0.01, rel=1e-5)


def bounds(**limits: float | None) -> Callable[[str], float | None]:
    return lambda group: limits[group]


def test_an_adaptive_bound_scales_its_group_alone_and_the_shared_clip_takes_what_is_left() -> None:
    groups = groups_with([30.0], [4.0])
    optim = config(adapter=None, connector=None, shared=5.0)
    norm = clip_gradients(groups, compute_gradient_norms(groups), optim, bounds(adapter=3.0, connector=None))
    assert norm.item() == pytest.approx((30**2 + 4**2) ** 0.5)
    grads = [group["params"][0].grad.item() for group in groups]
    assert grads == pytest.approx([3.0, 4.0], rel=1e-5)  # their joint norm is 5 already


@pytest.mark.parametrize(("limit", "clip"), [(2.0, 1.0), (0.5, 1.0), (2.0, None), (0.5, 9.0)])
def test_a_groups_bound_is_the_smaller_of_its_clip_and_the_limit(limit: float, clip: float | None) -> None:
    for has_own_lr in (True, False):
        groups = groups_with([300.0])
        optim = config(adapter=clip if has_own_lr else None, shared=None if has_own_lr else clip)
        clip_gradients(groups, compute_gradient_norms(groups), optim, bounds(adapter=limit))
        expected = min(limit, clip or limit)
        assert groups[0]["params"][0].grad.item() == pytest.approx(expected, rel=1e-5)


def test_a_limit_above_the_norm_changes_no_bit() -> None:
    groups = groups_with([0.3, 0.4])
    before = groups[0]["params"][0].grad.clone()
    optim = config(adapter=None, shared=None)
    clip_gradients(groups, compute_gradient_norms(groups), optim, bounds(adapter=0.6))
    assert torch.equal(groups[0]["params"][0].grad, before)


def test_a_schedule_falls_to_its_least_share() -> None:
    schedule_options: dict[str, int] = {"warmup": 2, "steps": 6}
    for kind in ("linear", "cosine"):
        plain = [compute_schedule_factor(kind, step, **schedule_options) for step in range(1, 9)]
        raised = [compute_schedule_factor(kind, step, **schedule_options, min_factor=0.25) for step in range(1, 9)]
        assert raised[:2] == plain[:2]  # warm-up is as it was
        assert raised[2:] == pytest.approx([0.25 + 0.75 * factor for factor in plain[2:]])
        assert raised[-1] == 0.25
