"""A run that was trained once, and a fake Hub that huggingface_hub talks to from within this process."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import diffusers.loaders.lora_base
import pytest
from fake_hub import FakeHub
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import close_session

SMOKE = Path(__file__).parents[3] / "recipes" / "smoke"
PROMPT = "a blue disc moves"


@pytest.fixture(scope="session")
def trained(
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    lora_main: Callable[[list[str]], None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The folder of a finished run of two steps, with samples; copy it before you change it."""
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(tiny_checkpoints["cogvideox-2b"], folder / "secretive" / "base")
    lora_main(
        [
            str(SMOKE / "cogvideox.yaml"),
            f"model.path={folder / 'secretive' / 'base'}",
            f"data.path={shape_clips}",
            "data.height=32",
            "data.width=48",
            f'validation.prompts=["{PROMPT}"]',
            "validation.inference_steps=1",
            "validation.eval_draws=1",
            "train.steps=2",
            f"run.dir={folder / 'secretive' / 'run'}",
        ]
    )
    return folder / "secretive" / "run"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained`, to change."""
    return shutil.copytree(trained, tmp_path / "secretive" / "run")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The fake Hub. What huggingface_hub reads of its environment at import is changed here instead."""
    with FakeHub(tmp_path / "hub") as server:
        url = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": url,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "hf_cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_STORED_TOKENS_PATH": str(tmp_path / "tokens"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hf_api.api, "endpoint", server.url)  # of `model_info` as a function
        monkeypatch.setattr(diffusers.loaders.lora_base, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_canarycanarycanary")
        close_session()
        yield server
    close_session()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were to be waited, which nobody does."""
    delays: list[float] = []
    monkeypatch.setattr("time.sleep", delays.append)
    return delays
