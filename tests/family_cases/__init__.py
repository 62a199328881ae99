"""What tests must know of each diffusion family: its tiny checkpoints and smoke recipes.

A module has the name of a family, by which it is found. It may have similar families too, as `video_dit` has Latte.
That of another package's family is `<family>_contract`, if the path has it.
"""

import importlib
import importlib.util
from collections.abc import Mapping

from dit_lora.families import DIFFUSION_FAMILIES
from family_cases.case import Case, Smoke

_NAMES = [name for family in DIFFUSION_FAMILIES for name in (f"family_cases.{family}", f"{family}_contract")]
_MODULES = [importlib.import_module(name) for name in _NAMES if importlib.util.find_spec(name)]
CASES: tuple[Case, ...] = tuple(case for module in _MODULES for case in module.CASES)
SMOKES: Mapping[str, Smoke] = {name: smoke for module in _MODULES for name, smoke in module.SMOKES.items()}
"""By the name of the smoke recipe."""
OTHERS: Mapping[str, Smoke] = {
    name: smoke for module in _MODULES for name, smoke in getattr(module, "OTHERS", {}).items()
}
"""What has no smoke recipe of its own: other bases and data of those."""

# Later items are overwritten by earlier ones.
_FIRST_CASES = {case.family: case.name for case in reversed(CASES) if not case.thorough}
ARCHITECTURES = {*_FIRST_CASES.values(), *(case.name for case in CASES if case.has_other_modules)}
"""A case of each network; the others of its family have the same modules in other sizes, or another task."""
