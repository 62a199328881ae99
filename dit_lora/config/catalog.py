"""Recipes, the training script and Accelerate configs that come with the package: find, describe and copy them."""

import ast
import difflib
import importlib.util
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from dit_lora.errors import DitLoraError, format_list

# Folders of the recipes that train on a CPU.
_CPU_FOLDERS = ("demo/", "smoke/")


def find_packaged_files_root() -> Path:
    """The folder with recipes/ and accelerate_configs/: inside the installed package, or the root of a checkout.

    Raises `DitLoraError` if the installation lacks them.
    """
    # A wheel has the files inside the package; in a checkout they are at its root.
    package = Path(__file__).parents[1]
    for folder in (package / "stock_files", package.parent):
        # An unrelated folder `recipes` beside the package has no such script.
        if (folder / "recipes" / "lora.py").is_file():
            return folder
    raise DitLoraError(
        "the recipes of this installation are missing; restore them with: pip install --force-reinstall "
        "--no-deps dit-lora"
    )


@cache
def _list_recipe_folders() -> tuple[Path, ...]:
    """Folders of recipes: this package's, and those that other packages name by the entry point `dit_lora.recipes`."""
    folders = [find_packaged_files_root() / "recipes"]
    for point in entry_points(group="dit_lora.recipes"):
        package, *subpackages = point.value.split(".")
        # Finding a package at the top runs none of its code.
        spec = importlib.util.find_spec(package)
        locations = (spec.submodule_search_locations if spec else None) or ()
        folders += [Path(location, *subpackages) for location in locations]
    return tuple(folders)


def map_recipe_paths() -> dict[str, Path]:
    """Files of all recipes by name; recipes that need no GPU come first.

    A name of this package wins over the same name of another package.
    """
    paths: dict[str, Path] = {}
    for folder in reversed(_list_recipe_folders()):
        paths |= {f"{path.parent.name}/{path.stem}": path for path in folder.glob("*/*.yaml")}
    # False sorts before True.
    names = sorted(paths, key=lambda name: (not name.startswith(_CPU_FOLDERS), name))
    return {name: paths[name] for name in names}


def list_recipe_names() -> list[str]:
    """Names for `dit-lora init`, such as `cogvideox/5b_t2v`, in the order of `map_recipe_paths`."""
    return list(map_recipe_paths())


def find_recipe(name: str) -> Path:
    """File of the recipe with this name, one of `list_recipe_names`."""
    return map_recipe_paths()[name]


def load_packaged_recipes() -> list["PackagedRecipe"]:
    """Read all recipes that come with this package and others, in the order of `list_recipe_names`.

    Files that cannot be read are left out.
    """
    recipes = []
    for name, path in map_recipe_paths().items():
        with suppress(DitLoraError):
            recipes.append(PackagedRecipe.from_file(name, path))
    return recipes


def list_accelerate_configs() -> dict[str, Path]:
    """Paths of the Accelerate configs by name, such as `one_gpu`."""
    paths = (find_packaged_files_root() / "accelerate_configs").glob("*.yaml")
    return {path.stem: path for path in sorted(paths)}


@dataclass(frozen=True)
class PackagedRecipe:
    """A recipe that comes with the package, with the facts in its header comment."""

    name: str
    text: str

    @classmethod
    def from_name(cls, name: str, defaults: Mapping[str, str] | None = None) -> "PackagedRecipe":
        """Read the recipe with this name, or a family's default recipe from `defaults`.

        Raises `DitLoraError` that suggests the nearest names.
        """
        defaults = defaults or {}
        # Accept the path of the file, too.
        name = name.removeprefix("recipes/").removesuffix(".yaml")
        name = defaults.get(name, name)
        names = list_recipe_names()
        if name not in names:
            raise DitLoraError(_describe_unknown_name(name, names, defaults))
        return cls.from_file(name, find_recipe(name))

    @classmethod
    def from_file(cls, name: str, path: Path) -> "PackagedRecipe":
        """Read a recipe that another package may bring. Raises `DitLoraError`."""
        try:
            return cls(name, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DitLoraError(f"cannot read recipe {name}, {path}: {error}") from error

    @property
    def is_smoke(self) -> bool:
        """True for a tiny packaged recipe that trains on a CPU."""
        return self.name.startswith(_CPU_FOLDERS)

    @property
    def file_name(self) -> str:
        """File name of a packaged recipe in a folder for one run: `cogvideox_5b_t2v.yaml`."""
        return f"{self.name.replace('/', '_')}.yaml"

    @cached_property
    def header(self) -> str:
        """Comment at the top of a packaged recipe's YAML file."""
        # Every recipe begins with a comment, followed by the section `model`.
        return self.text[: self.text.index("\nmodel:") + 1]

    @cached_property
    def facts(self) -> dict[str, str]:
        """Facts in a packaged recipe's header comment, by label: `Title`, `Task`, `Memory`, `Time` and others."""
        # Lines that are indented after the `#` are commands.
        prose = [line[1:].strip() for line in self.header.splitlines() if line[:4] != "#   "]
        flat = " ".join(line.lstrip("# ").strip() for line in self.header.splitlines())
        # The title is the first paragraph after the schema line.
        title = " ".join(prose[1 : prose.index("")])
        # A label is one capitalized word and a colon. The split gives text, label, text, label, ..., text.
        parts = re.split(r"(?:^| )([A-Z][a-z]+): ", flat)
        return {"Title": title} | dict(zip(parts[1::2], parts[2::2], strict=True))

    @cached_property
    def commands(self) -> list[str]:
        """Shell commands in a packaged recipe's header comment, one line each; the last one launches training."""
        # The commands are the second block. Join lines that end with a backslash, and drop trailing comments.
        block = self.header.split("\n#\n")[1].replace("\\\n#", "\\\n ")
        joined = re.sub(r" *\\\n *", " ", block)
        lines = [line.lstrip("# ") for line in joined.splitlines() if line.startswith("#   ")]
        return [re.sub(r"  +# .*", "", line) for line in lines]

    @property
    def example_commands(self) -> dict[str, list[str]]:
        """Arguments of the `dit-lora tiny` commands in the header, by the folder of model or clips that each makes."""
        commands = [shlex.split(command) for command in self.commands]
        return {arguments[3]: arguments[1:] for arguments in commands if arguments[:2] == ["dit-lora", "tiny"]}

    @cached_property
    def values(self) -> dict[str, Any]:
        """Contents of a packaged recipe's YAML file as plain values, not validated."""
        # The package's own files need none of the checks of `parse_yaml`, which take 20 times as long.
        return yaml.load(self.text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))

    def require_complete_recipe(self) -> None:
        """Raise `DitLoraError` if the recipe lacks what commands read of it, as one of another package may."""
        try:
            missing = [label for label in ("Title", "Task", "Memory", "Time") if label not in self.facts]
            script = "recipes/lora.py" in shlex.split(self.commands[-1])
            missing += [] if script else ["a launch command with recipes/lora.py"]
            missing += [] if self.values["model"]["path"] and self.values["model"]["family"] else ["model"]
        except (LookupError, TypeError, ValueError, yaml.YAMLError) as error:
            missing = [f"a readable header and sections ({type(error).__name__}: {error})"]
        if missing:
            raise DitLoraError(f"recipe {self.name} lacks {', '.join(missing)}; compare it with smoke/sd3")

    def to_json_entry(self, defaults: Mapping[str, str]) -> dict[str, Any]:
        """A packaged recipe's entry in the output of `dit-lora recipes --json`. Raises `DitLoraError`."""
        self.require_complete_recipe()
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
            "smoke": self.is_smoke,
            "default": self.name in defaults.values(),
        }

    @property
    def accelerate_config(self) -> str:
        """Name of the Accelerate config in a recipe's launch command; `cpu` for smoke recipes, which use none."""
        match = re.search(r"accelerate_configs/(\w+)\.yaml", self.header)
        return match[1] if match else "cpu"

    def build_launch_command(self, config: str) -> str:
        """Command that launches a packaged recipe in a folder for one run.

        It has no data.path and run.dir, since the recipe file in that folder sets them.
        """
        # accelerate launch [options] --config_file accelerate_configs/NAME.yaml recipes/lora.py RECIPE [overrides]
        arguments = shlex.split(self.commands[-1])
        script = arguments.index("recipes/lora.py")
        options = [word for word in arguments[2:script] if not word.startswith("accelerate_configs/")]
        # Both are written again below.
        options = [word for word in options if word not in ("--quiet", "--config_file")]
        if config != self.accelerate_config:
            options = []  # options such as --num_processes belong to the header's config
        in_file = ("data.path=", "run.dir=")
        overrides = [word for word in arguments[script + 2 :] if not word.startswith(in_file)]
        # The folder has the config, script and recipe side by side, so their names have no folders.
        head = ["accelerate", "launch", "--quiet", "--config_file", f"{config}.yaml", *options]
        return " ".join([*head, "lora.py", self.file_name, *overrides])


def write_run_folder(recipe: PackagedRecipe, output_folder: Path, config: str) -> list[Path]:
    """Write a folder for one run: the recipe, the training script, an Accelerate config and the JSON Schema for
    editors.

    Paths and commands in these files are adapted to the folder. `output_folder` must be empty or absent; raises
    `DitLoraError`.
    """
    root = find_packaged_files_root()
    script = (root / "recipes" / "lora.py").read_text(encoding="utf-8")
    # The examples in the script name this recipe.
    script = re.sub(r"recipes/[\w.]+/[\w.]+\.yaml", recipe.file_name, script)
    files = {
        recipe.file_name: _adapt_to_run_folder(recipe, config),
        "lora.py": script.replace("recipes/lora.py", "lora.py"),
        f"{config}.yaml": list_accelerate_configs()[config].read_text(encoding="utf-8"),
        "schema.json": (root / "recipes" / "schema.json").read_text(encoding="utf-8"),
    }
    try:
        output_folder.mkdir(parents=True, exist_ok=True)
        # Files that exist, even from an earlier `init`, are never overwritten.
        if any(output_folder.iterdir()):
            raise DitLoraError(f"{output_folder} is not empty; choose another folder")
        for name, text in files.items():
            (output_folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DitLoraError(f"cannot write {error.filename}: {error.strerror}") from error
    return [output_folder / name for name in files]


def is_edited_script(script: Path) -> bool:
    """True if a training script in a run's folder has other code than the one that `write_run_folder` writes."""
    texts = [path.read_bytes() for path in (script, find_packaged_files_root() / "recipes" / "lora.py")]
    try:
        # Only the docstring, which comes first, and the usage name the recipe and the script.
        modules = [ast.parse(text.replace(b"recipes/lora.py", b"lora.py")) for text in texts]
    except (SyntaxError, ValueError):
        return True
    edited, original = (ast.dump(ast.Module(module.body[1:], [])) for module in modules)
    return edited != original


def _adapt_to_run_folder(recipe: PackagedRecipe, config: str) -> str:
    """The recipe's text, with the commands and paths in its header adapted to a folder for one run."""
    # The launch command with its continuation lines, which end with a backslash and begin with `#`.
    launch = re.compile(r"accelerate launch (?:[^\n]*\\\n#)*[^\n]*")
    # A function as replacement: backslashes in a text would be read as escapes.
    header = launch.sub(lambda _: recipe.build_launch_command(config), recipe.header, count=1)
    header = header.replace("$schema=../schema.json", "$schema=schema.json")
    # References to other recipes become names.
    header = re.sub(r"recipes/([\w.]+/[\w.]+)\.yaml", r"\1", header)
    return header + recipe.text[len(recipe.header) :]


def _describe_unknown_name(name: str, names: list[str], families: Iterable[str]) -> str:
    # The name of a folder that holds several recipes.
    inside = [recipe for recipe in names if recipe.startswith(f"{name}/")]
    if inside:
        return format_list(f"{name!r} has several recipes; choose one:", inside)
    # Compare with names with and without their folder, and with families.
    spelled = {recipe.split("/")[-1]: recipe for recipe in names}
    spelled |= {name: name for name in (*names, *families)}
    # Typing errors first, then names that contain the text.
    similar_names = [spelled[match] for match in difflib.get_close_matches(name, spelled, n=3)]
    similar_names += [recipe for recipe in names if name and name in recipe]
    if similar_names:
        three = list(dict.fromkeys(similar_names))[:3]
        return f"no recipe {name!r}; did you mean {' or '.join(three)}? All: dit-lora recipes"
    return f"no recipe {name!r}; see: dit-lora recipes"
