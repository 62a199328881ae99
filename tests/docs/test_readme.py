"""The README's figures and facts are those of the pages and of the package."""

import re
import tomllib
from typing import get_args

from launching import ROOT
from readme_evidence import EVIDENCE

from benchmarks import trainers
from dit_lora.config.lora import AdapterKind
from dit_lora.environment.versions import TRACKERS

README = (ROOT / "README.md").read_text()


def read_table(heading: str) -> list[list[str]]:
    """Cells of the rows of a section's first table, without its headings."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_the_symptom_comes_first_and_the_tables_after_one_screen() -> None:
    lines = README.splitlines()
    assert "NaN" in lines[2]
    assert "black" in lines[2]
    assert next(number for number, line in enumerate(lines) if line.startswith("|")) <= 40
    # A picture that is not there yet is not linked.
    assert "docs/images/demo.gif" in README
    is_shown = "demo.gif)" in re.sub("<!--.*?-->", "", README, flags=re.DOTALL)
    assert is_shown == (ROOT / "docs" / "images" / "demo.gif").exists()


def test_the_requirements_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "torch>=2.11" in project["dependencies"]
    assert "Python 3.11 to 3.13 and PyTorch 2.11 or later" in README


def test_the_memory_of_each_model_is_that_of_its_page() -> None:
    page_rows = [line for line in (ROOT / "docs" / "models.md").read_text().splitlines() if line.startswith("|")]
    rows = read_table("Does it fit?")
    assert len(rows) > 8
    for recipe, shape, memory, options in rows:
        name = recipe.split("`")[1]
        assert (ROOT / "recipes" / f"{name}.yaml").is_file()
        (page_row,) = [row for row in page_rows if f"`{name}`" in row]
        cells = page_row.split("|")
        # Figures: the memory, and those in brackets after each option.
        figures = [re.findall(r"[\d.]+", memory)[0], *re.findall(r"\(([\d.]+)\)", options)]
        assert [figure for figure in figures if not re.search(rf"\b{re.escape(figure)}\b", page_row)] == [], name
        assert not re.fullmatch(r"\d+x\d+(x\d+)?", shape) or shape in {cell.strip() for cell in cells}, name
        for option in re.findall(r"`([^`]+)`", options):
            assert option in page_row, name


def test_the_comparison_says_what_the_runs_showed() -> None:
    rows = {row[0]: row[1:] for row in read_table("Other trainers")}
    assert len(rows) == 5
    assert {len(cells) for cells in rows.values()} == {5}
    runs = (ROOT / "docs" / "guard_anywhere.md").read_text().split("## Trainers it was run on")[1].split("\n## ")[0]
    _, ai_toolkit, simple_tuner, musubi_tuner, scripts = rows["NaN or Inf in a step"]
    assert ai_toolkit == "replaces NaN latents; trains on Inf gradients"
    assert re.search(r"ai-toolkit \S+ \| Z-Image; Inf in a gradient \| 0 of 32 ", runs)
    assert "NaN in a cached latent | all: it replaces the latent itself" in runs
    assert simple_tuner == "stops with an error"
    assert re.search(r"SimpleTuner \S+ \| Z-Image; NaN in a gradient \| no adapter: an error in the next step", runs)
    assert musubi_tuner == "trains on"
    assert re.search(r"musubi-tuner \S+ \| Z-Image; NaN in a cached latent \| 14 of 42 tensors", runs)
    assert scripts == "trains on"
    quality = (ROOT / "docs" / "benchmarks" / "world.md").read_text(encoding="utf-8")
    assert re.search(r"\| Diffusers' script, one clip NaN \| 0 \(0 to 0\) \|", quality)


def test_each_cell_about_another_trainer_is_looked_up_in_its_repository() -> None:
    repositories = ("ai-toolkit", "SimpleTuner", "musubi-tuner", "diffusers")
    cells = {
        (repository, cell)
        for row in read_table("Other trainers")
        if row[0] != "NaN or Inf in a step"
        for repository, cell in zip(repositories, row[2:], strict=True)
    }
    assert cells == {(evidence.repository, evidence.cell) for evidence in trainers.EVIDENCE}
    page = (ROOT / "docs" / "benchmarks" / "other_trainers.md").read_text(encoding="utf-8")
    for evidence in trainers.EVIDENCE:
        assert f"| {evidence.repository} | {evidence.cell} | `{evidence.file or 'names of files'}` |" in page
        assert trainers.COMMITS[evidence.repository][:7] in page


def list_statements() -> list[str]:
    """Sentences and table rows of the README, without headings, pictures, code blocks and emphasis."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", README, flags=re.DOTALL).replace("**", "")
    statements: list[str] = []
    for block in filter(None, map(str.strip, text.split("\n\n"))):
        if block.startswith("|"):
            heads, *rows = re.split(r"\n\|[-:| ]+\n|\n", block)
            # The last table's heads state where its figures were measured.
            statements += [heads, *rows] if heads.startswith("| measured") else rows
        elif not block.startswith(("#", "!")):
            statements += re.split(r"(?<=[.?])\s+(?=[A-Z`\[])", " ".join(block.split()))
    return statements


def test_each_statement_is_shown_by_a_test_or_a_command() -> None:
    statements = list_statements()
    assert len(statements) > 40
    assert [text for text in statements if not any(text.startswith(beginning) for beginning in EVIDENCE)] == []
    # Entries of sentences that are no longer there.
    assert [b for b in EVIDENCE if not any(text.startswith(b) for text in statements)] == []
    for name in {name for names in EVIDENCE.values() for name in names}:
        if name.startswith("benchmarks."):
            assert (ROOT / f"{name.replace('.', '/')}.py").is_file(), name
            continue
        path, _, function = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not function or f"\ndef {function}(" in (ROOT / path).read_text(encoding="utf-8"), name


# Figures of the README, and the sentences or cells of the pages that they are rounded from.
SOURCES = {
    "CogVideoX-5B takes 2.0 s": ("benchmarks/gpu.md", "| **ours** | 2.019 |"),
    "3.6 s in Diffusers' example": ("benchmarks/gpu.md", "| example: Diffusers' script, with checkpointing | 3.644 |"),
    "| 1.012; the guard": ("benchmarks/README.md", "| ours over bare | 1.0111, 1.0122 |"),
    "the guard 1.003": ("benchmarks/README.md", "1.0031 ± 0.0022"),
    "to 1.005 |": ("benchmarks/README.md", "| 1.005 (0.976 to 1.013) |"),
    "| 98 %": ("benchmarks/README.md", "| 0.978 | 1.011 to 0.278 |"),
    "; 88 % |": ("benchmarks/README.md", "| 0.97 | 1.00 | 1.00 | 1.00 | 0.88 | 0.88 | 0.95 | 0.967 |"),
    "10.2 of 16.2": ("kernels.md", "| CogVideoX-5B | 16.2 | 10.2 |"),
    "13.7 of 42.1": ("kernels.md", "| Sana-1.6B | 42.1 | 13.7 |"),
    "0.99 to 1.06": ("benchmarks/README.md", "| 16.5 | 16.4 | 0.99 (0.99 to 1.01) |"),
    "2.9 to 3.1": ("benchmarks/README.md", "(x 2.85)"),
    "7 + 13 resumed steps": ("checkpoints.md", "Each run's end equals the undisturbed one's bit for bit."),
}


def test_every_measured_figure_is_on_the_page_of_its_benchmark() -> None:
    for text, (page, source) in SOURCES.items():
        assert text in README, text
        assert source in (ROOT / "docs" / page).read_text(encoding="utf-8"), text
    measured = README.split("| measured (")[1].split("\n\n")[0]
    for row in measured.splitlines()[2:]:
        figures = row.split("|")[2]
        assert any(text.strip("| ;") in figures for text in SOURCES), row
        for command in re.findall(r"benchmarks\.(\w+)", row.split("|")[3]):
            assert (ROOT / "benchmarks" / f"{command}.py").is_file()


def test_every_model_is_in_a_recipe_or_on_the_pages_of_models() -> None:
    names = re.search(r"\nAlso (.*?) and\n(\S+)\. On", README, re.DOTALL)
    assert names is not None
    models = [*re.split(r",\s+", names[1]), names[2]]
    assert len(models) > 10
    recipes = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "recipes").glob("*/*.yaml")))
    pages = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("models.md", "video_chat.md")]
    known = "".join([recipes, *pages]).lower()
    assert [name for name in models if name.lower() not in known] == []


def test_adapters_and_trackers_are_those_of_recipes() -> None:
    kinds = re.search(r"\| adapts \| \[([^\]]+)\]", README)
    assert kinds is not None
    assert {kind.lower() for kind in kinds[1].split(", ")} == set(get_args(AdapterKind))
    page = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    for tracker, name in zip(TRACKERS, ("TensorBoard", "Weights & Biases", "Trackio"), strict=True):
        assert name in README
        assert tracker in page


def test_the_licence_and_the_status_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert README.rstrip().endswith("Apache-2.0.")
    assert "Development Status :: 3 - Alpha" in project["classifiers"]
    assert "**Status: alpha**" in README
