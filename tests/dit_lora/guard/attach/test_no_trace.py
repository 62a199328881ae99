"""A guard leaves no trace on the objects of a loop: they are pickled, copied and dropped as without it."""

import copy
import gc
import io
import pickle
import pickletools
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_helpers import bad_batch, batch, everything, fresh_accelerator, same
from torch import nn
from torch.utils.data import DataLoader

from dit_lora.config.recovery_settings import LoopConfig
from dit_lora.guard.attach.guard import Guard
from dit_lora.guard.attach.loop_events import EVENTS
from dit_lora.guard.attach.run_script import ScriptGuard, run_as_main


class Net(nn.Module):
    """Two layers and a buffer that each call writes to."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 3), nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.leave(self.enter(x).tanh())


class Loop:
    """A plain loop of four steps, guarded or not."""

    def __init__(self, *, guarded: bool) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.guard = Guard.watch(self.model, self.optimizer) if guarded else None
        for number in range(4):
            step(self.model, self.optimizer, batch(number))
            self.schedule.step()


def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("name", ["model", "optimizer", "schedule"])
def test_what_is_pickled_has_the_names_that_it_has_without_a_guard(name: str) -> None:
    """Bytes differ anyway: storages are pickled with their addresses."""
    names = []
    for guarded in (True, False):
        pickled = pickle.dumps(getattr(Loop(guarded=guarded), name))
        strings = [value for _, value, _ in pickletools.genops(pickled) if isinstance(value, str)]
        names.append([value for value in strings if not value.isdecimal()])
    assert names[0] == names[1]
    assert len(names[0]) > 3


def test_what_is_saved_has_the_bytes_that_it_has_without_a_guard() -> None:
    guarded, unguarded = Loop(guarded=True), Loop(guarded=False)
    assert saved(guarded.model) == saved(unguarded.model)
    states = [{"model": loop.model, "optimizer": loop.optimizer.state_dict()} for loop in (guarded, unguarded)]
    assert saved(states[0]) == saved(states[1])


def test_a_model_and_an_optimizer_keep_the_attributes_and_hooks_that_they_had() -> None:
    guarded, unguarded = Loop(guarded=True), Loop(guarded=False)
    for module, bare_module in zip(guarded.model.modules(), unguarded.model.modules(), strict=True):
        assert vars(module).keys() == vars(bare_module).keys()
        hooks = {name: value for name, value in vars(module).items() if name.endswith("_hooks")}
        assert not any(hooks.values())
    for parameter in guarded.model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    assert not guarded.optimizer._optimizer_step_pre_hooks
    assert not guarded.optimizer._optimizer_step_post_hooks


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_model_computes_what_the_model_does() -> None:
    loop = Loop(guarded=True)
    traced = torch.jit.trace(loop.model, batch(9))
    assert torch.equal(traced(batch(8)), loop.model(batch(8)))


def test_a_deep_copy_carries_no_guard() -> None:
    loop = Loop(guarded=True)
    assert loop.guard is not None
    model = copy.deepcopy(loop.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, bad_batch(5))
    assert not any(bool(p.isfinite().any()) for p in model.parameters())
    assert loop.guard.events == []
    step(loop.model, loop.optimizer, bad_batch(5))
    assert len(loop.guard.events) == 1
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())


def test_a_deep_copy_of_the_optimizer_steps_by_itself() -> None:
    loop = Loop(guarded=True)
    assert loop.guard is not None
    model, optimizer = copy.deepcopy((loop.model, loop.optimizer))
    optimized_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert optimized_ids == {id(p) for p in model.parameters()}
    step(model, optimizer, bad_batch(5))
    assert not any(bool(p.isfinite().any()) for p in model.parameters())
    assert loop.guard.events == []


def objects_of_a_loop(*, accelerated: bool, fault: bool) -> dict[str, weakref.ref[Any]]:
    """References to what a loop was made of and has dropped, and to the guard, which nobody else holds."""
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader: Any = DataLoader([(bad_batch if fault else batch)(n)[1] for n in range(4)])
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    if accelerated:
        accelerator = objects["accelerator"] = fresh_accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward = accelerator.backward
        guard = objects["guard"] = Guard.attach(accelerator, model, optimizer)
    else:
        guard = objects["guard"] = Guard.watch(model, optimizer)
    objects |= {"loader": loader, "prepared model": model, "prepared optimizer": optimizer}
    for number, x in enumerate(loader):
        optimizer.zero_grad()
        backward(model(x).square().mean())
        optimizer.step()
        objects[f"batch {number}"] = x
    assert bool(guard.events) is fault
    return {name: weakref.ref(value) for name, value in objects.items()}


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("fault", [False, True])
def test_nothing_outlives_the_loop(accelerated: bool, fault: bool) -> None:
    refs = objects_of_a_loop(accelerated=accelerated, fault=fault)
    gc.collect()
    alive = {name for name, ref in refs.items() if ref() is not None}
    assert {name for name in alive if not name.startswith("batch ")} == set()


@pytest.mark.parametrize("accelerated", [False, True])
def test_the_batches_of_a_loop_do_not_outlive_its_guard(accelerated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Guards that other tests of this process still hold would hold the batches too.
    monkeypatch.setattr(EVENTS, "_listeners", [])
    monkeypatch.setattr(EVENTS, "_num_users", 0)
    refs = objects_of_a_loop(accelerated=accelerated, fault=False)
    gc.collect()
    assert {name for name, ref in refs.items() if ref() is not None} == set()


def test_a_guard_that_nobody_holds_guards_on() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    Guard.watch(model, optimizer)
    gc.collect()
    before = everything([model], [])
    step(model, optimizer, bad_batch(1))
    assert same(everything([model], []), before)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3),
    "swa": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=1e-3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_is_made_late_moves_as_without_a_guard(name: str) -> None:
    results = []
    for guarded in (False, True):
        loop = Loop(guarded=guarded)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule = SCHEDULES[name](loop.optimizer)
            for number in range(4, 8):
                step(loop.model, loop.optimizer, batch(number))
                schedule.step()
        results.append([schedule.get_last_lr(), everything([loop.model], [loop.optimizer])])
        before = everything([loop.model], [])
        step(loop.model, loop.optimizer, bad_batch(9))
        assert same(everything([loop.model], []), before) is guarded
    (unguarded_rate, unguarded), (rate, watched) = results
    assert rate == unguarded_rate
    assert same(watched, unguarded)


def test_a_step_that_the_loop_has_kept_as_a_bound_method_is_guarded_by_the_command(
    tmp_path: Path,
) -> None:
    script_guard = ScriptGuard(LoopConfig(), tmp_path, lambda message: None)
    with script_guard.watch_script():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        take_step = optimizer.step
        for number in range(3):
            before = everything([model], [])
            optimizer.zero_grad()
            model(bad_batch(1) if number == 1 else batch(number)).square().mean().backward()
            take_step()
            assert same(everything([model], []), before) is (number == 1)
        (guard,) = script_guard.active_guards
        assert [event["step"] for event in guard.events] == [2]


def test_a_schedule_that_is_made_late_under_the_command_is_held_in_a_skipped_step(
    tmp_path: Path,
) -> None:
    script_guard = ScriptGuard(LoopConfig(), tmp_path, lambda message: None)
    with script_guard.watch_script():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(model, optimizer, batch(0))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        rates = []
        for number in range(1, 4):
            step(model, optimizer, (bad_batch if number == 2 else batch)(number))
            schedule.step()
            rates += schedule.get_last_lr()
    assert rates == pytest.approx([0.05, 0.05, 0.025])


def test_a_script_waits_for_its_own_threads_alone(tmp_path: Path) -> None:
    """A program that runs a script under the guard may have threads that never end."""
    script = tmp_path / "script.py"
    script.write_text(
        "import threading, pathlib\nthreading.Timer(0.2, pathlib.Path(__file__).with_name('done').touch).start()\n"
    )
    release = threading.Event()
    unrelated_thread = threading.Thread(target=release.wait)
    unrelated_thread.start()
    try:
        run_as_main(str(script), [])
        assert (tmp_path / "done").exists()
        assert unrelated_thread.is_alive()
    finally:
        release.set()
        unrelated_thread.join()
