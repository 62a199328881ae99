"""EVA: A's rows are the directions in which a layer's inputs vary most; the model is the base still."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME, attach_lora
from dit_lora.config.lora import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.training.eva_init import LayerInputs

Main = Callable[[list[str]], None]
RANK = 3


def seen_layer() -> tuple[Any, LayerInputs]:
    model = nn.Sequential(nn.Linear(11, 7))
    attach_lora(model, LoraConfig(rank=RANK), ("0",), seed=0)
    return model[0], LayerInputs(model[0])


def varied(rows: int, seed: int) -> torch.Tensor:
    """Inputs (2, rows, 11) that vary most along three directions, around a mean that is far from zero."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(11, 11, generator=torch.Generator().manual_seed(9)))
    scales = torch.tensor([9.0, 5.0, 3.0] + [0.1] * 8)
    return 4 + (torch.randn(2, rows, 11, generator=generator) * scales) @ basis.T


def test_a_spans_the_directions_of_most_variance() -> None:
    layer, recorded = seen_layer()
    batches = [varied(40, seed) for seed in range(6)]
    for x in batches:
        recorded.add_rows(layer, (x.transpose(0, 1),))
    assert recorded.set_lora_a()
    a = layer.lora_A[ADAPTER_NAME].weight.detach().double()
    rows = torch.cat([x.flatten(0, 1) for x in batches]).double()
    _, _, v = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    # The same rows but for their signs, in the order of their variance.
    torch.testing.assert_close((a @ v[:RANK].T).abs(), torch.eye(RANK).double(), rtol=0, atol=2e-3)
    assert not layer.lora_B[ADAPTER_NAME].weight.any()


def test_a_layer_that_is_given_too_little_keeps_its_start() -> None:
    layer, recorded = seen_layer()
    before = layer.lora_A[ADAPTER_NAME].weight.detach().clone()
    recorded.add_rows(layer, (varied(2, 0),))  # 4 rows, and twice the rank are wanted
    assert not recorded.set_lora_a()
    assert torch.equal(layer.lora_A[ADAPTER_NAME].weight, before)
    recorded.add_rows(layer, (varied(1, 1),))
    assert recorded.set_lora_a()


def test_rows_that_are_not_finite_spoil_nothing() -> None:
    results = []
    for bad in (False, True):
        layer, recorded = seen_layer()
        x = varied(40, 0)
        extra = torch.full((2, 5, 11), torch.nan)
        extra[0, :, 3] = torch.inf
        recorded.add_rows(layer, (torch.cat([x, extra], 1) if bad else x,))
        assert recorded.set_lora_a()
        results.append(layer.lora_A[ADAPTER_NAME].weight.detach().clone())
    torch.testing.assert_close(results[0], results[1])


def test_a_run_starts_from_its_data_once(
    lora_main: Main, smoke: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*smoke, "lora.init=eva", "lora.rank=4", "train.save_every=1"]
    lora_main([*command, "train.steps=1", f"run.dir={tmp_path / 'run'}"])
    assert "lora.init: eva: 8 layers start from 5 samples" in capsys.readouterr().err
    lora_main([*command, "train.steps=2", f"run.dir={tmp_path / 'run'}", "train.resume=auto"])
    assert "start from" not in capsys.readouterr().err
    first_tensors = load_file(tmp_path / "run" / "checkpoints" / "step_000001" / "trainable.safetensors")
    a = next(tensor for name, tensor in first_tensors.items() if "lora_A" in name)
    # A step has hardly moved what were orthonormal rows; a random start's are not.
    torch.testing.assert_close(a @ a.T, torch.eye(4), rtol=0, atol=0.1)
    with pytest.raises(DitLoraError, match="eva needs the whole model on one device"):
        lora_main(
            [
                *command,
                "train.offload=group",
                "train.checkpointing=full",
                "train.steps=1",
                f"run.dir={tmp_path / 'off'}",
            ]
        )
