"""The smoke recipes of the diffusion families, and the arguments with which they run in a test."""

from pathlib import Path

from family_cases import CASES, OTHERS, SMOKES

from dit_lora.config.catalog import find_recipe

RUNS = {**SMOKES, **OTHERS}
_FAMILY_OF = {case.variant: case.family for case in CASES}
REPRESENTATIVES = {
    # The first recipe of each family: later items are overwritten by earlier ones.
    **{_FAMILY_OF[smoke.variant]: name for name, smoke in reversed(SMOKES.items())},
    # Another one where that trains more of the family's code.
    **{"ltx_video": "ltx_video_i2v", "video_dit": "video_dit_lora", "wan": "wan_5b_i2v"},
}
"""A smoke recipe of each family, for tests that do not depend on its tasks."""


def smoke_args(
    name: str, checkpoints: dict[str, Path], clips: Path, folder: Path, variant: str | None = None
) -> list[str]:
    """Return a run's recipe, checkpoint, data (written below `folder`, or `clips`) and cache, for `lora_main`."""
    smoke = RUNS[name]
    if smoke.write_data is not None:
        clips = folder / "data"
        smoke.write_data(clips)
    return [
        str(find_recipe(f"smoke/{smoke.recipe or name}")),
        f"model.path={checkpoints[variant or smoke.variant]}",
        f"data.path={clips}",
        f"data.cache={folder / 'cache'}",
        *smoke.overrides,
    ]
