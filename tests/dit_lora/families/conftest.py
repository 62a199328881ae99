"""Every tiny checkpoint of every family, one test each."""

from pathlib import Path

import pytest
from family_cases.case import Case
from family_cases.subject import EVERY, Subject, open_subject

ARCHITECTURES = {
    *("cogvideox-2b", "cogvideox-5b", "cogvideox-1.5-i2v", "dit-tiny", "flux-dev", "flux2-klein"),
    *("krea2-raw", "latte", "ltx-2.3", "ltx-video", "qwen-image", "sana-600m", "sana-video"),
    *("sd3.5-medium", "sd3.5-large", "video-dit-class", "video-dit-text"),
    *("wan-2.1-t2v", "wan-2.1-i2v", "wan-2.2-ti2v-5b", "z-image"),
}
"""A case of each network; the others of its family have the same modules in other sizes, or another task."""


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


@pytest.fixture(params=parameters(ARCHITECTURES))
def model_subject(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    """For what depends on the network alone, whatever the task and the pipeline."""
    return opened(request.param, tiny_checkpoints, monkeypatch)
