"""A `dit-lora` command that was started in the background, with its output in a file."""

import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dit_lora.parsing import parse_json

# A training that is stopping finishes its step and saves.
JobState = Literal["waiting", "running", "stopping", "done", "failed", "stopped"]
JOB_COLORS: dict[JobState, str] = {"waiting": "", "stopping": "warn", "failed": "reject", "stopped": "warn"}
"""Color class of a state; `ok` for the others."""
_TAIL_BYTES = 4000  # bytes at the end of a command's output that are shown


@dataclass
class CommandJob:
    """One command: waiting, running, or ended."""

    job_id: str
    arguments: Sequence[str]
    """The arguments after `dit-lora`."""
    log: Path
    page: str
    """Address of the run or data set that it is about."""
    results: Path | None = None
    """Folder in which the command writes samples."""
    state: JobState = "waiting"
    exit_code: int | None = None
    process: "subprocess.Popen[bytes] | None" = None
    gpu: str = ""
    """The GPU that it was given."""
    created: float = field(default_factory=time.time)

    @property
    def command(self) -> str:
        """The command as it is typed in a shell."""
        # With quotes, so that it can be copied into a terminal.
        return shlex.join(["dit-lora", *self.arguments])

    @property
    def is_active(self) -> bool:
        return self.state in ("waiting", "running", "stopping")

    @property
    def color(self) -> str:
        return JOB_COLORS.get(self.state, "ok")

    @property
    def output(self) -> str:
        """The end of the command's output."""
        # The file grows while the command runs, and is missing while it waits.
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def read_json_output(self) -> dict[str, Any] | None:
        """What a command with `--json` has printed; None while it runs, or if it printed something else."""
        # A document that is still being written looks like a damaged one.
        if self.is_active:
            return None
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
            # Messages of libraries are in the same file. The document is indented, so its braces are lines.
            answer = parse_json("\n".join(lines[lines.index("{") : len(lines) - lines[::-1].index("}")]))
        except (OSError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None
