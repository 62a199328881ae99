"""The notebook runs from its first cell to its last, and what it holds is fit to be published."""

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doc_pages
import pytest
from accelerate.state import AcceleratorState
from doc_commands import Commands
from doc_shell import Shell
from launching import ROOT

NOTEBOOK = ROOT / "notebooks" / "first_lora.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    sources = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]
    assert len(sources) > 8
    return sources


@pytest.fixture
def fresh_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def shell(command: str) -> str:
    """What a cell of `!` lines prints; run where the notebook is."""
    with Shell(Path.cwd(), Commands({}, doc_pages.SMALL, doc_pages.CHEAP).started) as runner:
        process = runner.run(re.sub(r"^!", "", command, flags=re.MULTILINE))
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.thorough  # docs/first_lora.md and guard_anywhere.md, whose commands these are, run in CI
@pytest.mark.usefixtures("fresh_state")
def test_every_cell_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    output = io.StringIO()
    with (
        contextlib.chdir(tmp_path),
        contextlib.redirect_stdout(output),
        caplog.at_level(logging.INFO),
    ):
        for number, cell in enumerate(cells("code")):
            source = "".join(cell["source"])
            if source.startswith("!"):
                output.write(shell(source))
            else:
                exec(compile(source, f"cell {number}", "exec"), names)
    assert re.findall(r"(\d+) of 16 adapter tensors are finite", output.getvalue()) == ["0", "16"]
    assert [event["sample_ids"] for event in names["guard"].events] == [["03_red_square.mp4"]] * 3
    assert names["event"]["verdict"]["cause"] == "data"
    assert "eval loss" in output.getvalue()
    assert names["pipe"].get_list_adapters() == {"transformer": ["default_0"]}


def test_it_holds_small_outputs_and_nothing_of_the_machine_it_ran_on() -> None:
    text = NOTEBOOK.read_text()
    assert len(text) < 150_000
    outputs = json.dumps([cell["outputs"] for cell in cells("code")])
    assert not re.search(r"/(tmp|home|root|work|usr|opt)/|Traceback|Warning", outputs)
    assert any("image/png" in output.get("data", {}) for cell in cells("code") for output in cell["outputs"])


def test_its_links_are_files() -> None:
    prose = "".join("".join(cell["source"]) for cell in cells("markdown"))
    links = re.findall(r"\]\(([^)#]+)", prose)
    assert links
    assert not [link for link in links if not (NOTEBOOK.parent / link).exists()]
