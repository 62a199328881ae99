"""The README's figures and facts are those of the pages and of the package."""

import re
import tomllib

from launching import ROOT

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
    _, ai_toolkit, simple_tuner, musubi_tuner, _ = rows["NaN or Inf in a step"]
    assert ai_toolkit == "replaces NaN latents; trains on Inf gradients"
    assert re.search(r"ai-toolkit \S+ \| Z-Image; Inf in a gradient \| 0 of 32 ", runs)
    assert "NaN in a cached latent | all: it replaces the latent itself" in runs
    assert simple_tuner == "stops with an error"
    assert re.search(r"SimpleTuner \S+ \| Z-Image; NaN in a gradient \| no adapter: an error in the next step", runs)
    assert musubi_tuner == "trains on"
    assert re.search(r"musubi-tuner \S+ \| Z-Image; NaN in a cached latent \| 14 of 42 tensors", runs)
