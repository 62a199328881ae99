"""Draws are functions of (seed, stream, draw number)."""

import torch

from dit_lora.numerics.streams import (
    RandomStreams,
    derive_seed,
    draw_integers,
    draw_normal_noise,
    make_generator,
)


def test_a_sample_draws_the_same_alone_as_in_any_batch() -> None:
    batch = draw_normal_noise((3, 5), RandomStreams(7, [10, 11, 12])("noise"))
    unbatched = draw_normal_noise((3, 5), RandomStreams(7, [11])("noise"))
    assert torch.equal(batch[1], unbatched[0])
    batch_draws = draw_integers(0, 1000, RandomStreams(7, [10, 11, 12])("timestep"))
    assert torch.equal(batch_draws[2:], draw_integers(0, 1000, RandomStreams(7, [12])("timestep")))


def test_streams_seeds_and_draw_numbers_are_unrelated() -> None:
    draws = [
        torch.randn(8, generator=make_generator(seed, stream, draw))
        for seed in (0, 1)
        for stream in ("noise", "posterior")
        for draw in (0, 1)
    ]
    for i, first_draw in enumerate(draws):
        for other_draw in draws[i + 1 :]:
            assert not torch.equal(first_draw, other_draw)
    assert derive_seed(1, "a", 23) != derive_seed(1, "a", 2, 3)
    assert len({derive_seed(0, "draws", name) for name in ("a.mp4", "b.mp4", "a.mp", "4")}) == 4
    assert 0 <= derive_seed(0, "draws", "a.mp4") < 2**63  # any draw number seeds a generator again


def test_drawing_does_not_disturb_or_follow_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    reference = draw_normal_noise((2,), RandomStreams(0, [5])("noise"))
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(99)
    assert torch.equal(reference, draw_normal_noise((2,), RandomStreams(0, [5])("noise")))


def test_draws_have_the_distributions_that_they_claim() -> None:
    noise = draw_normal_noise((200,), RandomStreams(0, range(100))("noise"))
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03
    times = draw_integers(0, 1000, RandomStreams(0, range(4000))("timestep"))
    counts = torch.histc(times.float(), bins=4, min=0, max=1000)
    assert (counts - 1000).abs().max() < 120  # four standard deviations
    assert times.min() >= 0
    assert times.max() <= 999
