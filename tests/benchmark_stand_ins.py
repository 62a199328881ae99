"""Stand-ins for what benchmarks start or need beside themselves: processes, ffmpeg and scikit-learn."""

import importlib
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.faults.media.encode import encode, moving

RunRecipe = Callable[[list[str]], None]


def exit_code_of(call: Callable[[], object]) -> int:
    """Call a command's `main` and return what the process would end with."""
    try:
        code = call()
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            sys.stderr.write(code)
            return 1
    return code if isinstance(code, int) else 0


def processes_in_this_one(run_recipe: RunRecipe) -> ModuleType:
    """The module `subprocess` for a benchmark: Python processes run in this one, without seven seconds of imports.

    Args:
        run_recipe: Called with the arguments of `recipes/lora.py`.
    """

    def call(command: Sequence[str]) -> int:
        if command[0] == "-m":
            main = importlib.import_module(command[1]).main
            return exit_code_of(lambda: main(command[2:]))
        assert Path(command[0]).name == "lora.py", command
        return exit_code_of(lambda: run_recipe(list(command[1:])))

    def run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        if command[0] != sys.executable:
            return subprocess.run(command, **options)
        stdout = io.StringIO()
        with redirect_stdout(stdout) if options.get("capture_output") else nullcontext():
            code = call(command[1:])
        if options.get("check"):
            assert code == 0, command
        return subprocess.CompletedProcess(command, code, stdout.getvalue(), "")

    class Process:
        """Has ended when it is there. Its first `poll` denies that, so that `first_step` looks at the clocks once."""

        def __init__(self, command: Sequence[str], **_options: Any) -> None:
            assert command[0] == sys.executable, command
            self.pid = os.getpid()
            self.returncode = call(command[1:])
            self._polls = iter([None])

        def poll(self) -> int | None:
            return next(self._polls, self.returncode)

    module = ModuleType("subprocess")
    vars(module).update({**vars(subprocess), "run": run, "Popen": Process})
    return module


def write_small_videos(folder: Path) -> Callable[[str], bytes]:
    """An `ffmpeg` of `benchmarks.media_corpus` that writes one small mp4 for each file and knows two frames of it."""
    path = folder / "video.mp4"
    encode(path, moving("corpus", 2))
    video = path.read_bytes()

    def ffmpeg(arguments: str) -> bytes:
        options = shlex.split(arguments)
        if "framecrc" in options:
            return b"#tb 0: 1/1000000\n0, 0, 0, 1, 1, 0x0\n0, 125000, 125000, 1, 1, 0x0\n"
        if "rawvideo" in options:
            return bytes(2 * 3 * (47 * 31 if "odd.mkv" in arguments else 48 * 32))
        if options[-1] == "-":
            return video
        Path(options[-1]).write_bytes(video)
        return b""

    return ffmpeg


def scikit_learn() -> dict[str, ModuleType]:
    """Modules by name: ten noisy patterns in place of digits, and a classifier by the nearest mean."""

    def load_digits(return_X_y: bool) -> tuple[np.ndarray, np.ndarray]:
        assert return_X_y
        generator = np.random.default_rng(0)
        patterns = generator.integers(2, 15, (10, 64))
        classes = np.arange(1797) % 10
        noise = generator.integers(-2, 3, (len(classes), 64))
        return (patterns[classes] + noise).astype(np.float64), classes

    class SVC:
        def __init__(self, gamma: float) -> None:
            self.gamma = gamma

        def fit(self, values: np.ndarray, classes: np.ndarray) -> "SVC":
            self.means = np.stack([values[classes == number].mean(0) for number in range(10)])
            return self

        def predict(self, values: np.ndarray) -> np.ndarray:
            return ((values[:, None] - self.means) ** 2).sum(-1).argmin(-1)

        def score(self, values: np.ndarray, classes: np.ndarray) -> float:
            return float((self.predict(values) == classes).mean())

    modules = {name: ModuleType(name) for name in ("sklearn", "sklearn.datasets", "sklearn.svm")}
    modules["sklearn.datasets"].load_digits = load_digits  # type: ignore[attr-defined]
    modules["sklearn.svm"].SVC = SVC  # type: ignore[attr-defined]
    return modules
