"""Every optimizer under the gate, snapshots and checkpoints: what it keeps comes back bit for bit."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from inspect import signature
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from micro_batches import FakeContext
from safetensors.torch import load, save
from torch import nn

from dit_lora.config.optim import GroupConfig, GroupsConfig, OptimConfig
from dit_lora.config.optimizers import OPTIMIZERS
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.finite_gate import Gate, take_step_unless_bad
from dit_lora.guard.snapshots import Snapshots
from dit_lora.guard.state_checks import find_bad_state
from dit_lora.training.optim.build import (
    LearningRateSchedule,
    apply_schedule,
    build_optimizer,
    clip_gradients,
    compute_gradient_norms,
)
from dit_lora.training.optim.state import (
    drop_optimizer_state,
    load_optimizer_state,
    load_scalar_state,
    optimizer_state,
)

pytest.importorskip("bitsandbytes")
pytest.importorskip("prodigyopt")

NAMES = [name for name, record in OPTIMIZERS.items() if record.unpaged_variant is None]
"""All optimizers but those that page, which need a GPU."""
SHAPES = {"wide": (67, 70), "zero": (41, 103), "narrow": (5, 3)}
"""Two tensors that 8-bit moments are for, of no whole number of blocks; one starts at zero, as LoRA's B."""


def optim_of(name: str) -> OptimConfig:
    record = OPTIMIZERS[name]
    rates = (2e-2, 3e-3) if record.lr_bounds is None else (1.0, 1.0)
    has_eps = "eps" in signature(resolve_name(record.class_path)).parameters
    return OptimConfig(
        name=name,
        groups=GroupsConfig(
            adapter=GroupConfig(lr=rates[0]),
            connector=GroupConfig(lr=rates[1], weight_decay=0.3),
        ),
        schedule="cosine",
        warmup_steps=2,
        clip=60.0,
        weight_decay=0.05,
        **({"eps": 1e-7} if has_eps else {}),
    )


class Training:
    """A model towards random targets, by the steps of the loop; its gradients follow from weights and step."""

    def __init__(self, name: str) -> None:
        draws = torch.Generator().manual_seed(3)
        self.model = nn.Module()
        for key, shape in SHAPES.items():
            start = torch.randn(shape, generator=draws) * (key != "zero")
            self.model.register_parameter(key, nn.Parameter(start))
        self.targets = {key: torch.randn(shape, generator=draws) for key, shape in SHAPES.items()}
        self.optim = optim_of(name)
        weights = dict(self.model.named_parameters())
        members = {"adapter": ["wide", "zero"], "connector": ["narrow"]}
        groups = [
            {
                "name": group,
                "param_names": names,
                "params": [weights[n] for n in names],
                "lr": config.lr,
                **({} if config.weight_decay is None else {"weight_decay": config.weight_decay}),
            }
            for group, config in self.optim.groups.get_configured_groups().items()
            for names in [members[group]]
        ]
        self.optimizer = build_optimizer(groups, self.optim)
        self.schedule = LearningRateSchedule(self.optim, 8)

    def gradients(self, step: int) -> None:
        draws = torch.Generator().manual_seed(step)
        for key, parameter in self.model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draws)
            parameter.grad = parameter.detach() - self.targets[key] + 0.1 * noise

    def take(self, step: int, *, spoiled: str | None = None) -> None:
        self.gradients(step)
        if spoiled is not None:
            self.model.get_parameter(spoiled).grad.view(-1)[7] = torch.nan  # type: ignore[union-attr]
        gate, groups = Gate(Accelerator(cpu=True)), self.optimizer.param_groups
        norms = compute_gradient_norms(groups)
        gate.record_gradient_norms(norms)
        clip_gradients(groups, norms, self.optim)
        apply_schedule(groups, self.schedule, step)
        take_step_unless_bad(self.optimizer, gate.reduce_flags())
        self.optimizer.zero_grad(set_to_none=True)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.take(step)

    def tensors(self) -> dict[str, torch.Tensor]:
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        return {**weights, **optimizer_state(self.optimizer)}

    def everything(self) -> dict[str, Any]:
        """Weights, all state as the library has it, and the groups; not by way of `optimizer_state`."""
        state = {n: self.optimizer.state.get(p, {}) for n, p in self.model.named_parameters()}
        skipped = ("params", "d_denom", "d_hat")  # the last two are written, and never read
        groups = [{k: v for k, v in group.items() if k not in skipped} for group in self.optimizer.param_groups]
        weights = {n: p.detach() for n, p in self.model.named_parameters()}
        return deepcopy({"weights": weights, "state": state, "groups": groups})


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Types, dtypes and bits, all the way down."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        pair = [t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs)]
        assert torch.equal(*pair), where
    elif isinstance(ours, Mapping):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(ours, list):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where}/{number}")
    else:
        assert ours == theirs, where


def without_rates(everything: dict[str, Any]) -> dict[str, Any]:
    """A learning rate is a function of the step, and set before the gate is known."""
    return everything | {"groups": [group | {"lr": 0} for group in everything["groups"]]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spoiled", SHAPES)
def test_a_tripped_step_leaves_weights_and_all_state_bit_for_bit(name: str, spoiled: str) -> None:
    recovered, clean = Training(name), Training(name)
    recovered.take(1, spoiled=spoiled)
    recovered.train(1, 3)
    before = without_rates(recovered.everything())
    recovered.take(4, spoiled=spoiled)
    assert_same(without_rates(recovered.everything()), before)
    recovered.train(4, 5)
    clean.train(1, 5)
    assert_same(recovered.everything(), clean.everything())


@pytest.mark.parametrize("name", NAMES)
def test_going_back_to_a_snapshot_takes_the_same_steps_again(name: str) -> None:
    """To step 3, and to before the first step, where no moment was."""
    run = Training(name)
    snapshots = Snapshots(
        run.tensors,
        interval_steps=1,
        max_snapshots=2,
        write_back=lambda restored: load_scalar_state(run.optimizer, restored),
    )
    snapshots.take_snapshot(0)
    run.train(1, 3)
    snapshots.take_snapshot(3)
    at_3 = run.everything()
    run.train(4, 6)
    at_6 = run.everything()
    assert snapshots.restore_snapshot(3) == []
    assert_same(without_rates(run.everything()), without_rates(at_3))
    run.train(4, 6)
    assert_same(run.everything(), at_6)
    drop_optimizer_state(run.optimizer, snapshots.restore_snapshot(0))
    assert not run.optimizer.state
    run.train(1, 6)
    assert_same(run.everything(), at_6)


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_that_is_not_ours_goes_back_as_well(name: str) -> None:
    run = Training(name)
    parameters = dict(run.model.named_parameters())
    early, late = (LoopState(parameters, [run.optimizer], interval_steps=1) for _ in range(2))
    early.take_snapshot(0)
    run.train(1, 2)
    late.take_snapshot(2)
    run.train(3, 6)
    at_6 = run.everything()
    for step, state in ((2, late), (0, early)):
        state.restore_snapshot(step)
        run.train(step + 1, 6)
        assert_same(run.everything(), at_6)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_optimizer_goes_on_bit_for_bit_in_a_new_process(name: str) -> None:
    uninterrupted, interrupted, resumed = Training(name), Training(name), Training(name)
    uninterrupted.train(1, 6)
    interrupted.train(1, 3)
    weights = {n: p.detach() for n, p in interrupted.model.named_parameters()}
    stored = load(save({n: t.contiguous() for n, t in optimizer_state(interrupted.optimizer).items()}))
    resumed.model.load_state_dict(weights)
    load_optimizer_state(Accelerator(cpu=True).prepare(resumed.optimizer), stored)
    assert_same(without_rates(resumed.everything()), without_rates(interrupted.everything()))
    for tensor in stored.values():
        tensor.zero_()  # the file's memory: nothing of it is the optimizer's
    resumed.train(4, 6)
    assert_same(resumed.everything(), uninterrupted.everything())


def test_8_bit_moments_keep_the_codes_that_they_were_written_in() -> None:
    """Another release may come with others."""
    interrupted, resumed = Training("adamw_8bit"), Training("adamw_8bit")
    interrupted.train(1, 2)
    stored = {n: t.clone() for n, t in optimizer_state(interrupted.optimizer).items()}
    assert [name for name in stored if "qmap" in name] == ["qmap1", "qmap2"]
    stored["qmap2"] *= 2
    load_optimizer_state(resumed.optimizer, stored)
    tables = [s["qmap2"] for s in resumed.optimizer.state.values() if "qmap2" in s]
    assert len(tables) == 2
    assert tables[0] is tables[1]
    assert torch.equal(tables[0], stored["qmap2"])


def test_a_parameter_that_had_no_gradient_starts_after_a_resume() -> None:
    for name in NAMES:
        uninterrupted, resumed = Training(name), Training(name)
        for run in (uninterrupted, resumed):
            run.gradients(1)
            run.model.narrow.grad = None
            take_step_unless_bad(run.optimizer, torch.tensor(0.0))
        state = optimizer_state(uninterrupted.optimizer)
        assert not any(key.startswith("connector/narrow/") for key in state)
        load_optimizer_state(resumed.optimizer, {n: t.clone() for n, t in state.items()})
        for run in (uninterrupted, resumed):
            run.train(2, 4)
        assert_same(resumed.everything(), uninterrupted.everything())


def library_of(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The library's own class, with the recipe's values."""
    from bitsandbytes.optim import AdamW8bit
    from prodigyopt import Prodigy

    common: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.05}
    classes: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(groups, fused=True, **common),
        "adamw_8bit": lambda: AdamW8bit(groups, **common),
        "prodigy": lambda: Prodigy(groups, use_bias_correction=True, safeguard_warmup=True, **common),
    }
    return classes[name]()


@pytest.mark.parametrize("name", NAMES)
def test_the_trajectory_is_that_of_the_librarys_optimizer(name: str) -> None:
    ours, plain = Training(name), Training(name)
    weights, (adapter, connector) = plain.model, plain.optim.groups.get_configured_groups().values()
    groups: list[dict[str, Any]] = [
        {"params": [weights.wide, weights.zero], "lr": adapter.lr},
        {"params": [weights.narrow], "lr": connector.lr, "weight_decay": connector.weight_decay},
    ]
    library = library_of(name, groups)
    for step in range(1, 6):
        ours.gradients(step)
        plain.gradients(step)
        take_step_unless_bad(ours.optimizer, torch.tensor(0.0))
        library.step()
    for (key, value), other_value in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(value, other_value), key
        assert not torch.equal(value, Training(name).model.get_parameter(key)), key


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_that_are_told_are_those_that_are_kept(name: str) -> None:
    run = Training(name)
    state_bytes = OPTIMIZERS[name].state_bytes
    predicted_bytes = state_bytes(list(run.model.parameters()))
    meta = state_bytes([p.to("meta") for p in run.model.parameters()])
    run.train(1, 2)
    actual_bytes = {
        id(value): value.nbytes
        for state in run.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    assert sum(actual_bytes.values()) == predicted_bytes
    zero = 4 * (41 * 103 - 1) if name == "prodigy" else 0  # its start is one element
    assert meta == predicted_bytes + zero


def test_paged_moments_are_as_large_as_those_that_stay() -> None:
    sizes = [torch.empty(300_000, device="meta"), torch.empty(4095, device="meta")]
    blocks = 1172  # of 256 elements
    expected = 2 * (300_000 + 4 * blocks) + 2 * 4 * 4095 + 2 * 1024
    assert OPTIMIZERS["paged_adamw_8bit"].state_bytes(sizes) == expected
    assert OPTIMIZERS["adamw_8bit"].state_bytes(sizes[1:]) == 2 * 4 * 4095  # no table


def test_rates_are_reported_with_what_prodigy_found(capsys: pytest.CaptureFixture[str]) -> None:
    run = Training("prodigy")
    assert capsys.readouterr().out == ""  # the library prints a line about weight decay
    run.train(1, 4)
    d = run.optimizer.param_groups[0]["d"]
    assert d > 1e-6
    rates = apply_schedule(run.optimizer.param_groups, run.schedule, 5)
    factor = run.schedule.compute_rate("adapter", 5)
    assert [group["lr"] for group in run.optimizer.param_groups] == [factor, factor]
    assert rates == {"adapter": factor * d, "connector": factor * d}


@pytest.mark.parametrize(
    ("name", "key", "value", "named"),
    [
        ("adamw_8bit", "wide/absmax1", torch.nan, "adapter/wide/absmax1 has 1 NaN"),
        ("adamw_8bit", "zero/absmax2", torch.inf, "adapter/zero/absmax2 has 1 Inf"),
        ("adamw_8bit", "zero/absmax2", -1.0, "adapter/zero/absmax2 must not be negative"),
        ("adamw_8bit", "narrow/state2", -1.0, "connector/narrow/state2 must not be negative"),
        ("adamw_8bit", "narrow/state1", torch.nan, "connector/narrow/state1 has 1 NaN"),
        ("adamw_8bit", "wide/qmap1", torch.nan, "qmap1 has 1 NaN"),
        ("prodigy", "wide/s", torch.inf, "adapter/wide/s has 1 Inf"),
        ("prodigy", "narrow/exp_avg_sq", -1.0, "connector/narrow/exp_avg_sq must not be negative"),
        ("prodigy", "d", torch.nan, "adapter/d has 1 NaN"),
    ],
)
def test_bad_state_is_named_with_its_parameter(name: str, key: str, value: float, named: str) -> None:
    run = Training(name)
    run.train(1, 2)
    context = FakeContext(model=run.model, state=lambda: optimizer_state(run.optimizer).items())
    batch: Any = SimpleNamespace(step=3, rank=0, micro_step=0)
    assert find_bad_state(batch, context) is None
    if key == "d":
        run.optimizer.param_groups[0]["d"] = value
    else:
        parameter, _, state = key.partition("/")
        run.optimizer.state[run.model.get_parameter(parameter)][state].view(-1)[1] = value
    diagnosis = find_bad_state(batch, context)
    assert diagnosis is not None
    assert diagnosis.cause == "optimizer"
    assert named in diagnosis.message


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_resume_pages_what_was_paged() -> None:
    """bitsandbytes pages buffers of 100,000 elements and more."""
    pytest.importorskip("bitsandbytes")

    def build() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        draws = torch.Generator().manual_seed(0)
        parameter = nn.Parameter(torch.randn(400, 300, generator=draws).cuda())
        group = {"name": "adapter", "param_names": ["w"], "params": [parameter], "lr": 1e-2}
        return parameter, build_optimizer([group], OptimConfig(name="paged_adamw_8bit"))

    def train(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, *steps: int) -> None:
        for step in steps:
            draws = torch.Generator().manual_seed(step)
            parameter.grad = torch.randn(parameter.shape, generator=draws).cuda()
            optimizer.step()

    (weight, optimizer), (rebuilt, resumed) = build(), build()
    train(weight, optimizer, 1, 2, 3)
    stored = load(save({n: t.cpu() for n, t in optimizer_state(optimizer).items()}))
    rebuilt.data.copy_(weight.detach())
    load_optimizer_state(resumed, stored)
    assert all(getattr(resumed.state[rebuilt][name], "is_paged", False) for name in ("state1", "state2"))
    train(weight, optimizer, 4, 5)
    train(rebuilt, resumed, 4, 5)
    assert torch.equal(weight, rebuilt)
    assert_same(optimizer_state(resumed), optimizer_state(optimizer))
