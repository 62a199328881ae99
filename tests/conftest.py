"""Shared fixtures: tiny checkpoints and clips, built once a session; recipes, run here or launched."""

import atexit
import gc
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on busy cores can be a hundred times slower
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, at its import
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it says on stdout: no GPU
    import quick_interpreter

    quick_interpreter.install()
from accelerate.state import AcceleratorState
from filelock import FileLock
from launching import ROOT, SCRIPT, launch_command, run_python, started

from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.families import FAMILIES, get_family

torch.set_num_threads(1)

SMOKE = ROOT / "recipes" / "smoke" / "cogvideox.yaml"
Launch = Callable[..., subprocess.CompletedProcess[str]]
_current_file: Path | None = None
"""The file whose tests run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "Build a tiny checkpoint when a test asks for it, and not all at the start, which takes half a minute."
    parser.addoption("--lazy-checkpoints", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        os.environ["TEST_COUNTS_FOLDER"] = str(Path(config.option.basetemp).parent / "counts")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow tests first, so that no worker ends with one alone."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Import without collections of garbage, and freeze what was imported, so that later ones pass over it."""
    gc.disable()
    try:
        with compiled_once(session.config):
            return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@contextmanager
def compiled_once(config: pytest.Config) -> Iterator[None]:
    """Let one of xdist's workers import alone, which compiles all files; the others then read what it compiled.

    In a clean clone compiling is half of the time of a collection.
    """
    if not hasattr(config, "workerinput"):
        yield
        return
    done = Path(config.option.basetemp).parent / "compiled"
    with ExitStack() as stack:
        stack.enter_context(FileLock(f"{done}.lock"))
        if done.exists():
            stack.close()
        yield
        done.touch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze all objects when a file begins: recipes collect garbage often, which took half of their time."""
    global _current_file
    if item.path != _current_file:
        _current_file = item.path
        gc.collect()
        gc.freeze()


# Else nanobind reports what is left as leaks. Not in `pytest_unconfigure`: pytest collects garbage after it.
atexit.register(gc.unfreeze)


class TinyCheckpoints(dict[str, Path]):
    """Folders of tiny random checkpoints by variant. Each is built when it is first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._families = {variant: family for family in map(get_family, FAMILIES) for variant in family.tiny_variants}

    def __missing__(self, variant: str) -> Path:
        folder = self._root / variant
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                self._families[variant].build_tiny_checkpoint(variant, folder, 0)
        self[variant] = folder
        return folder

    def build_all(self, *, backwards: bool) -> None:
        for variant in reversed(self._families) if backwards else self._families:
            self[variant]


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Path]:
    """One tiny random checkpoint of every variant of every family; xdist's workers share them, and the work.

    They are built before the first test, which may replace functions that builders call.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    root = tmp_path_factory.getbasetemp().parent / "tiny" if worker else tmp_path_factory.mktemp("tiny")
    root.mkdir(exist_ok=True)
    checkpoints = TinyCheckpoints(root)
    if not pytestconfig.getoption("lazy_checkpoints"):
        # The second worker begins at the other end, so that neither waits for what the other builds.
        checkpoints.build_all(backwards=worker == "gw1")
    return checkpoints


@pytest.fixture(scope="session")
def shape_clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of five captioned clips, 9 frames at 8 fps, 64x96."""
    folder = tmp_path_factory.mktemp("clips") / "shapes"
    write_shapes(folder, clips=5, frames=9, height=64, width=96, fps=8)
    return folder


@pytest.fixture
def recipe_values(tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path: Path) -> dict[str, Any]:
    """A small recipe as plain values, to change before `parse_recipe`."""
    return {
        "model": {"family": "cogvideox", "path": str(tiny_checkpoints["cogvideox-2b"])},
        "data": {
            "path": str(shape_clips),
            "frames": 9,
            "height": 32,
            "width": 48,
            "fps": 8,
            "workers": 0,
        },
        "lora": {"rank": 4, "alpha": 8},
        "optim": {"groups": {"adapter": {"lr": 1e-3}}},
        "train": {"steps": 4, "checkpointing": "none"},
        "validation": {"eval_draws": 1, "inference_steps": 2},
        "run": {"dir": str(tmp_path / "runs" / "run")},
    }


@pytest.fixture(scope="session")
def encoded_shapes(
    tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The cache of the smoke recipe's clips and captions."""
    from dit_lora.commands.cache import build_cache

    AcceleratorState._reset_state(reset_partial_state=True)  # another test may have left one in bf16
    cache = tmp_path_factory.mktemp("encoded") / "cache"
    model, data = tiny_checkpoints["cogvideox-5b"], shape_clips
    size = ("data.height=32", "data.width=48", "validation.prompts=[]")
    build_cache(SMOKE, [f"model.path={model}", f"data.path={data}", f"data.cache={cache}", *size])
    return cache


@pytest.fixture
def smoke(tiny_checkpoints: dict[str, Path], shape_clips: Path, encoded_shapes: Path, tmp_path: Path) -> list[str]:
    """The smoke recipe and overrides that make it quick: no sampling, 32x48, clips that are encoded already."""
    shutil.copytree(encoded_shapes, tmp_path / "cache")
    return [
        str(SMOKE),
        f"model.path={tiny_checkpoints['cogvideox-5b']}",
        f"data.path={shape_clips}",
        f"data.cache={tmp_path / 'cache'}",
        "data.height=32",
        "data.width=48",
        "validation.prompts=[]",
        "validation.eval_draws=0",
        # Tests put other kernels into one process, which no digest of files tells apart.
        "guard.preflight=anew",
        # After the last step it takes an eighth of a run; tests of it ask for it, and families' runs have it.
        "guard.parity_every=0",
    ]


@pytest.fixture
def nothing_encoded(smoke: list[str], tmp_path: Path) -> None:
    """The smoke recipe without a cache, for tests of what happens before encoding or in it."""
    shutil.rmtree(tmp_path / "cache")


@pytest.fixture(scope="session")
def lora_main() -> Callable[[list[str]], None]:
    """`main` of recipes/lora.py, to run a recipe in this process."""
    from quick_runs import quick_runs

    spec = importlib.util.spec_from_file_location("lora_recipe", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def main(args: list[str]) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
        with quick_runs():
            module.main(args)

    return main


@pytest.fixture(scope="session")
def launch() -> Launch:
    """Run recipes/lora.py in processes of its own: `launch(args)`, `launch(args, ranks=2)`.

    They are forked with everything imported; with `really=True` a launcher starts each rank as for users, which takes
    ten seconds more.
    """

    def run(
        args: list[str],
        ranks: int = 1,
        *,
        really: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        if really:
            assert env is None
            return run_python(ROOT, *launch_command(args, ranks)[1:])
        return started(args, ranks, env=env).wait()

    return run
