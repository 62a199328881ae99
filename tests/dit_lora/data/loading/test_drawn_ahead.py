"""What a step draws is drawn where its batch is read, with the bits that the step would draw."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dit_lora.data.loading.batch import (
    Batch,
    DataReadingSettings,
    OrderedDataset,
    PositionSampler,
    build_loader,
    collate,
    make_sample_seed,
)
from dit_lora.data.loading.order import SampleOrder
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.numerics.streams import DrawFunctions, RandomStreams, draw_integers, draw_normal_noise

NOBODY = Quarantine(Path("nowhere"))


class Samples(OrderedDataset):
    """Five samples, each of a value of its own."""

    def __init__(self) -> None:
        self.order = SampleOrder([f"{k}.mp4" for k in range(5)], seed=0, quarantine=NOBODY)

    def __getitem__(self, position: int) -> Batch:
        epoch, copy, sample = self.order.get_occurrence(position)
        name = self.order.ids[sample]
        tensors = {"latent_mean": torch.full((1, 2, 3), float(sample))}
        return Batch((name,), (make_sample_seed(name, epoch, copy),), tensors)


def batches(*, steps: int, size: int, **given: Any) -> list[Batch]:
    sampler = PositionSampler(start_step=0, steps=steps, batch_size=size, accumulate=2, rank=1, num_ranks=2)
    defaults: dict[str, Any] = {"workers": 0, "get_draw_functions": noise_and_times}
    reading = DataReadingSettings(
        sampler,
        seed=7,
        caption_dropout=0.0,
        quarantine=NOBODY,
        prefetch=2,
        pin_memory=False,
        **{**defaults, **given},
    )
    return list(build_loader(Samples(), reading))


def noise_and_times(batch: Mapping[str, torch.Tensor]) -> DrawFunctions:
    """Draws of a shape that is the batch's own."""
    return {
        "noise": partial(draw_normal_noise, batch["latent_mean"].shape[1:]),
        "timestep": partial(draw_integers, 0, 1000),
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_whoever_reads_a_batch_draws_what_its_step_would(workers: int) -> None:
    loaded_batches = batches(steps=3, size=2, workers=workers)
    assert len(loaded_batches) == 6
    for batch in loaded_batches:
        assert batch.random_inputs is not None
        for name, draw in noise_and_times(batch.tensors).items():
            expected = draw(RandomStreams(7, batch.sample_seeds)(name))
            assert torch.equal(batch.random_inputs.tensors[name], expected), name
            single_draws = batch.select_sample(1).random_inputs
            assert single_draws is not None
            assert torch.equal(single_draws.tensors[name], expected[1:])
            assert single_draws.sample_seeds == batch.sample_seeds[1:]
    plain = batches(steps=3, size=2, workers=workers, get_draw_functions=None)
    assert [batch.random_inputs for batch in plain] == [None] * 6
    assert [batch.sample_seeds for batch in plain] == [batch.sample_seeds for batch in loaded_batches]


def test_what_was_drawn_ahead_goes_to_the_device_with_its_batch() -> None:
    batch = batches(steps=1, size=3)[0]
    moved_draws = batch.to(torch.device("meta")).random_inputs
    assert moved_draws is not None
    assert {tensor.device.type for tensor in moved_draws.tensors.values()} == {"meta"}
    assert collate([batch.select_sample(0), batch.select_sample(1)]).random_inputs is None
