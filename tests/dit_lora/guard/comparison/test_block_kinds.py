"""One block stands for those that are the same to a kernel, and for no others."""

import torch
from torch import nn

from dit_lora.guard.comparison.block_kinds import record_block_inputs, select_block_per_kind

NAMES = [f"blocks.{index}" for index in range(5)]


class Block(nn.Module):
    def __init__(self, eps: float = 1e-5, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, window: int = 0) -> torch.Tensor:
        return x + self.linear(self.norm(x)) + window


class Model(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, windows: tuple[int, ...] = (0,) * 5) -> torch.Tensor:
        for block, window in zip(self.blocks, windows, strict=True):
            x = block(x, window=window)
        return x


def chosen(model: Model, places: tuple[tuple[str, str], ...] = (), windows: tuple[int, ...] = (0,) * 5) -> list[str]:
    with record_block_inputs(model) as calls:
        model(torch.randn(2, 3, 6), windows)
    return select_block_per_kind(model, NAMES, calls, places)


def frozen(*blocks: Block) -> Model:
    return Model(*blocks).requires_grad_(False)


def test_the_deepest_of_equal_blocks_stands_for_all() -> None:
    assert chosen(frozen(*(Block() for _ in range(5)))) == ["blocks.4"]


def test_a_block_whose_input_does_not_learn_is_a_kind_of_its_own() -> None:
    """The stock code computes no gradient for it, and a kernel may be wrong in only one direction."""
    assert chosen(Model(*(Block() for _ in range(5)))) == ["blocks.0", "blocks.4"]


def test_a_setting_a_width_and_a_frozen_weight_make_another_kind() -> None:
    blocks = [Block(), Block(eps=1e-3), Block(), Block(), Block()]
    assert chosen(frozen(*blocks)) == ["blocks.1", "blocks.4"]
    model = frozen(*(Block() for _ in range(5)))
    model.blocks[2].linear.weight.requires_grad_(True)
    # The blocks after it are called with inputs that learn.
    assert chosen(model) == ["blocks.1", "blocks.2", "blocks.4"]


def test_a_fused_op_in_one_block_alone_is_not_hidden_by_the_others() -> None:
    model = frozen(*(Block() for _ in range(5)))
    everywhere = tuple(("norm", f"{name}.norm") for name in NAMES)
    assert chosen(model, everywhere) == ["blocks.4"]
    assert chosen(model, (*everywhere, ("linear", "blocks.1.linear"))) == ["blocks.1", "blocks.4"]
    assert chosen(model, (("block", "blocks.3"),)) == ["blocks.3", "blocks.4"]


def test_what_a_block_is_told_makes_another_kind() -> None:
    model = frozen(*(Block() for _ in range(5)))
    assert chosen(model, windows=(0, 0, 7, 0, 7)) == ["blocks.3", "blocks.4"]
