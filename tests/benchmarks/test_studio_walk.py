"""`benchmarks.studio_walk`: the link that the studio prints, and commands that fail. The walk itself takes minutes."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.studio_walk import serving_studio, wait_for_text


def write_command(folder: Path, script: str) -> None:
    command = folder / "venv" / "bin" / "dit-lora"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)


def test_the_link_is_that_of_the_first_line_and_the_studio_ends_with_the_walk(tmp_path: Path) -> None:
    write_command(tmp_path, "echo $$ > pid; echo 'open http://127.0.0.1:8000/?key=abc'; exec sleep 60")
    with serving_studio(tmp_path) as link:
        assert link == "http://127.0.0.1:8000/?key=abc"
        process_id = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_a_studio_that_does_not_start_ends_the_walk(tmp_path: Path) -> None:
    write_command(tmp_path, "echo 'port 8000 is in use'")
    with pytest.raises(SystemExit, match="printed no link"), serving_studio(tmp_path):
        pass


def test_a_command_that_fails_ends_the_walk_with_its_output() -> None:
    texts = iter(["waiting", "running: 3 of 10"])
    page = SimpleNamespace(
        locator=lambda _: SimpleNamespace(first=SimpleNamespace(text_content=lambda: next(texts, "failed: no space")))
    )
    wait_for_text(page, "3 of 10")
    with pytest.raises(SystemExit, match="failed: no space"):
        wait_for_text(page, "done")
