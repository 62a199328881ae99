"""`Guard.watch`: plain PyTorch loops, and the models that a loss comes through though nobody names them."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dit_lora.errors import DitLoraError
from dit_lora.guard import Guard, NonFiniteError, RecoveryConfig

Batch = dict[str, torch.Tensor]


class Text(nn.Module):
    """An encoder that is trained beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(tokens))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 4)
        self.leave = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, *, text: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.enter(x)) * text)


class Pair:
    """A denoiser and an encoder in one loop, with a frozen critic in the path of the loss, and a frozen encoder."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.text, self.denoiser = Text(), Denoiser()
        self.critic = nn.Sequential(nn.Linear(5, 3), nn.Tanh()).requires_grad_(False)
        self.encoder = nn.Linear(5, 5).requires_grad_(False)
        trained = [*self.text.parameters(), *self.denoiser.parameters()]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def step(self, batch: Batch, rows: int = 2) -> None:
        """Take a step of two micro-batches."""
        self.optimizer.zero_grad()
        for at in range(0, len(batch["x"]), rows):
            x, tokens = batch["x"][at : at + rows], batch["tokens"][at : at + rows]
            hidden = self.denoiser(self.encoder(x), text=self.text(tokens))
            (self.critic(hidden).square().mean() + (hidden - x).square().mean()).backward()
        self.optimizer.step()

    def modules(self) -> nn.ModuleDict:
        return nn.ModuleDict({"text": self.text, "denoiser": self.denoiser, "critic": self.critic})


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(4, 5, generator=generator),
        "tokens": torch.randint(0, 7, (4,), generator=generator),
    }


def guarded(pair: Pair, model: Any, folder: Path, steps: int, at: Callable[[int, Batch], None]) -> Guard:
    config = RecoveryConfig(snapshot_every=1)
    guard = Guard.watch(model, pair.optimizer, folder=folder, config=config)
    for step in range(1, steps + 1):
        inputs = batch(step)
        at(step, inputs)
        pair.step(inputs)
    guard.require_finite()
    return guard


@pytest.mark.parametrize("named", ["nothing", "the denoiser"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_bad_row_is_named_in_the_first_step_too(named: str, step: int, tmp_path: Path) -> None:
    pair = Pair()

    def spoil(now: int, given: Batch) -> None:
        if now == step:
            given["x"][3, 2] = torch.nan

    model = None if named == "nothing" else pair.denoiser
    (event,) = guarded(pair, model, tmp_path, 4, spoil).events
    assert (event["step"], event["verdict"]["cause"]) == (step, "inputs")
    assert event["sample_ids"] == ["row 1 of micro-batch 1"]
    assert all(bool(p.isfinite().all()) for p in pair.modules().parameters())


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("text.out.weight", "Text.out.weight"),
        ("denoiser.leave.bias", "Denoiser.leave.bias"),
        ("critic.0.weight", "Sequential.0.weight"),
    ],
)
def test_a_bad_weight_of_any_model_is_named_though_one_alone_is_given(
    name: str, described: str, tmp_path: Path
) -> None:
    pair = Pair()
    weight = dict(pair.modules().named_parameters())[name]

    def spoil(now: int, _given: Batch) -> None:
        if now == 3:
            with torch.no_grad():
                weight.view(-1)[1] = torch.nan

    if name.startswith("critic"):
        with pytest.raises(DitLoraError, match=f"weight {described} has 1 NaN"):
            guarded(pair, pair.denoiser, tmp_path, 5, spoil)
        assert all(bool(p.isfinite().all()) for p in pair.text.parameters())
        return
    guard = guarded(pair, pair.denoiser, tmp_path, 5, spoil)
    (event,) = guard.events
    assert event["verdict"]["cause"] == "weights"
    assert f"trained weight {described} has 1 NaN" in event["verdict"]["words"]
    assert all(bool(p.isfinite().all()) for p in pair.modules().parameters())


def test_an_encoder_whose_output_has_no_gradient_is_not_watched(tmp_path: Path) -> None:
    pair = Pair()
    guard = guarded(pair, None, tmp_path, 2, lambda step, inputs: None)
    watched = {type(suspects.model).__name__ for suspects in guard._watched.contexts.values()}
    assert watched == {"Text", "Denoiser", "Sequential"}
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert not guard.events


def test_a_model_of_which_the_loop_calls_parts_alone_is_watched_by_its_parts(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    parts = nn.ModuleDict({"enter": nn.Linear(3, 4), "leave": nn.Linear(4, 2)})
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1, momentum=0.9)
    guard = Guard.watch(parts, optimizer, folder=tmp_path)
    for step in range(1, 4):
        x = torch.randn(3, 3)
        if step == 2:
            x[2, 0] = torch.inf
        optimizer.zero_grad(set_to_none=False)
        parts["leave"](parts["enter"](x).tanh()).square().mean().backward()
        optimizer.step()
    (event,) = guard.events
    assert (event["step"], event["sample_ids"]) == (2, ["row 2 of micro-batch 0"])


def test_healthy_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    unguarded, watched = Pair(), Pair()
    for step in range(1, 5):
        unguarded.step(batch(step))
    guard = guarded(watched, None, tmp_path, 4, lambda step, inputs: None)
    assert not guard.events
    pairs = zip(unguarded.modules().parameters(), watched.modules().parameters(), strict=True)
    assert all(torch.equal(weight, other_weight) for weight, other_weight in pairs)


def test_a_gradient_scaler_keeps_its_own_check(tmp_path: Path) -> None:
    pair = Pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    guard = Guard.watch(None, pair.optimizer, folder=tmp_path)
    for step in range(1, 9):
        pair.optimizer.zero_grad()
        inputs = batch(step)
        loss = pair.denoiser(inputs["x"], text=pair.text(inputs["tokens"])).square().mean()
        scaler.scale(64 * loss).backward()
        scaler.step(pair.optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**127
    assert not guard.events
    assert {int(state["step"]) for state in pair.optimizer.state.values()} <= set(range(1, 9))


def test_no_optimizer_is_one_line() -> None:
    with pytest.raises(DitLoraError, match="give an optimizer with parameters"):
        Guard.watch(nn.Linear(2, 2), None)


class Scored(nn.Module):
    """Returns its loss, as Transformers' models do that are given labels; a token of its own breaks a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = self.table(tokens).masked_fill((tokens == 6)[..., None], torch.nan)
        scores = self.out(rows).mean((1, 2))
        return {"loss": scores.square().mean(), "scores": scores}


@pytest.mark.parametrize("row", [0, 2])
def test_a_sample_is_named_though_the_model_returns_one_loss(row: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Scored()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard.watch(model, optimizer, folder=tmp_path)
    for step in range(1, 4):
        tokens = torch.randint(0, 6, (3, 5), generator=torch.Generator().manual_seed(step))
        if step == 2:
            tokens[row, 1] = 6
        optimizer.zero_grad()
        model(tokens)["loss"].backward()
        optimizer.step()
    (event,) = guard.events
    assert event["sample_ids"] == [f"row {row} of micro-batch 0"]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


class Checkpointed(nn.Module):
    """Computes its blocks again in the backward, as TRL's trainers have it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False).tanh()
        return x


def test_what_checkpointing_computes_again_is_no_call_of_the_loop(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Checkpointed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard.watch(None, optimizer, folder=tmp_path)
    for step in range(1, 4):
        x = batch(step)["x"][:, :3]
        if step == 2:
            x[1, 0] = torch.nan
        optimizer.zero_grad()
        model(x).square().mean().backward()
        assert [call.owner for call in guard._watched.log.calls] == [model]
        optimizer.step()
    (event,) = guard.events
    assert event["sample_ids"] == ["row 1 of micro-batch 0"]


@pytest.mark.parametrize("by_sample", [False, True])
def test_a_sample_with_several_rows_is_named_if_they_have_its_content(
    by_sample: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Chosen and rejected answers, one after the other or one half after the other."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = [torch.full((3,), float(n)) for n in range(6)]
    data[3][1] = torch.nan
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    guard = Guard.watch(model, optimizer, folder=tmp_path)
    for number, x in enumerate(loader):
        several = x.repeat_interleave(2, 0) if by_sample else x.repeat(2, 1)
        if number == 2:  # what the loop itself spoils is nobody's content any more
            several[1, 0] = torch.nan
        optimizer.zero_grad()
        model(several).square().mean().backward()
        optimizer.step()
    events = [(event["verdict"]["cause"], event["sample_ids"]) for event in guard.events]
    assert events == [("data", ["dataset index 3"]), ("inputs", ["row 1 of micro-batch 0"])]
    assert "\n  - row 1 of micro-batch 0 (its dataset index is not known): argument 0" in caplog.text


def test_a_guard_that_is_gone_looks_at_no_call() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Guard.watch(None, optimizer)
    assert nn.Module.__call__ is not nn.Module._wrapped_call_impl
    del optimizer
    gc.collect()
    model(torch.ones(1, 2))
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


class Embedded(Text):
    """Takes the rows of its table, which somebody else looks up."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(rows)


def test_a_part_that_is_asked_while_a_batch_is_made_is_no_model_of_the_step(tmp_path: Path) -> None:
    """A collator that looks up embeddings, say: its calls are of batches that come later."""
    torch.manual_seed(0)
    model = Embedded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard.watch(None, optimizer, folder=tmp_path)
    for step in range(1, 4):
        rows = model.table(batch(step)["tokens"]).detach()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        assert [type(context.model) for context in guard._watched.contexts.values()] == [Embedded]
    assert not guard.events


class Cut(nn.Module):
    """Loses the gradient of its only weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.layer.weight.detach())


def test_a_step_that_has_no_gradient_at_all_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Cut()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard.watch(model, optimizer, folder=tmp_path, config=RecoveryConfig(max_skips=2))

    def train() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(2, 3, requires_grad=True)).square().mean().backward()
            optimizer.step()

    with pytest.raises(NonFiniteError, match="no gradient reached a trained weight in 3 steps"):
        train()
    reported = [(event["step"], event["kind"], event["action"]) for event in guard.events]
    assert reported == [(1, "zero_gradient", "report"), (3, "zero_gradient", "stop")]


def test_a_moment_that_vanishes_is_not_altered_memory(tmp_path: Path) -> None:
    """Deep in a useless network gradients round to zero, some elements before others."""
    layer = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, weight_decay=0.0)
    guard = Guard.watch(layer, optimizer, folder=tmp_path)
    for _ in range(3):
        optimizer.zero_grad()
        (layer(torch.randn(4, 8)).square().mean() * 1e-12).backward()
        optimizer.step()
    moment = optimizer.state[layer.weight]["exp_avg"]
    moment.zero_()
    moment[3, 4] = 2.8e-45
    guard.require_finite()
    assert not guard.events
    moment[3, 4] = 1e-3
    guard.require_finite()
    assert "altered in memory" in guard.events[0]["verdict"]["words"]


@pytest.mark.parametrize(
    ("model", "said"),
    [("unet", "model must be a torch.nn.Module; got str"), (nn.Linear(2, 2), "holds no parameter")],
)
def test_what_is_no_model_of_the_optimizer_is_one_line(model: Any, said: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(DitLoraError, match=said):
        Guard.watch(model, optimizer)
