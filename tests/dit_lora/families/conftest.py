"""Every tiny checkpoint of every family, one test each."""

from pathlib import Path

import pytest
from family_cases import ARCHITECTURES
from family_cases.case import Case
from family_cases.subject import EVERY, Subject, open_subject


def parameters(quick: set[str]) -> list[object]:
    """Every case; those that are not `quick` are for `make test-all`."""
    assert quick <= set(EVERY)
    return [
        pytest.param(
            case,
            id=name,
            marks=[pytest.mark.thorough] if case.thorough or name not in quick else [],
        )
        for name, case in EVERY.items()
    ]


def opened(case: Case, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Subject:
    case.prepare(monkeypatch)
    return open_subject(case, checkpoints[case.variant])


@pytest.fixture(params=parameters(set(EVERY)))
def subject(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    return opened(request.param, tiny_checkpoints, monkeypatch)


# With other fusible blocks, an fp16 emulation, or tokens of references among those of the sample.
FUSIBLE = {"sana-1.5", "sana-fp16", "flux-kontext", "qwen-image-edit-plus-2-references", "ltx-2.3-ic_lora"}


@pytest.fixture(params=parameters(ARCHITECTURES | FUSIBLE))
def fusible_subject(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    """For what depends on the network and on which of its blocks are fused."""
    return opened(request.param, tiny_checkpoints, monkeypatch)


# A further pipeline class of the family, another component of it, or other conditions.
PIPELINES = {
    "cogvideox-5b-i2v",
    "flux-kontext",
    "flux2-klein-2-references",
    "qwen-image-edit-plus-2-references",
    "ltx-video-i2v",
    "ltx-2.3-i2v",
    "ltx-2.3-ic_lora",
    "wan-2.1-flf2v",
    "wan-2.2-t2v-a14b-transformer_2",
    "wan-2.2-ti2v-5b-i2v",
}


@pytest.fixture(params=parameters(ARCHITECTURES | PIPELINES))
def pipeline_subject(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    """For what depends on the network and on the pipeline that it is loaded into."""
    return opened(request.param, tiny_checkpoints, monkeypatch)


# One stream, two streams, blocks of an image in time, linear attention, and what no smoke recipe of CI trains.
COMPARED = {"cogvideox-2b", "flux-dev", "sana-600m", "sana-video", "sd3.5-large", "video-dit-text"}


@pytest.fixture(params=parameters(COMPARED))
def compared_subject(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    """For what the preflight of each family's smoke recipe asks in fp32 as well: tests/recipes/test_families.py."""
    return opened(request.param, tiny_checkpoints, monkeypatch)


# Its decoder takes a timestep, which no other variant's does.
@pytest.fixture(params=parameters(ARCHITECTURES | {"ltx-video-0.9.1"}))
def vae_subject(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    """For what depends on the VAE: one of each kind."""
    return opened(request.param, tiny_checkpoints, monkeypatch)


@pytest.fixture(params=parameters(ARCHITECTURES))
def model_subject(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    """For what depends on the network alone, whatever the task and the pipeline."""
    return opened(request.param, tiny_checkpoints, monkeypatch)


# One stream and two, image and video, classes, in-context tokens and text in the sequence.
QUICK = {
    *("cogvideox-2b", "cogvideox-1.5-i2v", "sana-600m", "dit-tiny", "latte", "flux-dev", "flux2-klein", "qwen-image"),
    *("z-image", "krea2-raw", "ltx-2.3", "wan-2.2-ti2v-5b", "sd3.5-medium", "ideogram-4", "kandinsky-5-t2v"),
}


@pytest.fixture(params=parameters(QUICK))
def quick_model_subject(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    """For what depends on the network alone, and takes many steps."""
    return opened(request.param, tiny_checkpoints, monkeypatch)
