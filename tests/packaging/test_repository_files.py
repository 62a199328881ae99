"""The files around the package: continuous integration, container, citation, and notes for coding assistants."""

import os
import re
import tomllib
from typing import Any

import yaml
from launching import ROOT

from dit_lora.cli.app import PANELS
from dit_lora.version import __version__

WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]


def test_the_workflow_runs_the_command_that_is_run_here() -> None:
    (command,) = [step["run"] for step in JOBS["run"]["steps"] if "run" in step]
    assert command == ".ci/run"
    assert os.access(ROOT / command, os.X_OK)
    assert "make --jobs=2 lint test" in (ROOT / command).read_text()
    # CPU wheels, and the Python that is tested.
    assert JOBS["run"]["env"] == {"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cpu"}
    (python,) = [
        step["with"]["python-version"] for step in JOBS["run"]["steps"] if "setup-python" in step.get("uses", "")
    ]
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f">={python}," in requires


def test_the_workflow_only_reads_and_pins_every_action() -> None:
    # YAML 1.1 reads the key `on` as true.
    assert WORKFLOW.keys() == {"name", True, "permissions", "concurrency", "jobs"}
    assert WORKFLOW[True].keys() == {"push", "pull_request"}
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for job in JOBS.values():
        assert job.keys() <= {"runs-on", "timeout-minutes", "env", "steps"}
        assert job["timeout-minutes"] <= 180
        for step in job["steps"]:
            assert step.keys() <= {"uses", "with", "run"}
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"])
            if "checkout" in step.get("uses", ""):
                assert step["with"] == {"persist-credentials": False}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_the_container_is_pinned_and_runs_without_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert re.fullmatch(r"FROM nvidia/cuda:\d+\.\d+\.\d+-runtime-ubuntu\d+\.\d+", lines[0])
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001"]
    # All that is installed as root comes before.
    assert not [line for line in lines[lines.index("USER 10001") :] if line.startswith(("RUN", "COPY"))]
    assert not re.search(r"^(ARG|ENV).*(TOKEN|SECRET|PASSWORD|API_KEY)", text, re.MULTILINE)
    first_line, *exceptions = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")
    ]
    assert first_line == "*"
    names = {line.removeprefix("!") for line in exceptions if line.startswith("!")}
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert not {".git", ".", "tests"} & names


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    # What version 1.2.0 of the format requires.
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert citation["cff-version"] == "1.2.0"
    assert str(citation["version"]) == __version__
    assert citation["license"] == "Apache-2.0"


def test_the_notes_for_assistants_name_commands_and_files_that_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    verbs = {name.rpartition(".")[2] for panel in PANELS.values() for name in panel}
    text_verbs = set(re.findall(r"`dit-lora ([a-z]+)", text))
    assert len(text_verbs) > 8
    assert text_verbs <= verbs
    paths = set(re.findall(r"`((?:docs|recipes)/[\w./-]*|[A-Z]+\.md|\.ci/run)`", text))
    assert len(paths) > 6
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert len(text.split()) < 600
