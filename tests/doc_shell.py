"""Bash as a page's blocks have it: real bash, whose `dit-lora`, `accelerate`, `torchrun` and `python` are forked.

Each of these commands is a small script that hands its words to this process over a socket. There they are checked as
they are written (`doc_commands`), changed as the table of substitutions says, and run in a process forked from one
that has everything imported: a tenth of a second instead of ten.
"""

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launching import SCRIPT, Ranks, Script, launch_environment

from dit_lora.training.session import accelerate

COMMANDS = ("dit-lora", "accelerate", "torchrun", "python", "pip", "make", "hf", "sbatch", "ffmpeg")
_CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    one = os.fstat(1).st_ino == os.fstat(2).st_ino
    line.sendall(json.dumps([words, os.getcwd(), dict(os.environ), one]).encode() + b"\\n")
    code, said, complained = json.loads(line.makefile().read())
sys.stdout.write(said)
sys.stderr.write(complained)
sys.exit(code)
"""


@dataclass(frozen=True)
class Started:
    """What a command becomes: a script or `-m` and a module with its arguments, in so many processes."""

    words: tuple[str, ...]
    ranks: int = 1


@dataclass(frozen=True)
class Here:
    """A script or module as `__main__`, in a folder."""

    words: tuple[str, ...]
    folder: str
    one_stream: bool
    """What goes to stderr comes among what goes to stdout, as in a terminal."""

    def __call__(self) -> None:
        os.chdir(self.folder)
        if self.one_stream:
            os.dup2(1, 2)
        module = self.words[0] == "-m"
        sys.argv = list(self.words[module:])
        sys.path[0] = self.folder if module else str(Path(sys.argv[0]).parent)
        # `dit-lora train` runs its script here, where everything is imported.
        accelerate.launch_training = lambda words, _config: Script((str(SCRIPT), *words))() or 0
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")


class Shell:
    """Runs blocks in `folder`, one after the other; `prepare` makes of a command what is started."""

    def __init__(self, folder: Path, prepare: Callable[[list[str], Path], Started]) -> None:
        self.folder, self.prepare = folder, prepare
        self._temporary = tempfile.TemporaryDirectory(prefix="shell_")
        bin_folder = Path(self._temporary.name)
        self._environment = {
            **launch_environment(),
            "PATH": f"{bin_folder}:/usr/bin:/bin",
            "COLUMNS": "1000",  # tables are not cut
        }
        address = str(bin_folder / "socket")
        for name in COMMANDS:
            (bin_folder / name).write_text(_CLIENT.format(python=sys.executable, address=address))
            (bin_folder / name).chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._temporary.cleanup()

    def run(self, block: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """A block by bash, which stops at the first command that fails; `cd` is kept for the next block."""
        folder_file = Path(self._temporary.name) / "where"
        script = f"set -eo pipefail\ntrap 'pwd > {folder_file}' EXIT\n{block}"
        process = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        self.folder = Path(folder_file.read_text().strip())
        return process

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line:
            request = json.loads(line.makefile().readline())
            line.sendall(json.dumps(self._done(*request)).encode())

    def _done(self, words: Sequence[str], folder: str, environment: dict[str, Any], one_stream: bool) -> list[Any]:
        try:
            start = self.prepare(list(words), Path(folder))
        except (AssertionError, SystemExit) as error:
            return [2, "", f"{' '.join(words)}\n{error}\n"]
        process = Ranks(Here(start.words, folder, one_stream), start.ranks, environment).wait()
        return [process.returncode, process.stdout, process.stderr]
