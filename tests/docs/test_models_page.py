"""Every recipe of a real model has its place on the page of models."""

import pytest
from launching import ROOT

RECIPES = sorted(
    f"{path.parent.name}/{path.stem}" for path in (ROOT / "recipes").glob("*/*.yaml") if path.parent.name != "smoke"
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_names_every_recipe(recipe: str) -> None:
    assert f"`{recipe}`" in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
