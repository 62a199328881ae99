"""Snapshots on a CPU, of fused AdamW runs; the CUDA stream has a test marked gpu."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dit_lora.errors import DitLoraError
from dit_lora.guard.snapshots import Snapshots

Tensors = dict[str, torch.Tensor]


class Run:
    """Fused AdamW on parameters of three shapes, one bf16 and one transposed; gradients follow from the step."""

    def __init__(self, device: str = "cpu") -> None:
        draws = torch.Generator().manual_seed(7)
        transposed = torch.randn(7, 3, generator=draws).to(device).t()
        self.parameters = {
            "A": torch.nn.Parameter(torch.randn(5, 3, generator=draws).to(device)),
            "B": torch.nn.Parameter(torch.randn(33, generator=draws).bfloat16().to(device)),
            "C": torch.nn.Parameter(transposed),
        }
        assert not self.parameters["C"].is_contiguous()
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.1, fused=True)

    def state(self) -> Tensors:
        moments = {
            f"{name}/{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
        }
        return {**self.parameters, **moments}

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            draws = torch.Generator().manual_seed(step)
            for p in self.parameters.values():
                # With the parameter's strides, as autograd has it and the fused optimizer wants it on CUDA.
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=draws))
            self.optimizer.step()

    def values(self) -> Tensors:
        return {name: tensor.detach().clone() for name, tensor in self.state().items()}

    def drop(self, names: list[str]) -> None:
        for name in names:
            parameter, _, key = name.partition("/")
            del self.optimizer.state[self.parameters[parameter]][key]


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def snapshots(run: Run) -> Snapshots:
    return Snapshots(run.state, interval_steps=10)


def assert_same_bits(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        pair = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, theirs[name])]
        assert torch.equal(*pair), name


def buffers_of(snapshots: Snapshots, step: int) -> dict[str, int]:
    return {name: buffer.data_ptr() for name, buffer in snapshots._snapshots[step].items()}


def test_parameters_moments_and_step_counts_come_back_bit_for_bit(run: Run, snapshots: Snapshots) -> None:
    run.train(1, 2)
    with torch.no_grad():
        run.parameters["A"][0, 0] = -0.0
        run.parameters["B"][1] = torch.finfo(torch.bfloat16).tiny / 4
    before = run.values()
    assert {t.dtype for t in before.values()} == {torch.float32, torch.bfloat16}
    assert before["A/step"].shape == ()
    snapshots.take_snapshot(2)
    run.train(3, 5)
    assert not torch.equal(before["C/exp_avg"], run.state()["C/exp_avg"])
    assert snapshots.restore_snapshot(2) == []
    assert_same_bits(run.values(), before)


def test_strided_views_keep_their_neighbours(run: Run) -> None:
    full_tensor = torch.randn(6, 7)
    every_other, before = full_tensor[::2, 1::3], full_tensor.clone()
    snapshots = Snapshots(lambda: {"view": every_other}, interval_steps=1)
    snapshots.take_snapshot(0)
    full_tensor.mul_(3.7)
    snapshots.restore_snapshot(0)
    expected = before * 3.7
    expected[::2, 1::3] = before[::2, 1::3]
    assert torch.equal(full_tensor, expected)


def test_training_after_going_back_equals_the_first_time(run: Run, snapshots: Snapshots) -> None:
    run.train(1, 4)
    snapshots.take_snapshot(4)
    snapshots.before_update()
    run.train(5, 7)
    initial_values = run.values()
    run.train(8, 9)
    snapshots.restore_snapshot(4)
    run.train(5, 7)
    assert_same_bits(run.values(), initial_values)


def test_tensors_born_after_a_snapshot_are_named_for_the_caller_to_drop(run: Run, snapshots: Snapshots) -> None:
    snapshots.take_snapshot(0)
    run.train(1, 3)
    initial_values = run.values()
    new_tensors = snapshots.restore_snapshot(0)
    assert new_tensors == [f"{p}/{key}" for p in "ABC" for key in ("step", "exp_avg", "exp_avg_sq")]
    assert_same_bits(
        {name: run.values()[name] for name in new_tensors},
        {n: initial_values[n] for n in new_tensors},
    )
    run.drop(new_tensors)
    run.train(1, 3)
    assert_same_bits(run.values(), initial_values)


def test_names_that_grow_are_held_from_the_next_snapshot_on(run: Run, snapshots: Snapshots) -> None:
    snapshots.take_snapshot(0)
    run.train(1, 1)
    snapshots.take_snapshot(0)
    after = run.values()
    run.train(2, 2)
    assert snapshots.restore_snapshot(0) == []
    assert_same_bits(run.values(), after)


def test_what_training_does_after_a_snapshot_does_not_reach_it(run: Run, snapshots: Snapshots) -> None:
    run.train(1, 1)
    before = run.values()
    snapshots.take_snapshot(1)
    for tensor in run.state().values():
        tensor.detach().fill_(torch.nan)
    assert snapshots.find_nonfinite(1) == []
    snapshots.restore_snapshot(1)
    assert_same_bits(run.values(), before)


def test_the_oldest_gives_way_to_a_new_one(run: Run) -> None:
    snapshots = Snapshots(run.state, interval_steps=1, max_snapshots=3)
    for step in (10, 20, 30, 40):
        snapshots.take_snapshot(step)
    assert snapshots.steps == [20, 30, 40]


def test_going_back_forgets_what_came_later_and_not_what_came_before(run: Run) -> None:
    snapshots = Snapshots(run.state, interval_steps=1, max_snapshots=4)
    for step in (10, 20, 30, 40):
        snapshots.take_snapshot(step)
    snapshots.restore_snapshot(20)
    assert snapshots.steps == [10, 20]


def test_a_step_taken_again_holds_the_newer_values(run: Run, snapshots: Snapshots) -> None:
    snapshots.take_snapshot(5)
    snapshots.take_snapshot(10)
    run.train(1, 1)
    newer_values = run.values()
    snapshots.take_snapshot(10)
    assert snapshots.steps == [5, 10]
    run.train(2, 2)
    snapshots.restore_snapshot(10)
    assert_same_bits(run.values(), newer_values)


def test_buffers_are_used_again_once_shapes_are_known(run: Run, snapshots: Snapshots) -> None:
    run.train(1, 1)
    snapshots.take_snapshot(10)
    first_buffers = buffers_of(snapshots, 10)
    snapshots.take_snapshot(20)
    second = buffers_of(snapshots, 20)
    assert not set(first_buffers.values()) & set(second.values())
    snapshots.take_snapshot(30)
    assert buffers_of(snapshots, 30) == first_buffers
    snapshots.take_snapshot(30)
    assert buffers_of(snapshots, 30) == first_buffers
    snapshots.drop_snapshot(20)
    snapshots.take_snapshot(40)
    assert buffers_of(snapshots, 40) == second


def test_a_buffer_of_another_shape_or_dtype_is_not_used_again() -> None:
    live = {"a": torch.randn(3)}
    snapshots = Snapshots(lambda: live, interval_steps=1, max_snapshots=1)
    for tensor in (torch.randn(1), torch.randn(3, 3), torch.randn(3, 3, dtype=torch.float64)):
        live["a"] = tensor
        snapshots.take_snapshot(0)
        expected = tensor.clone()
        tensor.zero_()
        snapshots.restore_snapshot(0)
        assert torch.equal(tensor, expected)


def test_a_step_that_is_not_held_is_refused_naming_those_held(run: Run, snapshots: Snapshots) -> None:
    for action in (snapshots.restore_snapshot, snapshots.find_nonfinite, snapshots.drop_snapshot):
        with pytest.raises(DitLoraError, match="there is no snapshot of step 7; steps with a snapshot: none"):
            action(7)
    snapshots.take_snapshot(20)
    snapshots.take_snapshot(10)
    for action in (snapshots.restore_snapshot, snapshots.find_nonfinite, snapshots.drop_snapshot):
        with pytest.raises(DitLoraError, match="there is no snapshot of step 7; steps with a snapshot: 10, 20"):
            action(7)


@pytest.mark.parametrize(
    "change",
    [lambda live: live.pop("z"), lambda live: live.update(z=torch.ones(4, 1))],
    ids=["gone", "another shape"],
)
def test_a_snapshot_that_no_longer_fits_is_refused_before_anything_changes(
    change: Callable[[Tensors], object],
) -> None:
    live = {"a": torch.randn(4), "z": torch.randn(4)}
    snapshots = Snapshots(lambda: live, interval_steps=1)
    snapshots.take_snapshot(1)
    snapshots.take_snapshot(2)
    live["a"].add_(2.5)
    change(live)
    expected = {name: tensor.clone() for name, tensor in live.items()}
    with pytest.raises(DitLoraError, match=r"cannot restore step 1: .*\n  - z$"):
        snapshots.restore_snapshot(1)
    assert_same_bits(live, expected)
    assert snapshots.steps == [1, 2]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_poisoned_snapshot_names_its_tensors(run: Run, snapshots: Snapshots, value: float) -> None:
    run.train(1, 1)
    snapshots.take_snapshot(1)
    run.state()["B/exp_avg_sq"][32] = value
    snapshots.take_snapshot(2)
    assert snapshots.find_nonfinite(1) == []
    assert snapshots.find_nonfinite(2) == ["B/exp_avg_sq"]


def test_a_snapshot_is_due_every_so_many_steps(snapshots: Snapshots) -> None:
    assert [step for step in range(25) if snapshots.is_snapshot_due(step)] == [0, 10, 20]


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_parameter_comes_back_in_place(mesh: dist.DeviceMesh) -> None:
    parameter = torch.nn.Parameter(distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)]))
    before = parameter.full_tensor().detach().clone()
    snapshots = Snapshots(lambda: {"p": parameter}, interval_steps=1)
    snapshots.take_snapshot(1)
    assert not isinstance(snapshots._snapshots[1]["p"], DTensor)
    with torch.no_grad():
        parameter.mul_(-1.3)
    snapshots.restore_snapshot(1)
    assert torch.equal(parameter.full_tensor(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_update_on_cuda_waits_for_the_copy_and_take_does_not() -> None:
    """Sleeping on the current stream stands for a step's work: the copy must come after it.

    Into buffers that exist: to pin new memory may wait for the device.
    """
    run = Run("cuda")
    big = torch.zeros(64 << 20, device="cuda")
    snapshots = Snapshots(lambda: {**run.state(), "big": big}, interval_steps=1, max_snapshots=1)
    run.train(1, 1)
    snapshots.take_snapshot(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # cycles: about 0.3 s
    big.fill_(3.5)
    snapshots.take_snapshot(1)
    assert not torch.cuda.current_stream().query(), "take waited for the device"
    assert snapshots._snapshots[1]["big"].is_pinned()
    snapshots.before_update()
    big.fill_(-1.0)
    before = run.values()
    run.train(2, 3)
    assert snapshots.restore_snapshot(1) == []
    assert_same_bits(run.values(), before)
    assert bool((big == 3.5).all())
