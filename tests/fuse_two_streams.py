"""What the tests of fused models with a text and an image stream have in common."""

from typing import Any, ClassVar

import pytest
import torch
from fuse_checks import adapted, assert_equal, fuse_all
from fuse_contract import Contract, Inputs
from torch import nn

from dit_lora.fuse.api import unfuse
from dit_lora.fuse.models import two_streams
from dit_lora.fuse.patches import get_fusion

TARGETS = [
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"),
    *("to_add_out", "ff.net.2", "ff_context.net.2", "norm1.linear", "norm1_context.linear"),
]


class TwoStreams(Contract):
    """Heads of 16: width 32 everywhere."""

    ops = ("lora_linear", "qk_norm_rope", "ada_norm")
    targets: ClassVar = TARGETS
    module = two_streams
    recomputed: ClassVar[int]
    """Inputs of adapters that backward computes again, of all blocks."""

    def test_gradients_of_every_weight(self) -> None:
        """By the references; the kernels are asked for their own weights' gradients in their own tests."""
        model = self.all_trained(self.build())
        expected = self.run(model)
        assert_equal(self.run(fuse_all(model)), expected, 5e-5)

    def test_norms_are_computed_again_for_adapters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once for each input of theirs: what saves it by another name or shape would keep it."""
        model, buffers = fuse_all(self.build()), []
        recompute = two_streams.recompute_norm

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            buffers.append(recompute(*args, **kwargs))
            return buffers[-1]

        monkeypatch.setattr(two_streams, "recompute_norm", counted)
        self.run(model)
        assert len(buffers) == self.recomputed

    def equal_when_fused(self, stock: nn.Module, given: Inputs) -> nn.Module:
        """The model, fused, after it was found equal to what it was, for adapters and for all weights."""
        model = adapted(stock, self.targets)
        for trained in (False, True):
            if trained:
                unfuse(model)
                self.all_trained(model)
            expected = self.run(model, given)
            assert_equal(self.run(fuse_all(model), given), expected, 5e-5)
            assert "ada_norm" in get_fusion(model).get_active_ops()
        return model

    def streams(self, generator: torch.Generator, text: int = 32) -> tuple[Any, Any, Any]:
        """What a block is given: 192 tokens of an image, 24 of a text, and the timestep."""
        shapes = (2, 192, 32), (2, 24, text), (2, 32)
        tensors = [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]
        return tensors[0].requires_grad_(), tensors[1].requires_grad_(), tensors[2]
