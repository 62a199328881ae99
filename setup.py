"""One build step: recipes/ and accelerate_configs/ are at the root, and go into the wheel as dit_lora/stock_files/.

Everything else is in pyproject.toml.
"""

from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build

FOLDERS = ("recipes", "accelerate_configs")


class BuildStockFiles(Command):
    """Copy what `dit-lora init` writes; an editable install reads it where it lies (dit_lora/config/catalog.py)."""

    build_lib: str | None = None
    editable_mode = False

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        if self.editable_mode:
            return
        for target, source in self.get_output_mapping().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target)

    def get_source_files(self) -> list[str]:
        found = [path for folder in FOLDERS for path in Path(folder).rglob("*")]
        return sorted(str(path) for path in found if path.is_file() and path.suffix != ".pyc")

    def get_output_mapping(self) -> dict[str, str]:
        stock = Path(str(self.build_lib), "dit_lora", "stock_files")
        return {str(stock / source): source for source in self.get_source_files()}

    def get_outputs(self) -> list[str]:
        return list(self.get_output_mapping())


build.sub_commands.append(("build_stock_files", None))

setup(cmdclass={"build_stock_files": BuildStockFiles})
