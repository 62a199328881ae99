"""Which dtype, and why."""

import torch

from dit_lora.numerics.precision import choose_precision


def test_auto_on_a_cpu_is_fp32_and_says_why() -> None:
    precision = choose_precision("auto", torch.device("cpu"))
    assert precision.dtype is torch.float32
    assert precision.mixed_precision == "no"
    assert "times slower in bf16" in precision.reason


def test_what_is_asked_for_is_used() -> None:
    precision = choose_precision("bf16", torch.device("cpu"))
    assert precision.dtype is torch.bfloat16
    assert precision.mixed_precision == "bf16"
