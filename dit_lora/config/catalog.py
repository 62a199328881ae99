"""The files that the wheel carries beside its code: recipes, the training script, Accelerate configs; found,
described, copied.
"""

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dit_lora.config.yaml_parsing import parse_yaml
from dit_lora.errors import DitLoraError, listed


def stock_files() -> Path:
    """Return the folder with recipes/ and accelerate_configs/: inside the installed package, or a checkout's root."""
    package = Path(__file__).parents[1]
    for folder in (package / "stock_files", package.parent):
        if (folder / "recipes" / "lora.py").is_file():
            return folder
    raise DitLoraError(
        "this installation of dit-lora has lost its recipes; put them back with: "
        "pip install --force-reinstall --no-deps dit-lora"
    )


def recipe_names() -> list[str]:
    """Return names as `dit-lora init` takes them, `cogvideox/5b_t2v`; those that need no GPU first."""
    root = stock_files() / "recipes"
    names = [path.relative_to(root).with_suffix("").as_posix() for path in root.glob("*/*.yaml")]
    return sorted(names, key=lambda name: (not name.startswith("smoke/"), name))


def accelerate_configs() -> dict[str, Path]:
    """Return the Accelerate configs by name, `one_gpu`."""
    paths = (stock_files() / "accelerate_configs").glob("*.yaml")
    return {path.stem: path for path in sorted(paths)}


@dataclass(frozen=True)
class StockRecipe:
    """A shipped recipe, with what the comment at its top says of it."""

    name: str
    text: str

    @classmethod
    def named(cls, name: str, defaults: Mapping[str, str] | None = None) -> "StockRecipe":
        """Read the recipe of that name, or with `defaults` of that family; an error suggests the nearest name."""
        defaults = defaults or {}
        name = name.removeprefix("recipes/").removesuffix(".yaml")
        name = defaults.get(name, name)
        names = recipe_names()
        if name not in names:
            raise DitLoraError(_unknown(name, names, defaults))
        path = stock_files() / "recipes" / f"{name}.yaml"
        return cls(name, path.read_text(encoding="utf-8"))

    @property
    def smoke(self) -> bool:
        """True for a tiny recipe, which a CPU trains."""
        return self.name.startswith("smoke/")

    @property
    def file(self) -> str:
        """The file's name in a folder of its own: `cogvideox_5b_t2v.yaml`."""
        return f"{self.name.replace('/', '_')}.yaml"

    @cached_property
    def header(self) -> str:
        """The comment at its top."""
        return self.text[: self.text.index("\nmodel:") + 1]

    @cached_property
    def facts(self) -> dict[str, str]:
        """`Task`, `Memory`, `Time` and whatever else the header says of it, by its words."""
        prose = [line[1:].strip() for line in self.header.splitlines() if line[:4] != "#   "]
        flat = " ".join(line.lstrip("# ").strip() for line in self.header.splitlines())
        title = " ".join(prose[1 : prose.index("")])
        parts = re.split(r"(?:^| )([A-Z][a-z]+): ", flat)
        return {"Title": title} | dict(zip(parts[1::2], parts[2::2], strict=True))

    @cached_property
    def commands(self) -> list[str]:
        """The commands that the header says to type, each in one line; the launch is the last."""
        block = self.header.split("\n#\n")[1].replace("\\\n#", "\\\n ")
        joined = re.sub(r" *\\\n *", " ", block)
        lines = [line.lstrip("# ") for line in joined.splitlines() if line.startswith("#   ")]
        return [re.sub(r"  +# .*", "", line) for line in lines]

    @cached_property
    def values(self) -> dict[str, Any]:
        """The contents of the YAML, unchecked."""
        values: dict[str, Any] = parse_yaml(self.text)
        return values

    def record(self, defaults: Mapping[str, str]) -> dict[str, Any]:
        """Return what `dit-lora recipes --json` prints of it."""
        return {
            "name": self.name,
            "family": self.values["model"]["family"],
            "task": self.facts["Task"].rstrip("."),
            "model": self.values["model"]["path"],
            "mode": self.values.get("train", {}).get("mode", "lora"),
            "launch": self.accelerate_config,
            "memory": self.facts["Memory"].rstrip("."),
            "time": self.facts["Time"].rstrip("."),
            "title": self.facts["Title"],
            "smoke": self.smoke,
            "default": self.name in defaults.values(),
        }

    @property
    def accelerate_config(self) -> str:
        """The Accelerate config that its header launches it with; a smoke recipe's is cpu."""
        match = re.search(r"accelerate_configs/(\w+)\.yaml", self.header)
        return match[1] if match else "cpu"

    def launch(self, config: str) -> str:
        """Return the command that starts it in a folder of its own; data.path and run.dir are as its file says."""
        words = shlex.split(self.commands[-1])
        script = words.index("recipes/lora.py")
        options = [word for word in words[2:script] if not word.startswith("accelerate_configs/")]
        options = [word for word in options if word not in ("--quiet", "--config_file")]
        if config != self.accelerate_config:
            options = []  # --num_processes is another topology's
        in_file = ("data.path=", "run.dir=")
        rest = [word for word in words[script + 2 :] if not word.startswith(in_file)]
        head = ["accelerate", "launch", "--quiet", "--config_file", f"{config}.yaml", *options]
        return " ".join([*head, "lora.py", self.file, *rest])


def write_folder(recipe: StockRecipe, out: Path, config: str) -> list[Path]:
    """Write a folder to train in: the recipe, the training script, an Accelerate config and the editors' schema.

    What they say of each other's places is true there. `out` must be empty or absent.
    """
    root = stock_files()
    script = (root / "recipes" / "lora.py").read_text(encoding="utf-8")
    script = re.sub(r"recipes/[\w.]+/[\w.]+\.yaml", recipe.file, script)
    files = {
        recipe.file: _placed(recipe, config),
        "lora.py": script.replace("recipes/lora.py", "lora.py"),
        f"{config}.yaml": accelerate_configs()[config].read_text(encoding="utf-8"),
        "schema.json": (root / "recipes" / "schema.json").read_text(encoding="utf-8"),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise DitLoraError(f"{out} is not empty; name another folder")
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DitLoraError(f"cannot write {error.filename}: {error.strerror}") from error
    return [out / name for name in files]


def _placed(recipe: StockRecipe, config: str) -> str:
    """Return the recipe's text with its header's commands and paths as they are in a folder of its own."""
    launch = re.compile(r"accelerate launch (?:[^\n]*\\\n#)*[^\n]*")
    header = launch.sub(lambda _: recipe.launch(config), recipe.header, count=1)
    header = header.replace("$schema=../schema.json", "$schema=schema.json")
    header = re.sub(r"recipes/([\w.]+/[\w.]+)\.yaml", r"\1", header)  # others, by name
    return header + recipe.text[len(recipe.header) :]


def _unknown(name: str, names: list[str], families: Iterable[str]) -> str:
    inside = [recipe for recipe in names if recipe.startswith(f"{name}/")]
    if inside:
        return listed(f"{name!r} has several recipes; choose one:", inside)
    spelled = {recipe.split("/")[-1]: recipe for recipe in names}
    spelled |= {recipe: recipe for recipe in names}
    spelled |= {family: family for family in families}
    near = [spelled[match] for match in difflib.get_close_matches(name, spelled, n=3)]
    near += [recipe for recipe in names if name and name in recipe]
    if near:
        three = list(dict.fromkeys(near))[:3]
        return f"no recipe {name!r}; did you mean {' or '.join(three)}? All: dit-lora recipes"
    return f"no recipe {name!r}; see: dit-lora recipes"
