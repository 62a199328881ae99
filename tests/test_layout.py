"""The house rules that a machine can hold us to: layers, lengths, nesting, names, recipes."""

import ast
import functools
import gc
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

from dit_lora.config.load import build_recipe_schema, load_recipe
from dit_lora.families import FAMILIES

pytestmark = pytest.mark.slow  # a long file, which would end the run alone

ROOT = Path(__file__).parents[1]
MAX_FILE, MAX_FUNCTION, MAX_NESTING = 600, 80, 4
MAX_KERNEL_FILE = 700
"""An op is one file: reference, kernels, launchers, op."""
OURS = r"dit_lora(\.\w+)+(:\w+)?"

# Lowest first. A module imports from lower floors and from its own room. The ground floor is one room.
FLOORS = """
errors files parsing patching redact terminal version
config
environment
numerics
guard
adapters data models
fuse
families
training.trackers
training.optim training.execution training.session
training.distributed
training.checkpoints verify
training
training.tasks
planning export report
hub
studio
commands
cli
__main__
"""
FLOOR_OF = {
    f"dit_lora.{room}": number for number, rooms in enumerate(FLOORS.strip().split("\n")) for room in rooms.split()
}
MAX_ROOMS, MAX_AT_TOP, MAX_IN_FOLDER = 18, 9, 25
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
# Classes whose `from_pretrained` takes tensors or an adapter, and `kind`, to which build_from_configs gives another.
_NO_CODE = ("PeftModel", "PeftConfig", "Embedding", "kind")


@pytest.fixture(autouse=True, scope="module")
def without_garbage_collection() -> Iterator[None]:
    """The trees of all files are millions of objects, which each collection would look at again."""
    gc.disable()
    yield
    # The next file begins with a collection, which would take two seconds of them.
    tree_of.cache_clear()
    nodes_of.cache_clear()
    gc.enable()


def python_files() -> list[Path]:
    folders = ("dit_lora", "kernels", "recipes", "benchmarks", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    return files


def library_files() -> list[Path]:
    files = [
        *(ROOT / "dit_lora").rglob("*.py"),
        *(ROOT / "kernels" / "dit_lora_kernels").rglob("*.py"),
    ]
    assert len(files) > 25
    return files


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file: a walk takes longer than what is asked of the nodes."""
    return list(ast.walk(tree_of(path)))


@functools.cache
def imports_of(path: Path) -> set[str]:
    return set(imports(nodes_of(path)))


def module_name(path: Path) -> str:
    kernels = ROOT / "kernels"
    relative = path.relative_to(kernels if path.is_relative_to(kernels) else ROOT)
    return ".".join(relative.with_suffix("").parts).removesuffix(".__init__")


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every import, wherever it stands, and every module of ours that a string names, as registries do."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(OURS, str(node.value)):
            yield str(node.value).replace(":", ".")


def import_graph(files: Sequence[Path]) -> dict[str, set[str]]:
    """Which of these files import which, by any kind of import; a package's own file among them."""
    paths = {module_name(path): path for path in files}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        graph[name] = set()
        for target in imports_of(path):
            while target and target not in paths:
                target = target.rpartition(".")[0]
            if target not in ("", "dit_lora", name):  # the top names all that is public, as strings
                graph[name].add(target)
    return graph


def test_no_files_import_each_other_in_a_circle() -> None:
    """Typing's imports, late ones and those by name count: they too say that one cannot be read without the other."""
    with pytest.raises(CycleError) as planted:
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"b"}}).prepare()
    assert set(planted.value.args[1]) == {"b", "c"}
    TopologicalSorter(import_graph(library_files())).prepare()


def test_every_kind_of_import_is_counted() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from dit_lora.training.run import Run
def late():
    import dit_lora.training.fit
REGISTRY = {"wan": "dit_lora.families.wan:FAMILY"}
"""
    assert {"dit_lora.training.run.Run", "dit_lora.training.fit"} < set(imports(ast.walk(ast.parse(source))))
    assert "dit_lora.families.wan.FAMILY" in set(imports(ast.walk(ast.parse(source))))


def room_of(module: str) -> str:
    """Return the most specific room that holds a module; the small modules of the ground floor are one."""
    rooms = [room for room in FLOOR_OF if module == room or module.startswith(f"{room}.")]
    assert rooms, f"{module} is on no floor; give its folder one in FLOORS"
    room = max(rooms, key=len)
    return room if FLOOR_OF[room] else "dit_lora"


def edges_up(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the imports that lead to a higher floor, or to another room of the same one."""
    floor_of = FLOOR_OF | {"dit_lora": 0}
    upward = []
    for module, targets in graph.items():
        for target in targets:
            source_room, target_room = room_of(module), room_of(target)
            if source_room != target_room and floor_of[target_room] >= floor_of[source_room]:
                upward.append(f"{module} -> {target}")
    return sorted(upward)


def library_graph() -> dict[str, set[str]]:
    graph = import_graph([path for path in library_files() if path.is_relative_to(ROOT / "dit_lora")])
    # It names all that is public, and is imported by nobody inside.
    del graph["dit_lora"]
    return graph


def test_imports_point_down() -> None:
    assert not edges_up(library_graph())


@pytest.mark.parametrize(
    "source",
    [
        "if TYPE_CHECKING:\n    from dit_lora.training.run import Run",
        "def late():\n    import dit_lora.training.fit",
        "HOME = 'dit_lora.training.run:Run'",
        "from dit_lora.data.media import media",
    ],
)
def test_an_import_that_points_up_is_found(source: str) -> None:
    graph = library_graph()
    planted = set()
    for target in imports(ast.walk(ast.parse(source))):
        while target not in graph:
            target = target.rpartition(".")[0]
        planted.add(target)
    graph["dit_lora.guard.finite_gate"] |= planted
    (edge,) = edges_up(graph)
    assert edge.startswith("dit_lora.guard.finite_gate -> dit_lora.")


def test_rooms_are_few_and_none_is_crowded() -> None:
    top = ROOT / "dit_lora"
    rooms = [path for path in top.iterdir() if (path / "__init__.py").is_file()]
    assert len(rooms) <= MAX_ROOMS
    assert len(list(top.glob("*.py"))) <= MAX_AT_TOP
    folders = {path.parent for path in library_files()}
    crowded = {str(folder): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in crowded.items() if count > MAX_IN_FOLDER} == {}


def test_modules_found_by_a_made_up_name_are_of_registries_alone() -> None:
    """What the floors cannot see: verbs by their file, libraries by the recipe's words.

    A family names its modules in strings, which are counted as imports.
    """
    makers = set()
    for path in (ROOT / "dit_lora").rglob("*.py"):
        for node in nodes_of(path):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.endswith("import_module") and not isinstance(node.args[0], ast.Constant):
                makers.add(module_name(path))
    assert makers == {
        "dit_lora",
        "dit_lora.cli.app",
        "dit_lora.families",
        "dit_lora.families.family",
        "dit_lora.guard",
        "dit_lora.training.optim.build",
        "dit_lora.training.trackers.trackers",
    }


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in (ROOT / "dit_lora").rglob("*.py"):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module_name(path))
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_training_knows_no_family() -> None:
    for path in (ROOT / "dit_lora" / "training").rglob("*.py"):
        targets = imports_of(path)
        family_targets = [t for t in targets for f in FAMILIES.values() if f"{t}.".startswith(f"{f}.")]
        assert not family_targets, path


def test_the_library_imports_no_benchmark() -> None:
    """The wheel does not contain benchmarks/."""
    for path in library_files():
        targets = imports_of(path)
        assert not [t for t in targets if t.split(".")[0] == "benchmarks"], path


def test_only_fuse_imports_our_kernels_and_they_import_nothing_of_ours() -> None:
    for path in library_files():
        targets = imports_of(path)
        in_kernels = module_name(path).startswith("dit_lora_kernels")
        if in_kernels:
            assert not [t for t in targets if t.split(".")[0] == "dit_lora"], path
        elif not module_name(path).startswith(("dit_lora.fuse", "dit_lora.commands.doctor")):
            assert not [t for t in targets if t.startswith("dit_lora_kernels")], path


def test_whatever_a_checkpoint_holds_is_loaded_where_none_of_its_code_can_run() -> None:
    """`from_pretrained` and Auto classes ask on standard input unless they are told; PEFT's read no code."""
    problems = []
    for path in [*library_files(), *(ROOT / "recipes").rglob("*.py")]:
        if module_name(path) == "dit_lora.environment.pretrained":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config"):
                owner = ast.unparse(node.value)
                loads = node.attr == "from_pretrained" and owner.rpartition(".")[2] not in _NO_CODE
                if loads or owner.startswith("Auto"):
                    problems.append(f"{module_name(path)}:{node.lineno}: {owner}.{node.attr}")
            elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                problems.append(f"{module_name(path)}:{node.value.lineno}: trust_remote_code")
    assert not problems


def test_only_functions_that_triton_compiles_have_arguments_without_types() -> None:
    """mypy does not ask in files with such functions, because it cannot tell them from the others."""
    files = list((ROOT / "kernels" / "dit_lora_kernels").glob("*.py"))
    assert len(files) > 5
    untyped = []
    for path in files:
        for node in nodes_of(path):
            if not isinstance(node, ast.FunctionDef) or "triton.jit" in map(ast.unparse, node.decorator_list):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped_arguments = [a for a in arguments if a.arg not in ("self", "ctx") and not a.annotation]
            if untyped_arguments or node.returns is None:
                untyped.append(f"{path.name}::{node.name}")
    assert not untyped


def test_kernels_is_a_source_root_and_no_package() -> None:
    """`kernels` is Hugging Face's import name; a package of ours would break theirs."""
    assert (ROOT / "kernels" / "dit_lora_kernels" / "__init__.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "recipes").rglob("__init__.py"))


def test_files_are_short() -> None:
    long = {}
    for path in python_files():
        lines = len(path.read_text().splitlines())
        limit = MAX_KERNEL_FILE if path.is_relative_to(ROOT / "kernels") else MAX_FILE
        if lines > limit:
            long[str(path.relative_to(ROOT))] = lines
    assert not long


def test_functions_are_short_and_shallow() -> None:
    problems = []
    for path in python_files():
        for node in walk_statements(tree_of(path)):
            if not isinstance(node, _FUNCTIONS):
                continue
            assert node.end_lineno is not None
            lines, depth = node.end_lineno - node.lineno + 1, nesting(node)
            if lines > MAX_FUNCTION or depth > MAX_NESTING:
                problems.append(f"{path.relative_to(ROOT)}::{node.name}: {lines} lines, nesting {depth}")
    assert not problems


def walk_statements(tree: ast.AST) -> Iterator[ast.AST]:
    """`ast.walk` without expressions, which are most of a tree and hold neither functions nor blocks."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        pending += list_statements(node)


def list_statements(node: ast.AST) -> list[ast.AST]:
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]


def nesting(node: ast.AST) -> int:
    """Depth of blocks inside a function; an `elif` is no deeper than its `if`."""
    deepest = 0
    for child in list_statements(node):
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        deepest = max(deepest, nesting(child) + (isinstance(child, _BLOCKS) and not is_elif))
    return deepest


# Whatever the guard tries beside somebody else's loop may fail, and must not end it. Transformers, Diffusers and
# tokenizers (which raises plain `Exception`) raise anything for a damaged checkpoint, and that is one line. Validation
# and trackers run other people's code, and end no run; where one rank fails, the others must be told.
_MAY_CATCH_ALL = (
    "dit_lora.guard.attach.containment",
    "dit_lora.environment.pretrained",
    "dit_lora.training.session.optional_work",
    "dit_lora.training.session.session",
    "dit_lora.training.trackers.trackers",
)


def test_no_broad_except_and_every_docstring_is_there() -> None:
    problems = []
    for path in library_files():
        if not ast.get_docstring(tree_of(path)):
            problems.append(f"{path.name}: no module docstring")
        if module_name(path) in _MAY_CATCH_ALL:
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            ):
                problems.append(f"{path.name}:{node.lineno}: broad except")
    assert not problems


def recipe_files() -> list[Path]:
    return sorted((ROOT / "recipes").rglob("*.yaml"))


def test_every_recipe_is_found() -> None:
    """Counted, so that a glob that finds too little fails."""
    assert len(recipe_files()) >= 8
    smokes = (ROOT / "recipes" / "smoke").glob("*.yaml")
    assert {load_recipe(path).model.family for path in smokes} == set(FAMILIES)


@pytest.mark.parametrize("path", recipe_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_recipe_loads_opens_with_its_launch_command_and_explains_its_values(
    path: Path,
) -> None:
    recipe = load_recipe(path)
    assert recipe.model.family in FAMILIES
    text = path.read_text()
    header = text[: text.index("model:")]
    relative = path.relative_to(ROOT)
    assert f"recipes/lora.py {relative}" in header
    assert "Task:" in header
    assert "Memory:" in header
    assert "Time:" in header


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_accelerate_config_is_read_by_accelerate(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]
    assert config.mixed_precision == "no"  # the recipe decides
    assert path.name in (ROOT / "accelerate_configs" / "README.md").read_text()


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_schema_beside_the_recipes_is_the_current_one() -> None:
    assert json.loads((ROOT / "recipes" / "schema.json").read_text()) == build_recipe_schema()
    for path in recipe_files():
        assert path.read_text().startswith("# yaml-language-server: $schema=../schema.json\n")


def test_the_readmes_own_loop_runs(tiny_checkpoints: dict[str, Path]) -> None:
    """The snippet on parameter groups, as it is printed, on a tiny pipeline."""
    import peft
    import torch
    from diffusers import CogVideoXPipeline

    import dit_lora

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (snippet,) = [block for block in blocks if "parameter_groups" in block]
    pipe = CogVideoXPipeline.from_pretrained(tiny_checkpoints["cogvideox-2b"])
    scope = {"pipe": pipe, "peft": peft, "torch": torch, "dit_lora": dit_lora}
    exec(textwrap.dedent(snippet), scope)
    assert [group["lr"] for group in scope["optimizer"].param_groups] == [1e-4, 1e-6]
