"""The loops of a folder, and what each declares at its top."""

import ast
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
FAULTS = (
    "nan_sample",
    "nan_target",
    "huge_target",
    "inf_gradient",
    "nan_moment",
    "nan_weight",
    "nan_loss",
    "nan_state",
    "empty_batch",
    "replay_oom",
    "late_nan",
    "late_weight",
)
_DECLARATION = re.compile(r"^FAULTS = ", re.M)
GUARDS = ("command", "watch", "attach", "callback")


@dataclass(frozen=True)
class LoopFile:
    """A loop, and the constants at its top; all but `FAULTS` may be missing."""

    path: Path
    name: str
    """Its path below the folder of loops, without the suffix."""
    faults: tuple[str, ...]
    """`FAULTS = "nan_sample inf_gradient"`: the faults that make sense for it."""
    guards: tuple[str, ...] = ("command",)
    """`GUARDS = "command watch"`: the command, or the API that the loop calls when it is given `--guard=watch`."""
    survives: tuple[str, ...] = ()
    """`SURVIVES = "nan_sample"`: faults with which the unguarded loop ends with exit code 0 and finite files; "*" if
    that is not known, as for a composed loop."""
    spreads: tuple[str, ...] = ()
    """`SPREADS = "running_mean queue"`: names of state that a bad sample spoils in the loop itself. A message that
    names one of these is right too."""
    infinite: tuple[str, ...] = ()
    """`INFINITE = "model/mask"`: tensors in its files that are infinite by its own design."""
    varies: tuple[str, ...] = ()
    """`VARIES = "*.json"`: files that differ between two runs without the guard."""
    preload: str = ""
    """`PRELOAD = "accelerate"`: a library that takes long to import; the fork server imports it once."""
    model: str = ""
    """`MODEL = "qwen2.5-vl"`: a tiny checkpoint, which the driver builds below the folder in `LOOP_MODELS`."""
    ranks: int = 1
    """`RANKS = 2`: processes with torchrun's environment."""

    def varies_in(self, file: str) -> bool:
        """True if this file, by its path in the working directory, differs between any two runs."""
        return any(fnmatch(file, pattern) for pattern in self.varies)


def read_loop(path: Path, folder: Path = FOLDER) -> LoopFile:
    """Read a loop's constants without running it. Raises `ValueError` for an unknown fault or guard."""
    constants = _read_constants(path)
    loop = LoopFile(
        path=path,
        name=path.relative_to(folder).with_suffix("").as_posix(),
        faults=tuple(constants["FAULTS"].split()),
        guards=tuple(constants.get("GUARDS", "command").split()),
        survives=tuple(constants.get("SURVIVES", "").split()),
        spreads=tuple(constants.get("SPREADS", "").split()),
        infinite=tuple(constants.get("INFINITE", "").split()),
        varies=tuple(constants.get("VARIES", "").split()),
        preload=constants.get("PRELOAD", ""),
        model=constants.get("MODEL", ""),
        ranks=constants.get("RANKS", 1),
    )
    unknown = {*loop.faults, *loop.survives} - {*FAULTS, "*"} | set(loop.guards) - set(GUARDS)
    if unknown:
        raise ValueError(f"{path}: unknown fault or guard: {', '.join(sorted(unknown))}")
    return loop


def _read_constants(path: Path) -> dict[str, Any]:
    constants: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.isupper() and isinstance(node.value, ast.Constant):
                constants[name] = node.value.value
    return constants


def find_loops(pattern: str = "*", folder: Path = FOLDER) -> list[LoopFile]:
    """The loops in the subfolders, in the order of their names, whose name matches the pattern."""
    paths = sorted(folder.glob("*/*.py"))
    scripts = [path for path in paths if _DECLARATION.search(path.read_text(encoding="utf-8"))]
    return [loop for loop in (read_loop(path, folder) for path in scripts) if fnmatch(loop.name, pattern)]
