"""Averages of weights stay finite, and saving a file reports its non-finite values."""

import copy
import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_helpers import bad_batch, batch, everything, same, spoil_once
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dit_lora.guard.attach.guard import Guard


class Layer(nn.Module):
    """A layer, and perhaps a mask of -inf, as attention has it."""

    mask: torch.Tensor | None

    def __init__(self, *, masked: bool = False) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        mask = torch.full((4, 4), -torch.inf).triu(1) if masked else None
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) if self.mask is None else self.out(x) @ self.mask.softmax(1)


class Loop:
    def __init__(self, *, masked: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Layer(masked=masked)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.guard = Guard.watch(self.model, self.optimizer)
        self.number = 0

    def step(self, x: torch.Tensor | None = None) -> None:
        self.number += 1
        self.optimizer.zero_grad()
        self.model(batch(self.number) if x is None else x).square().mean().backward()
        self.optimizer.step()

    def kinds(self) -> list[tuple[int, str, str]]:
        return [(event["step"], event["kind"], event["action"]) for event in self.guard.events]


def are_finite(weights: dict[str, torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


class HandMadeAverage:
    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        for mean, parameter in zip(self.module.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "AveragedModel": AveragedModel,
    "exponential": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "by hand": HandMadeAverage,
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("fault", ["moment", "gradient", None])
def test_no_average_takes_in_what_a_bad_step_leaves(name: str, fault: str | None) -> None:
    """No hook and no name tells the guard of it: weights are put back before the loop averages them."""
    loop = Loop()
    average = AVERAGES[name](loop.model)
    start = everything([average.module], [])
    for number in range(1, 6):
        if number == 3 and fault == "moment":
            loop.optimizer.state[loop.model.out.weight]["exp_avg"][0, 0] = torch.nan
        if number == 3 and fault == "gradient":
            spoil_once(loop.model.out.weight, torch.nan)
        loop.step()
        average.update_parameters(loop.model)
        assert are_finite(average.module.state_dict())
    assert not same(everything([average.module], []), start)
    actions = {"moment": ["rollback"], "gradient": ["skip"], None: []}[fault]
    assert [event["action"] for event in loop.guard.events] == actions


def save_with_torch(weights: dict[str, torch.Tensor]) -> str:
    torch.save({"weights": weights, "epoch": 3}, "file.pt")
    return "weights."


def save_with_safetensors(weights: dict[str, torch.Tensor]) -> str:
    save_file(weights, "file.safetensors")
    return ""


def save_with_numpy(weights: dict[str, torch.Tensor]) -> str:
    np.savez("file.npz", **{name: tensor.numpy() for name, tensor in weights.items()})
    return ""


def save_to_an_open_file(weights: dict[str, torch.Tensor]) -> str:
    with Path("file.pt").open("wb") as file:
        torch.save(weights, file)
    return ""


def save_to_memory(weights: dict[str, torch.Tensor]) -> str:
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    Path("file.pt").write_bytes(buffer.getvalue())
    return ""


SAVES = [
    save_with_torch,
    save_with_safetensors,
    save_with_numpy,
    save_to_an_open_file,
    save_to_memory,
]


@pytest.mark.parametrize("save", SAVES)
def test_a_copy_that_is_not_finite_is_saved_and_said(
    save: Callable[[dict[str, torch.Tensor]], str], caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    loop.step()
    loop.step()
    with torch.no_grad():
        loop.model.out.weight[1, 2] = 1e5  # beyond fp16
    half_copies = {name: p.detach().half() for name, p in loop.model.named_parameters()}
    before = everything([loop.model], [])
    with caplog.at_level(logging.WARNING, logger="dit_lora"):
        prefix = save(half_copies)
    (path,) = Path().glob("file.*")
    assert loop.kinds() == [(3, "non_finite_save", "report")]
    (message,) = caplog.messages
    expected = f"{prefix}out.weight has 1 Inf among 16 values"
    assert message.endswith(f"is saved with values that are not finite: {expected}")
    # A function of safetensors that was imported before the guard began does not say where it writes.
    is_unknown = save in (save_with_safetensors, save_to_memory)
    assert message.startswith(f"guard: step 3: {'a file' if is_unknown else path.name} is saved")
    assert loop.guard.events[0]["verdict"]["cause"] == "unknown"
    assert same(everything([loop.model], []), before)
    if path.suffix == ".safetensors":
        assert torch.equal(load_file(path)["out.weight"], half_copies["out.weight"])


def test_a_healthy_save_says_nothing_of_masks_and_of_plain_numbers() -> None:
    loop = Loop(masked=True)
    loop.step()
    torch.save(
        {
            "model": loop.model.state_dict(),
            "optimizer": loop.optimizer.state_dict(),
            "best_loss": float("inf"),
        },
        "file.pt",
    )
    torch.save(loop.model, "model.pt")
    torch.save(nn.parallel.DataParallel(loop.model).state_dict(), "wrapped.pt")
    save_file(loop.model.state_dict(), "file.safetensors")
    assert loop.guard.events == []


def test_a_best_score_that_is_still_infinite_is_no_bad_weight() -> None:
    """As Lightning's ModelCheckpoint keeps it, in every checkpoint."""
    loop = Loop()
    loop.step()
    callbacks = {"ModelCheckpoint": {"kth_value": torch.tensor(torch.inf), "mode": "min"}}
    torch.save({"state_dict": loop.model.state_dict(), "callbacks": callbacks}, "file.ckpt")
    assert loop.guard.events == []


def test_a_mask_that_was_infinite_from_the_start_is_no_damage_when_a_step_fails() -> None:
    loop = Loop(masked=True)
    loop.step()
    loop.step(bad_batch(2))
    loop.optimizer.state[loop.model.out.weight]["exp_avg"][0, 0] = torch.nan
    loop.step()
    causes = [(event["step"], event["verdict"]["cause"]) for event in loop.guard.events]
    assert causes == [(2, "inputs"), (3, "optimizer")]
    assert loop.guard.events[0]["sample_ids"] == ["row 1 of micro-batch 0"]


@pytest.mark.parametrize("how", ["torch", "safetensors", "script", "before_save"])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_bad_weights_are_put_back_before_they_are_saved(how: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    start = everything([loop.model], [])
    loop.step()
    with torch.no_grad():
        loop.model.out.weight[1, 2] = torch.nan
    state = loop.model.state_dict()
    if how == "torch":
        torch.save(state, "file.pt")
        assert are_finite(torch.load("file.pt", weights_only=True))
    elif how == "safetensors":
        save_file(state, "file.safetensors")
        assert are_finite(load_file("file.safetensors"))
    elif how == "script":
        torch.jit.save(torch.jit.trace(loop.model, batch(1)), "file.pt")
        assert are_finite(torch.jit.load("file.pt").state_dict())
    else:
        loop.guard.before_save(state)
    assert loop.kinds() == [(2, "non_finite_weights", "rollback")]
    # Copies that were made before are as bad as the weights were.
    assert "copies that the loop has made of them since, also in files, may have the bad values" in (caplog.text)
    assert same(everything([loop.model], []), start)
    loop.step()
    assert len(loop.guard.events) == 1


def test_a_thread_that_saves_puts_nothing_back_and_says_what_it_saves() -> None:
    """It must not write to weights while the loop trains."""
    loop = Loop()
    loop.step()
    with torch.no_grad():
        loop.model.out.weight[1, 2] = torch.nan
    state = loop.model.state_dict()
    thread = threading.Thread(target=lambda: torch.save(state, "file.pt"))
    thread.start()
    thread.join()
    assert loop.kinds() == [(2, "non_finite_save", "report")]
    assert loop.model.out.weight.isnan().any()


def test_a_file_that_the_guard_writes_itself_is_not_looked_at() -> None:
    loop = Loop()
    loop.step()
    with torch.no_grad():
        loop.model.out.weight[1, 2] = torch.nan
    loop.step()
    assert loop.kinds() == [(2, "non_finite_loss", "rollback")]


def test_saves_after_the_guard_has_ended_are_torchs_own() -> None:
    loop = Loop()
    loop.step()
    loop.guard.detach()
    with torch.no_grad():
        loop.model.out.weight[1, 2] = torch.nan
    torch.save(loop.model.state_dict(), "file.pt")
    assert loop.guard.events == []
