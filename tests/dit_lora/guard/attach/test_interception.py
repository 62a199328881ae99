"""Methods and functions are replaced for watched objects only, and are torch's own again afterwards."""

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dit_lora.guard.attach.interception import MethodInterceptions


class Counted:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def act(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return original(*args, **kwargs)


class Base:
    def step(self, value: int) -> int:
        return value + 1


class Derived(Base):
    pass


def test_a_method_is_intercepted_for_one_object_without_a_trace_on_it() -> None:
    watched, other_tensor, counter = Derived(), Derived(), Counted()
    interceptions = MethodInterceptions()
    interceptions.intercept_method(watched, "step", counter.act)
    assert (watched.step(1), other_tensor.step(2)) == (2, 3)
    assert counter.calls == [((1,), {})]
    assert vars(watched) == {}
    assert "step" not in vars(Base) or vars(Base)["step"] is Base.step
    interceptions.restore_originals()
    assert "step" not in vars(Derived)
    assert watched.step(3) == 4
    assert len(counter.calls) == 1


def test_the_last_handler_is_the_outermost_and_each_is_removed_alone() -> None:
    names: list[str] = []

    class Named(Counted):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def act(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            names.append(self.name)
            return original(*args, **kwargs)

    watched, handlers = Base(), [Named("first"), Named("second")]
    interception_list = [MethodInterceptions(), MethodInterceptions()]
    for interceptions, handler in zip(interception_list, handlers, strict=True):
        interceptions.intercept_method(watched, "step", handler.act)
    watched.step(1)
    assert names == ["second", "first"]
    interception_list[0].restore_originals()
    names.clear()
    watched.step(1)
    assert names == ["second"]


def test_neither_the_object_nor_the_handlers_owner_is_kept() -> None:
    watched, counter = Derived(), Counted()
    interceptions = MethodInterceptions()
    interceptions.intercept_method(watched, "step", counter.act)
    refs = [weakref.ref(watched), weakref.ref(counter)]
    del counter, interceptions
    gc.collect()
    assert refs[1]() is None
    assert watched.step(1) == 2
    del watched
    gc.collect()
    assert refs[0]() is None


def test_an_attribute_of_the_object_keeps_its_marks() -> None:
    """As an optimizer's `step` that a schedule has wrapped."""
    watched, counter = Base(), Counted()

    def step(value: int) -> int:
        return value * 10

    step.mark = True  # type: ignore[attr-defined]
    watched.step = step  # type: ignore[method-assign]
    interceptions = MethodInterceptions()
    interceptions.intercept_method(watched, "step", counter.act)
    assert watched.step(2) == 20
    assert watched.step.mark  # type: ignore[attr-defined]
    assert len(counter.calls) == 1
    interceptions.restore_originals()
    assert watched.step is step


def test_a_function_is_restored_unless_somebody_has_replaced_it_since() -> None:
    module = ModuleType("somebodys")

    def save(value: int) -> int:
        return value

    vars(module)["save"] = save
    first_interceptions, second, counter = MethodInterceptions(), MethodInterceptions(), Counted()
    first_interceptions.intercept_function(module, "save", counter.act)
    assert module.save(1) == 1
    first_interceptions.restore_originals()
    assert module.save is save
    second.intercept_function(module, "save", counter.act)
    intercepted = module.save

    def theirs(value: int) -> int:
        return -int(intercepted(value))

    vars(module)["save"] = theirs
    second.restore_originals()
    assert module.save is theirs
    assert module.save(2) == -2


def test_a_model_is_called_and_its_class_is_pickled_by_its_name() -> None:
    model, counter = nn.Linear(2, 2), Counted()
    interceptions = MethodInterceptions()
    interceptions.intercept_method(model, "__call__", counter.act)
    x = torch.ones(1, 2)
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
    assert len(counter.calls) == 1
    assert type(model) is nn.Linear
    assert nn.Linear.__qualname__ == "Linear"
    interceptions.restore_originals()
    assert "__call__" not in vars(nn.Linear)
