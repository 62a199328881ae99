"""Measures how plainly each package is written, and keeps the figures as ceilings that no change may exceed.

    python -m tests.language            # today's figures of every package
    python -m tests.language --write    # make them the ceilings in tests/language_ceilings.json

`tests/test_language.py` compares the two.
"""

import argparse
import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILINGS = Path(__file__).with_name("language_ceilings.json")
FLOORS = ("comment_percent",)
"""Figures of which less is worse."""
MAX_COLUMNS = 119
MAX_HELPER_LINES = 10

# Words of the grammar: as the name of a variable or function they say nothing about what it holds or does.
GRAMMAR_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
    one own said found given made words kept wrong there here other others asked left out wanted held known told shown
    taken place places beside each every what who whole alone again why way how mark marks rest most least last
    first drawn judged beyond under without of put seen meant spoken let gone done alike same
    """,
    )
)
MANNERISMS = (
    *("of which", " beside ", " anew", "for good", "in words", "is no ", " alone", "of its own"),
    *("whatever", "what is ", "is said", "is told"),
)
# Ten times faster than the tokenize module. Strings are matched too, so that a # in one is not taken for a comment.
STRINGS_AND_COMMENTS = re.compile(
    r'''"""(?:[^"\\]|\\.|"(?!""))*"""|'{3}(?:[^'\\]|\\.|'(?!''))*'{3}'''
    r"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|#[^\n]*""",
    re.DOTALL,
)


@dataclass
class Measurement:
    """Counts of one package, with the places that each figure counts.

    `places` has, by figure and then by file, the lines that are counted, as (line number, text).
    """

    num_lines: int = 0
    num_names: int = 0
    num_functions: int = 0
    num_docstrings: int = 0
    num_comments: int = 0
    places: dict[str, dict[Path, list[tuple[int, str]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    comment_percent_by_file: dict[Path, float] = field(default_factory=dict)

    def add_file(self, path: Path) -> None:
        source = path.read_text(encoding="utf-8")
        self._add_lines(path, source)
        nodes = list(ast.walk(ast.parse(source)))
        uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        uses.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._add_name(path, node.lineno, node.id)
            elif isinstance(node, ast.arg):
                self._add_name(path, node.lineno, node.arg)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._add_function(path, node, uses[node.name])

    def figures(self) -> dict[str, float]:
        """Today's figures: shares rounded to a tenth, and counts."""
        return {
            "grammar_names_per_1000": self._share("grammar_names_per_1000", self.num_names, 1000),
            "grammar_functions_per_1000": self._share("grammar_functions_per_1000", self.num_functions, 1000),
            "named_one": self._count("named_one"),
            "docstrings_return_percent": self._share("docstrings_return_percent", self.num_docstrings),
            "docstrings_mannered_percent": self._share("docstrings_mannered_percent", self.num_docstrings),
            "comment_percent": round(100 * self.num_comments / (self.num_lines or 1), 1),
            "one_caller_helpers_percent": self._share("one_caller_helpers_percent", self.num_functions),
            "lines_over_119": self._count("lines_over_119"),
        }

    def worst_places(self, figure: str, number: int = 3) -> list[str]:
        """The files that count most in a figure, each with its first lines that do."""
        if figure == "comment_percent":
            shares = sorted(self.comment_percent_by_file.items(), key=lambda item: item[1])
            return [f"{_shown(path)}: {share:.1f} % comments" for path, share in shares[:number]]
        files = sorted(self.places[figure].items(), key=lambda item: -len(item[1]))
        return [
            f"{_shown(path)}: {len(lines)}, "
            + ", ".join(f"line {line} `{text}`" for line, text in sorted(lines)[:number])
            for path, lines in files[:number]
        ]

    def _add_lines(self, path: Path, source: str) -> None:
        num_lines = source.count("\n")
        num_comments = sum(text.startswith("#") for text in STRINGS_AND_COMMENTS.findall(source))
        self.num_lines += num_lines
        self.num_comments += num_comments
        if num_lines >= 50:
            self.comment_percent_by_file[path] = 100 * num_comments / num_lines
        for number, line in enumerate(source.splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                self.places["lines_over_119"][path].append((number, f"{line.strip()[:40]} ..."))

    def _add_name(self, path: Path, line: int, name: str) -> None:
        self.num_names += 1
        if name.strip("_") in GRAMMAR_WORDS:
            self.places["grammar_names_per_1000"][path].append((line, name))
        if name == "one":
            self.places["named_one"][path].append((line, name))

    def _add_function(self, path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef, num_uses: int) -> None:
        self.num_functions += 1
        location, name = (node.lineno, node.name), node.name
        if name.strip("_") in GRAMMAR_WORDS:
            self.places["grammar_functions_per_1000"][path].append(location)
        assert node.end_lineno is not None
        is_short = node.end_lineno - node.lineno + 1 <= MAX_HELPER_LINES
        is_private = name.startswith("_") and not name.startswith("__")
        if is_private and is_short and num_uses == 1:
            self.places["one_caller_helpers_percent"][path].append(location)
        docstring = ast.get_docstring(node)
        if not docstring:
            return
        self.num_docstrings += 1
        if docstring.startswith("Return"):
            self.places["docstrings_return_percent"][path].append(location)
        phrase = next((mannerism for mannerism in MANNERISMS if mannerism in f" {docstring.lower()}"), None)
        if phrase is not None:
            self.places["docstrings_mannered_percent"][path].append((node.lineno, f"{name}: {phrase.strip()}"))

    def _count(self, figure: str) -> int:
        return sum(map(len, self.places[figure].values()))

    def _share(self, figure: str, total: int, unit: int = 100) -> float:
        return round(unit * self._count(figure) / (total or 1), 1)


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def packages() -> dict[str, list[Path]]:
    """The Python files of each package; the modules at the top of the library are one."""
    library = ROOT / "dit_lora"
    folders = [path.parent for path in sorted(library.glob("*/__init__.py"))]
    folders += [ROOT / name for name in ("kernels", "tests", "benchmarks")]
    files = {"dit_lora/*.py": sorted(library.glob("*.py"))}
    return files | {_shown(folder): sorted(folder.rglob("*.py")) for folder in folders}


def measure(files: Sequence[Path]) -> Measurement:
    measurement = Measurement()
    for path in files:
        measurement.add_file(path)
    return measurement


def failures(package: str, measurement: Measurement, ceilings: dict[str, float]) -> Iterator[str]:
    """One message for each figure that is worse than its ceiling, with the three worst places."""
    for figure, value in measurement.figures().items():
        limit = ceilings[figure]
        is_floor = figure in FLOORS
        if value < limit if is_floor else value > limit:
            bound = "floor" if is_floor else "ceiling"
            locations = "\n  ".join(measurement.worst_places(figure))
            yield f"{package}: {figure} is {value:g}, worse than its {bound} of {limit:g}\n  {locations}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {CEILINGS.name}")
    figures = {name: measure(files).figures() for name, files in packages().items()}
    if parser.parse_args().write:
        CEILINGS.write_text(f"{json.dumps(figures, indent=2)}\n", encoding="utf-8")
        return
    for figure in next(iter(figures.values())):
        print(figure)
        for name, values in figures.items():
            print(f"  {name:24}{values[figure]:>8g}")


if __name__ == "__main__":
    main()
