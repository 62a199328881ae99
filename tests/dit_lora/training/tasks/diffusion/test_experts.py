"""Two experts take turns on a device that has room for one."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dit_lora.config.experts import EXPERT_NAMES
from dit_lora.training.tasks.diffusion.experts import use_both_experts

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Placed(nn.Module):
    """A model that says where it is, and counts how many are on the GPU whenever one is called."""

    on_gpu: list[int]
    all: list["Placed"]

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.place = place

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(device=self.place)

    def to(self, place: Any) -> "Placed":  # type: ignore[override]
        self.place = torch.device(place)
        return self

    def forward(self) -> None:
        assert self.place == GPU
        self.on_gpu.append(sum(expert.place == GPU for expert in self.all))


@pytest.fixture
def pair() -> tuple[Placed, Placed]:
    trained, other_expert = Placed(GPU), Placed(CPU)
    for expert in (trained, other_expert):
        expert.on_gpu, expert.all = [], [trained, other_expert]
    return trained, other_expert


@pytest.mark.parametrize(("part", "second"), [("transformer", "transformer_2"), ("transformer_2", "transformer")])
def test_one_expert_is_on_the_device_at_a_time(pair: tuple[Placed, Placed], part: str, second: str) -> None:
    trained, other_expert = pair
    pipeline = SimpleNamespace(**{part: trained, second: other_expert, "vae": SimpleNamespace(device=GPU)})
    info: Any = SimpleNamespace(expert_names=EXPERT_NAMES, part=part)
    with use_both_experts(pipeline, info, trained, None):
        for model in (trained, trained, other_expert, other_expert, trained, other_expert):
            model()
    assert trained.on_gpu + other_expert.on_gpu == [1] * 6
    assert (trained.place, other_expert.place) == (GPU, CPU)
    other_expert.place = GPU
    trained()  # without a hook: nobody moves any more
    assert trained.on_gpu[-1] == 2


def test_what_is_in_several_places_stays_there(pair: tuple[Placed, Placed]) -> None:
    """With `train.offload` only the other expert moves, and both are on the device."""
    trained, other_expert = pair
    trained.register_buffer("elsewhere", torch.zeros(1))
    pipeline = SimpleNamespace(transformer=trained, transformer_2=other_expert, vae=SimpleNamespace(device=GPU))
    info: Any = SimpleNamespace(expert_names=EXPERT_NAMES, part="transformer")
    with use_both_experts(pipeline, info, trained, None):
        trained()
        other_expert()
    assert trained.place == GPU


def test_a_checkpoint_with_one_transformer_is_left_alone(pair: tuple[Placed, Placed]) -> None:
    trained, other_expert = pair
    pipeline, info = SimpleNamespace(), SimpleNamespace(expert_names={}, part="transformer")
    with use_both_experts(pipeline, info, trained, None):  # type: ignore[arg-type]
        trained()
    assert other_expert.place == CPU
