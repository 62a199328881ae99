"""A recipe of both experts is two whole recipes; what it cannot mean is refused."""

from pathlib import Path
from typing import Any

import pytest

from dit_lora.config.experts import split_recipe_by_expert
from dit_lora.config.load import dump_recipe, load_recipe, parse_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError


def recipe_with(**sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": {"family": "wan", "path": "somewhere", "part": "both"},
        "data": {"path": "clips", "frames": 9, "fps": 8, "height": 64, "width": 64},
        "train": {"steps": 10},
        "run": {"dir": "runs/kitten"},
        "hub": {"push": True, "repo_id": "me/kitten"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return parse_recipe(values, "a test")


def test_one_expert_is_the_recipe_itself() -> None:
    recipe = recipe_with(model={"part": "transformer_2"})
    assert split_recipe_by_expert(recipe) == (recipe,)


def test_both_are_a_run_each_below_the_folder_with_one_cache() -> None:
    recipe = recipe_with(train={"high_noise_share": 0.3})
    high, low = split_recipe_by_expert(recipe)
    assert (high.model.part, low.model.part) == ("transformer", "transformer_2")
    assert (high.run.dir, low.run.dir) == ("runs/kitten/high_noise", "runs/kitten/low_noise")
    assert (high.train.steps, low.train.steps) == (3, 7)
    assert high.cache_dir == low.cache_dir == Path("runs/cache")
    assert not high.hub.push
    assert not low.hub.push
    assert high.validation.other_expert is None
    assert low.validation.other_expert == "runs/kitten/high_noise/adapter"


@pytest.mark.parametrize(("steps", "share", "wanted"), [(10, None, (5, 5)), (2, 0.01, (1, 1)), (5, 0.99, (4, 1))])
def test_each_expert_gets_its_share_of_the_steps_and_at_least_one(
    steps: int, share: float | None, wanted: tuple[int, int]
) -> None:
    high, low = split_recipe_by_expert(recipe_with(train={"steps": steps, "high_noise_share": share}))
    assert (high.train.steps, low.train.steps) == wanted


def test_an_experts_recipe_is_a_recipe_that_can_be_written_and_read(tmp_path: Path) -> None:
    for expert_recipe in split_recipe_by_expert(recipe_with(train={"high_noise_share": 0.3})):
        (tmp_path / "config.yaml").write_text(dump_recipe(expert_recipe))
        assert load_recipe(tmp_path / "config.yaml") == expert_recipe


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"steps": 1}}, "must be at least 2 with model.part: both; got 1"),
        ({"train": {"resume": "runs/x/checkpoints/step_000001"}}, "a path belongs to one expert"),
        ({"validation": {"other_expert": "runs/x"}}, "trains both experts; remove it"),
        (
            {"model": {"part": "transformer"}, "train": {"high_noise_share": 0.5}},
            "high_noise_share applies only to model.part: both",
        ),
        (
            {
                "train": {"mode": "full"},
                "optim": {"groups": {"backbone": {"lr": 1e-4}}},
            },
            "train one expert at a time",
        ),
        ({"train": {"high_noise_share": 1.0}}, "less than 1"),
        ({"model": {"part": "transformer_3"}}, "'transformer', 'transformer_2' or 'both'"),
    ],
)
def test_what_both_cannot_mean_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(DitLoraError, match=words):
        recipe_with(**sections)
