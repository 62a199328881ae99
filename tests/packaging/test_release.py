"""What `make build` makes: an sdist that builds the wheel, with metadata that a package index takes."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from launching import ROOT, launch_environment

import dit_lora

pytestmark = pytest.mark.slow


def metadata(dist: Path) -> Message:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        return Parser().parsestr(wheel.read(name).decode())


def test_the_sdists_wheel_has_every_file_of_the_checkout_as_it_is(checkout: Path, dist: Path) -> None:
    """What `test_wheel.py` asks of the checkout's own wheel."""
    expected = {}
    for root, top in ((checkout, "dit_lora"), (checkout / "kernels", "dit_lora_kernels")):
        paths = [path for path in (root / top).rglob("*") if path.is_file()]
        expected |= {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    for folder in ("recipes", "accelerate_configs"):
        paths = [path for path in (checkout / folder).rglob("*") if path.is_file()]
        stock = "dit_lora/stock_files/"
        expected |= {stock + str(path.relative_to(checkout)): path.read_bytes() for path in paths}
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        inside = {name: wheel.read(name) for name in wheel.namelist()}
    packaged = {name: data for name, data in inside.items() if ".dist-info/" not in name}
    assert packaged.keys() == expected.keys()
    assert [name for name in expected if packaged[name] != expected[name]] == []
    assert any(name.endswith("licenses/LICENSE") for name in inside)


def test_the_sdist_has_what_its_own_tests_and_pages_need(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {
        ".ci/run",
        ".dockerignore",
        ".github/workflows/ci.yml",
        "AGENTS.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "Dockerfile",
        "LICENSE",
        "Makefile",
        "README.md",
        "SECURITY.md",
        "accelerate_configs/one_gpu.yaml",
        "benchmarks/overhead.py",
        "constraints.txt",
        "docs/design.md",
        "kernels/bench/bench.py",
        "kernels/dit_lora_kernels/lora_linear.py",
        "recipes/lora.py",
        "tests/conftest.py",
        "tests/packaging/test_release.py",
    }
    assert [name for name in names if name.endswith(".pyc")] == []


def test_a_package_index_takes_both(dist: Path) -> None:
    files = sorted(dist.iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"]
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    process = subprocess.run(command, env=launch_environment(), capture_output=True, text=True)
    output = process.stdout
    assert process.returncode == 0, output + process.stderr
    assert output.count("PASSED") == 2


def test_the_metadata_says_what_the_project_is(dist: Path) -> None:
    facts = metadata(dist)
    assert (facts["Name"], facts["Version"]) == ("dit-lora", dit_lora.__version__)
    assert facts["License-Expression"] == "Apache-2.0"
    assert facts["Description-Content-Type"] == "text/markdown"
    assert facts.get_payload() == (ROOT / "README.md").read_text()
    assert facts["Summary"]
    pythons = {name for name in facts.get_all("Classifier") or () if "Python :: 3." in name}
    assert {name.rpartition(" ")[2] for name in pythons} == {"3.11", "3.12", "3.13"}
    assert facts["Requires-Python"] == "<3.14,>=3.11"
    required_packages = [need for need in facts.get_all("Requires-Dist") or () if "extra ==" not in need]
    assert len(required_packages) == len(pyproject()["project"]["dependencies"])


def pyproject() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_everything_that_setup_installs_is_pinned() -> None:
    """By name; what those need in turn, `pip install` in a clean environment shows."""
    project = pyproject()["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    extra = re.search(r"dit-lora\[(.*)\]", " ".join(extras["dev"]))
    assert extra is not None
    requirements = [*project["dependencies"], *extras["dev"]]
    requirements += [need for name in extra[1].split(",") for need in extras[name]]
    names = {normal(need) for need in requirements} - {"dit-lora", "setuptools"}
    pins = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    assert names - {normal(pin) for pin in pins} == set()
    assert pins == sorted(pins, key=normal)


def normal(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_the_changelog_is_about_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased, *released = re.findall(r"^## \[([^\]]+)\]", text, flags=re.MULTILINE)
    assert unreleased == "Unreleased"
    version = dit_lora.__version__
    assert version in (released[0] if released else text)


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_issue_forms_are_what_github_takes(name: str) -> None:
    """Its schema: a name, a description, and fields with an id of their own and a label."""
    import yaml

    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form.keys() <= {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    if name == "bug_report":
        form_text = yaml.safe_dump(form)
        assert all(item in form_text for item in ("doctor --json", "bundle", "recipe", "events.jsonl"))
