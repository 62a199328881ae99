"""Encoded samples are judged against their range and against each other."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from dit_lora.data.audit.encoded import MIN_SAMPLES, check_encoded
from dit_lora.data.audit.finding import Finding
from dit_lora.data.cache.cache import MAX_ABS
from dit_lora.errors import DitLoraError

Sample = tuple[str, dict[str, torch.Tensor]]


def normal(count: int, *, channels: int = 8, seed: int = 0) -> list[Sample]:
    """Samples as an encoder gives them: channels differ, so do clips, and so do their sizes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    samples = []
    for number in range(count):
        size = (2 + number % 3, 4, 5 + number % 2)
        scale = torch.exp(0.3 * draw(channels, 1, 1, 1))
        latent = torch.linspace(-2, 2, channels)[:, None, None, None] + 0.5 * draw(channels, 1, 1, 1)
        samples.append(
            (
                f"{number}.mp4",
                {
                    "latent_mean": (latent + scale * draw(channels, *size)).bfloat16(),
                    "latent_logvar": -9 + draw(channels, 1, 1, 1) + draw(channels, *size),
                    "prompt_embeds": (0.2 * draw(12, 24)).bfloat16(),
                    "prompt_mask": torch.arange(12) < 5,
                },
            )
        )
    return samples


def found_in(samples: list[Sample]) -> dict[str, list[Finding]]:
    return check_encoded(samples)[0]


def test_statistics_are_those_of_all_values_at_once() -> None:
    """In fp64, by channel, over samples of different sizes, however far the mean is from zero."""
    samples = normal(7)
    for _, tensors in samples:
        tensors["latent_mean"] = tensors["latent_mean"].double() + 5000
    _, stats = check_encoded(iter(samples))
    all_values = torch.cat([tensors["latent_mean"].flatten(1) for _, tensors in samples], dim=1)
    latent = stats["latent_mean"]
    assert latent["samples"] == 7
    assert latent["values_per_channel"] == all_values.shape[1]
    torch.testing.assert_close(
        torch.tensor(latent["mean"], dtype=torch.float64), all_values.mean(1), rtol=1e-14, atol=0
    )
    torch.testing.assert_close(
        torch.tensor(latent["std"], dtype=torch.float64),
        all_values.std(1, correction=0),
        rtol=1e-10,
        atol=0,
    )
    assert latent["abs_max"] == all_values.abs().max()
    largest = max(samples, key=lambda sample: float(sample[1]["latent_mean"].abs().max()))
    assert latent["abs_max_file"] == largest[0]
    assert len(stats["prompt_embeds"]["mean"]) == 24
    assert "prompt_mask" not in stats


@pytest.mark.parametrize("shape", [(6, 5, 7), (6, 3, 5, 7), (2, 6, 1, 5, 7)])
def test_channels_are_found_in_every_layout_of_latents(shape: tuple[int, ...]) -> None:
    """(C, H, W), (C, F, H, W), and several encodings of a first image, (K, C, F, H, W)."""
    values = torch.arange(6.0).reshape(6, *[1] * (2 if len(shape) == 3 else 3)).expand(shape)
    _, stats = check_encoded([("a.mp4", {"image_latent_mean": values})])
    assert stats["image_latent_mean"]["mean"] == [0, 1, 2, 3, 4, 5]
    assert stats["image_latent_mean"]["std"] == [0] * 6


@pytest.mark.parametrize("count", [1, 3, MIN_SAMPLES, 12, 40])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ordinary_sets_have_no_outlier(count: int, seed: int) -> None:
    assert found_in(normal(count, seed=seed)) == {}


def test_small_sets_have_no_outlier_by_chance() -> None:
    """With few samples, some of many statistics agree closely by chance in all but one of them."""
    for seed in range(12):
        assert found_in(normal(5 + seed % 4, channels=32, seed=seed)) == {}


def test_too_few_samples_are_not_compared() -> None:
    samples = normal(MIN_SAMPLES - 1)
    samples[0] = ("0.mp4", {"latent_mean": 50 * samples[0][1]["latent_mean"]})
    assert found_in(samples) == {}


def test_outliers_do_not_depend_on_the_scale_of_the_latents() -> None:
    for scale in (0.01, 100):
        samples = [(file, {"latent": scale * tensors["latent_mean"].float()}) for file, tensors in normal(20)]
        assert found_in(samples) == {}
        samples[3][1]["latent"][0] += 6 * scale  # from -2 to 4 of at most 7
        assert set(found_in(samples)) == {"3.mp4"}


def test_equal_samples_have_no_outlier() -> None:
    """All deviations are zero, and so is the measure that they are compared with."""
    tensors = normal(1)[0][1]
    assert found_in([(f"{number}.mp4", tensors) for number in range(10)]) == {}
    near_tensors = {**tensors, "latent_mean": tensors["latent_mean"] * 1.01}
    assert found_in([*((f"{n}.mp4", tensors) for n in range(10)), ("near.mp4", near_tensors)]) == {}


@pytest.mark.parametrize(
    ("name", "value", "code", "words"),
    [
        ("latent_mean", torch.nan, "latent_non_finite", "1 NaN"),
        ("latent_mean", -torch.inf, "latent_non_finite", "1 Inf"),
        ("latent_mean", 2 * MAX_ABS, "latent_out_of_range", "beyond 10000"),
        ("latent_logvar", torch.nan, "latent_non_finite", "1 NaN"),
        ("latent_logvar", 20.5, "latent_out_of_range", "20.5, beyond (-30.0, 20.0)"),
        ("latent_logvar", -31.0, "latent_out_of_range", "from -31 to"),
        ("prompt_embeds", torch.nan, "embedding_non_finite", "1 NaN"),
        ("prompt_embeds", -2 * MAX_ABS, "embedding_out_of_range", "beyond 10000"),
    ],
)
def test_what_cannot_be_trained_on_is_rejected_and_left_out_of_the_statistics(
    name: str, value: float, code: str, words: str
) -> None:
    samples = normal(12)
    samples[5][1][name].view(-1)[3] = value
    findings, stats = check_encoded(samples)
    assert set(findings) == {"5.mp4"}
    (finding,) = findings["5.mp4"]
    assert (finding.code, finding.verdict) == (code, "reject")
    assert name in finding.message
    assert words in finding.message
    assert stats[name]["samples"] == 11
    other_stats = check_encoded(samples[:5] + samples[6:])[1]
    assert stats[name] == other_stats[name]


@pytest.mark.parametrize("count", [MIN_SAMPLES, 20])
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("latent_mean", lambda x: 30 * x, "is"),
        ("latent_mean", torch.zeros_like, " is 0, and "),
        (
            "latent_mean",
            lambda x: x + 12.0 * (torch.arange(8) == 3)[:, None, None, None],
            "channel 3",
        ),
        ("latent_mean", lambda x: x.where(x != x.max(), 900.0), "latent_mean"),
        ("latent_logvar", lambda x: x + 18, "latent_logvar"),
        ("prompt_embeds", lambda x: 40 * x, "prompt_embeds"),
        ("prompt_embeds", torch.zeros_like, "prompt_embeds"),
        ("prompt_embeds", lambda x: x + 3, "prompt_embeds"),
    ],
)
def test_a_sample_unlike_the_others_is_named_alone(count: int, name: str, change: Any, words: str) -> None:
    samples = normal(count, seed=4)
    file, tensors = samples[2]
    samples[2] = (file, {**tensors, name: change(tensors[name])})
    findings = found_in(samples)
    assert set(findings) == {"2.mp4"}
    (finding,) = findings["2.mp4"]
    part = "embedding" if name == "prompt_embeds" else "latent"
    assert (finding.code, finding.verdict) == (f"{part}_outlier", "warn")
    assert finding.message.startswith(f"{name}: ")
    assert words in finding.message


def test_the_words_give_the_value_and_the_usual_one() -> None:
    samples = [(f"{n}.mp4", {"latent": torch.tensor([[[-1.0, 3.0]]])}) for n in range(9)]
    samples.append(("odd.mp4", {"latent": torch.tensor([[[8.0, 12.0]]])}))
    (finding,) = found_in(samples)["odd.mp4"]
    assert "the mean is 10, and 1 in the median sample" in finding.message
    assert "and 1 more of its statistics" in finding.message  # the largest magnitude


def test_wide_tensors_are_judged_whole_and_keep_few_numbers() -> None:
    """A text encoder's 4096 channels of every sample would not fit into memory."""
    generator = torch.Generator().manual_seed(0)
    samples = [(f"{n}", {"embeds": torch.randn(3, 4096, generator=generator)}) for n in range(9)]
    samples[4][1]["embeds"] *= 50
    findings, stats = check_encoded(samples)
    assert set(findings) == {"4"}
    assert "channel" not in findings["4"][0].message
    assert len(stats["embeds"]["mean"]) == 4096


def test_an_iterator_is_read_one_sample_at_a_time() -> None:
    alive = 0

    class Counted(dict):
        def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
            nonlocal alive
            super().__init__(tensors)
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def stream() -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        for number in range(30):
            assert alive <= 1
            yield f"{number}", Counted({"latent": torch.full((2, 3, 3), float(number % 3))})

    assert check_encoded(stream())[1]["latent"]["samples"] == 30


def test_encodings_of_two_models_are_refused() -> None:
    samples = [
        ("a.mp4", {"latent": torch.ones(4, 2, 2)}),
        ("b.mp4", {"latent": torch.ones(5, 2, 2)}),
    ]
    with pytest.raises(DitLoraError, match=r"latent of b\.mp4 has 5 channels.* 4"):
        check_encoded(samples)


def test_nothing_encoded_gives_nothing() -> None:
    assert check_encoded([]) == ({}, {})
    assert check_encoded([("a.mp4", {"latent": torch.empty(4, 0, 2, 2)})]) == ({}, {})
