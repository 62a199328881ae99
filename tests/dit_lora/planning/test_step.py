"""The fake step that a plan counts: CUDA's autocast as PyTorch has it, and a model that is as it was."""

import re
from pathlib import Path
from types import MethodType

import torch
from torch import nn

from dit_lora.planning.step import FP32_OPS, emulate_autocast


def test_a_forward_of_the_instances_own_is_there_again_after_autocast() -> None:
    """Chat models have one, which gives answers' losses."""
    model = nn.Linear(2, 3)
    original_forward = model.forward
    with emulate_autocast(model, torch.bfloat16, is_gpu=False):
        assert model(torch.ones(1, 2)).dtype is torch.float32
    assert model.forward == original_forward
    instance_forward = MethodType(lambda self, x: x.sum(), model)
    model.__dict__["forward"] = instance_forward
    with emulate_autocast(model, torch.bfloat16, is_gpu=False):
        assert model.forward is not instance_forward
    assert model.forward is instance_forward
    assert model(torch.ones(1, 2)) == 2


def test_what_is_computed_in_fp32_is_what_pytorch_lists_for_cuda() -> None:
    """The list is in a header; Python calls some of its ops by other names."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    lists = re.findall(r"#define AT_FORALL_FP32(?:_SET_OPT_DTYPE)?\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)
    assert len(lists) == 2
    autocast_ops = {name for pattern_list in lists for name in re.findall(r"_\((\w+)", pattern_list)}
    newer_ops = {"rms_norm"}  # listed by torch 2.13 and not by 2.11
    assert FP32_OPS - {"__pow__", "__rpow__", "cross_entropy", "norm"} - newer_ops <= autocast_ops
    missing_ops = autocast_ops - FP32_OPS
    # Resampling, losses that nobody trains with here, and names below those that Python calls.
    assert all(re.search(r"upsample|loss|norm|nll_loss2d|pdist", name) for name in missing_ops)
