"""A step without values does what a model does with the integers that it is given, which have them."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dit_lora.guard.attach.calls import outermost_calls
from dit_lora.guard.attach.loop_events import EVENTS
from dit_lora.training.execution.fake_step import FakeStep


@pytest.fixture(autouse=True)
def _with_no_guard_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would hold this test's loss, which counts as alive.
    monkeypatch.setattr(EVENTS, "_listeners", [])
    for listener in outermost_calls._list_listeners():
        outermost_calls.remove_listener(listener)


class Merged(nn.Module):
    """Features in the places of a sequence that its ids mark, written and read by a mask, as SmolVLM2's model does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.project = nn.Linear(2, 3)

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        marked = ids == 4
        numbers = marked.cumsum(-1) - 1
        placed = torch.zeros_like(self.table(ids))
        placed[marked] = self.project(features)[numbers[marked]]
        text_embeddings = self.table(ids)[~marked]
        return placed.square().sum() + text_embeddings.sum()


@pytest.mark.parametrize("marked", [(), (1, 4), (0, 1, 2, 3, 4, 5)])
def test_a_mask_with_values_says_how_many_places_there_are(marked: tuple[int, ...]) -> None:
    ids = torch.ones(1, 6, dtype=torch.int64)
    ids[0, list(marked)] = 4
    step = FakeStep(
        Merged(),
        {"features": ((6, 2), torch.float32), "ids": (tuple(ids.shape), ids.dtype)},
        {"ids": ids},
    )
    with step.track_allocations() as live:
        step.run_on_fake_weights(lambda model, batch: model(batch["ids"], batch["features"]).backward())
    gradients = {name: weight.grad for name, weight in step.weights.items()}
    assert {name: grad.shape for name, grad in gradients.items() if grad is not None} == {
        name: weight.shape for name, weight in step.weights.items()
    }
    assert live.current_bytes == sum(weight.nbytes for weight in step.weights.values())


class ExpandedMask(nn.Module):
    """Blocks that expand a padding mask (B, S) to all pairs of tokens, as HunyuanVideo-1.5's do."""

    class Block(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            pairs = mask[:, None].repeat(1, mask.shape[1], 1)
            self.mask_type = type(pairs)
            return x.masked_fill(~(pairs & pairs.transpose(1, 2)), 0.0)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block()])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # Outside of blocks a mask has values.
        assert mask.all()
        for block in self.blocks:
            x = block(x, mask=mask)
        return x.sum()


def test_a_block_gets_no_real_mask_and_what_it_expands_is_counted() -> None:
    model, tokens = ExpandedMask(), 1 << 13
    step = FakeStep(model, {"x": ((1, tokens, tokens), torch.float32), "mask": ((1, tokens), torch.bool)})
    with step.track_allocations() as live:
        step.run_on_fake_weights(lambda module, batch: module(batch["x"], batch["mask"]))
    assert model.blocks[0].mask_type is FakeTensor
    # Two masks of all pairs and the output of four bytes each are there together.
    assert live.max_bytes >= 6 * tokens * tokens
    assert not model.blocks[0]._forward_pre_hooks
