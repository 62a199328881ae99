"""A shut gate changes no bit of weights and optimizer; two ranks are in tests/recipes/test_distributed.py."""

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from dit_lora.errors import DitLoraError
from dit_lora.guard.finite_gate import (
    BadStateError,
    Gate,
    NonFiniteError,
    can_skip_on_device,
    has_nonfinite_weights,
    take_step_unless_bad,
)

Make = Callable[[list[dict[str, object]]], torch.optim.Optimizer]
Inner = torch.optim.Optimizer | AcceleratedOptimizer
SHUT, OPEN = torch.tensor(1.0), torch.tensor(0.0)

OPTIMIZERS: Mapping[str, Make] = {
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1, fused=True),
    "fused Adam": lambda groups: torch.optim.Adam(groups, amsgrad=True, fused=True),
    "foreach AdamW": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1, foreach=True),
    "single AdamW": lambda groups: torch.optim.AdamW(groups, foreach=False, fused=False),
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1),
}


@pytest.fixture(scope="module", autouse=True)
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def gate(accelerator: Accelerator) -> Gate:
    return Gate(accelerator)


class Training:
    """Parameters of three shapes in two groups; gradients follow from the step, and are clipped to norm 1."""

    def __init__(self, make: Make, *, wrapped: bool = False) -> None:
        draws = torch.Generator().manual_seed(11)
        shapes = ((5, 3), (33,), (2, 3, 7))
        self.parameters = [nn.Parameter(torch.randn(s, generator=draws)) for s in shapes]
        groups: list[dict[str, object]] = [
            {"params": self.parameters[:2], "lr": 0.02},
            {"params": self.parameters[2:], "lr": 0.3},
        ]
        self.bare = make(groups)
        self.optimizer: Inner = AcceleratedOptimizer(self.bare, device_placement=False) if wrapped else self.bare

    def backward(self, step: int, bad: float | None = None) -> None:
        draws = torch.Generator().manual_seed(step)
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        if bad is not None:
            assert self.parameters[1].grad is not None
            self.parameters[1].grad[7] = bad
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        # A norm of NaN makes every gradient NaN; one of Inf makes the others zero, which decays moments.
        is_nan = [bool(p.grad.isnan().any()) for p in self.parameters if p.grad is not None]
        assert any(is_nan) is (bad is not None)

    def bits(self) -> dict[str, torch.Tensor]:
        state = {f"weight {i}": p.detach().clone() for i, p in enumerate(self.parameters)}
        for number, parameter in enumerate(self.parameters):
            for name, value in self.bare.state.get(parameter, {}).items():
                state[f"{name} {number}"] = torch.as_tensor(value).detach().clone()
        return state


def assert_same_bits(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [
        name
        for name, tensor in ours.items()
        if not torch.equal(tensor.reshape(-1).view(torch.int32), theirs[name].view(-1).view(torch.int32))
    ]
    assert not different


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "accelerated"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_shut_gate_leaves_weights_moments_and_step_counts_bit_for_bit(name: str, wrapped: bool, bad: float) -> None:
    run = Training(OPTIMIZERS[name], wrapped=wrapped)
    for step in (1, 2):
        run.backward(step)
        take_step_unless_bad(run.optimizer, OPEN)
    before = run.bits()
    assert len(before) > len(run.parameters), "no optimizer state is compared"
    run.backward(3, bad)
    take_step_unless_bad(run.optimizer, SHUT)
    assert_same_bits(run.bits(), before)


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "accelerated"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shut_at", [1, 3])
def test_open_steps_around_a_shut_one_are_those_of_an_optimizer_without_a_gate(
    name: str, wrapped: bool, shut_at: int
) -> None:
    """Also where the first step is shut, before there is any moment."""
    gated, plain = Training(OPTIMIZERS[name], wrapped=wrapped), Training(OPTIMIZERS[name])
    start = gated.bits()
    for step in (1, 2, 3, 4):
        if step == shut_at:
            gated.backward(9, torch.nan)
            take_step_unless_bad(gated.optimizer, SHUT)
        gated.backward(step)
        take_step_unless_bad(gated.optimizer, OPEN)
        plain.backward(step)
        plain.bare.step()
    assert_same_bits(gated.bits(), plain.bits())
    assert not torch.equal(gated.bits()["weight 2"], start["weight 2"])


def test_a_shut_first_step_of_fused_sgd_leaves_no_momentum_that_nothing_was_written_to() -> None:
    run = Training(lambda groups: torch.optim.SGD(groups, momentum=0.9, fused=True))
    run.backward(1, torch.nan)
    take_step_unless_bad(run.optimizer, SHUT)
    assert all(state.get("momentum_buffer") is None for state in run.bare.state.values())


@pytest.mark.parametrize("flag", [OPEN, SHUT], ids=["open", "shut"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "accelerated"])
def test_the_flag_is_gone_after_the_step(wrapped: bool, flag: torch.Tensor) -> None:
    run = Training(OPTIMIZERS["fused AdamW"], wrapped=wrapped)
    run.backward(1)
    take_step_unless_bad(run.optimizer, flag)
    assert "found_inf" not in vars(run.bare)


def test_the_flag_is_gone_after_a_step_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(OPTIMIZERS["fused AdamW"])
    recorded = []

    def step() -> None:
        recorded.append(vars(run.bare)["found_inf"])
        raise ValueError("out of memory")

    monkeypatch.setattr(run.bare, "step", step)
    with pytest.raises(ValueError, match="out of memory"):
        take_step_unless_bad(run.optimizer, SHUT)
    assert recorded == [SHUT]
    assert "found_inf" not in vars(run.bare)


def test_only_fused_optimizers_of_whole_tensors_gate_on_the_device() -> None:
    num_gates = {name: can_skip_on_device(Training(make).bare) for name, make in OPTIMIZERS.items()}
    assert {name for name, on_device in num_gates.items() if on_device} == {
        "fused AdamW",
        "fused Adam",
    }
    mixed = Training(OPTIMIZERS["fused AdamW"]).bare
    mixed.param_groups[1]["fused"] = False
    assert not can_skip_on_device(mixed)


def test_sharded_parameters_are_decided_on_by_the_host() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        parameter = nn.Parameter(distribute_tensor(torch.randn(6, 3), mesh, [Shard(0)]))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
        assert not can_skip_on_device(optimizer)
        before = parameter.full_tensor().detach().clone()
        parameter.grad = torch.full_like(parameter, torch.nan)
        take_step_unless_bad(optimizer, SHUT)
        assert torch.equal(parameter.full_tensor(), before)
        assert not has_nonfinite_weights(optimizer)
        with torch.no_grad():
            parameter.to_local()[4, 1] = torch.nan
        assert has_nonfinite_weights(optimizer)
    finally:
        dist.destroy_process_group()


def norms(*values: float) -> dict[str, torch.Tensor]:
    return {f"group {i}": torch.tensor(value) for i, value in enumerate(values)}


def agreed(gate: Gate) -> float:
    flag = gate.reduce_flags()
    assert flag.dtype is torch.float32  # what fused optimizers read
    assert flag.ndim == 0
    return flag.item()


def test_finite_losses_and_gradients_agree_on_zero(gate: Gate) -> None:
    """The largest loss, a loss of zero and a group without a gradient are no faults."""
    gate.record_losses(torch.tensor([0.0, 3.4e38, 0.7]))
    gate.record_losses(torch.tensor([1e-45, 2.0, -3.0]), bad_data=False)
    gate.record_gradient_norms(norms(0.0, 5.0))
    assert gate.local_flags.tolist() == [False, False, False, False]
    assert agreed(gate) == 0.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("micro_step", [0, 1])
def test_one_loss_that_is_not_finite_shuts_the_gate(gate: Gate, value: float, micro_step: int) -> None:
    losses = torch.tensor([[1.0, 2.0, 0.3], [0.5, 1.5, 4.0]], requires_grad=True)
    with torch.no_grad():
        losses[micro_step, 1] = value
    for row in losses:
        gate.record_losses(row)
    gate.record_gradient_norms(norms(1.0, 2.0))
    assert gate.local_flags.tolist() == [micro_step == 0, micro_step == 1, False, False]
    assert agreed(gate) == 1.0


def test_bad_data_shuts_the_gate_though_its_loss_is_finite(gate: Gate) -> None:
    gate.record_losses(torch.tensor([1.0, 0.4]), bad_data=True)
    gate.record_losses(torch.tensor([0.2, 2.0]))
    gate.record_gradient_norms(norms(1.0, 2.0))
    assert agreed(gate) == 1.0


@pytest.mark.parametrize("values", [(torch.inf, 0.2), (3.0, torch.nan), (torch.inf, torch.nan)])
def test_one_group_whose_gradient_is_not_finite_shuts_the_gate(gate: Gate, values: tuple[float, ...]) -> None:
    gate.record_losses(torch.tensor([1.0, 0.4]))
    gate.record_gradient_norms(norms(*values))
    assert gate.local_flags.tolist() == [False, True, False]
    assert agreed(gate) == 1.0


def test_a_step_without_any_gradient_shuts_the_gate(gate: Gate) -> None:
    """It trains nothing, and still decays moments and weights."""
    gate.record_losses(torch.tensor([1.0, 0.4]))
    gate.record_gradient_norms(norms(0.0, 0.0, -0.0))
    assert gate.local_flags.tolist() == [False, False, True]
    assert agreed(gate) == 1.0


def test_losses_are_noted_without_their_graph(gate: Gate) -> None:
    losses = torch.tensor([1.0, 0.4], requires_grad=True) * 2
    gate.record_losses(losses)
    gate.record_gradient_norms(norms(0.3, 1.2))
    assert not gate.reduce_flags().requires_grad


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_bad_weight_of_any_group_is_seen(value: float, number: int, dtype: torch.dtype) -> None:
    run = Training(OPTIMIZERS["SGD"])
    run.parameters[1].data = run.parameters[1].data.to(dtype)
    assert not has_nonfinite_weights(run.bare)
    with torch.no_grad():
        run.parameters[number].view(-1)[5] = value
    flag = has_nonfinite_weights(AcceleratedOptimizer(run.bare, device_placement=False))
    assert flag.dtype is torch.bool
    assert flag.item()


def test_a_rank_that_has_no_row_of_a_sharded_weight_is_judged_by_the_others() -> None:
    parts = [nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.ones(2, 4))]
    optimizer = torch.optim.SGD(parts, lr=0.1)
    assert not has_nonfinite_weights(optimizer)
    with torch.no_grad():
        parts[1][0, 0] = torch.nan
    assert has_nonfinite_weights(optimizer)
    assert not has_nonfinite_weights(torch.optim.SGD(parts[:1], lr=0.1))


def test_what_the_guard_raises_is_agreed_on_by_all_ranks_and_exits_with_3() -> None:
    event = {"step": 4, "kind": "non_finite_loss"}
    nonfinite_error = NonFiniteError("step 4: non-finite loss", event)
    event["step"] = 5
    state_error = BadStateError("the weights are lost", "diverged_weights")
    assert nonfinite_error.event == {"step": 4, "kind": "non_finite_loss"}
    assert state_error.kind == "diverged_weights"
    for error in (nonfinite_error, state_error):
        assert isinstance(error, DitLoraError)
        assert (error.exit_code, error.collective) == (3, True)
