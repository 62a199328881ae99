"""The page that starts a run from a recipe or from an earlier run, with a form for the keys that matter most."""

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from dit_lora.config.catalog import find_packaged_files, list_recipe_names
from dit_lora.config.load import build_recipe_schema, load_recipe
from dit_lora.config.yaml_parsing import MAX_YAML_BYTES
from dit_lora.errors import DitLoraError
from dit_lora.files import read_inside
from dit_lora.studio.access import write_route
from dit_lora.studio.job_pages import JOBS_PAGE
from dit_lora.studio.jobs import JobQueue
from dit_lora.studio.library import RunLibrary, compute_run_id
from dit_lora.studio.pages import studio_page
from dit_lora.studio.work_pages import format_path

FORM_KEYS = (
    *("model.path", "data.path", "data.frames", "data.height", "data.width", "lora.rank", "lora.alpha"),
    *("optim.groups.adapter.lr", "train.steps", "train.batch_size", "train.save_every", "train.seed"),
    *("validation.every", "validation.prompts"),
)
"""Keys that have a field; any other can be given as `key.path=value`."""
_NEW_PAGE = "/new"
_NAME_PATTERN = re.compile(r"\w[\w.-]{0,99}")


@dataclass(frozen=True)
class FormField:
    """A recipe key in the form."""

    key: str
    text: str
    """Its value in the recipe; empty for null, and one line for each text of a list."""
    description: str
    is_list: bool
    is_number: bool


@dataclass(frozen=True)
class BaseRecipe:
    """The recipe that a run is started from."""

    path: Path
    content: str

    @property
    def version(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()[:24]


class NewRunPages:
    """The routes of the page that starts runs."""

    def __init__(self, library: RunLibrary, queue: JobQueue) -> None:
        self._library, self._queue = library, queue
        self._contents: dict[str, str] = {}
        """The recipes that pages were made from by version, to show what has changed since."""

    def list_routes(self) -> list[BaseRoute]:
        return [Route(_NEW_PAGE, self.show), write_route(_NEW_PAGE, self.start)]

    def show(self, request: Request) -> Response:
        source = request.query_params.get("from", "")
        values: dict[str, Any] = {"source": source, "roots": [str(root) for root in self._library.roots]}
        if source:
            base = self._read_base(source)
            self._contents[base.version] = base.content
            values |= {"fields": list_fields(base.path), "version": base.version, "recipe": str(base.path)}
        else:
            runs = {run_id: self._library.get_name(folder) for run_id, folder in self._library.list_runs().items()}
            values |= {"recipes": list_recipe_names(), "runs": runs}
        return studio_page(request, "studio_new.html", **values)

    def start(self, request: Request, values: Mapping[str, Any]) -> Response:
        base = self._read_base(str(values.get("from", "")))
        if values.get("version") != base.version:
            seen = self._contents.get(str(values.get("version")), "").splitlines()
            changes = difflib.unified_diff(seen, base.content.splitlines(), "as the page saw it", "now", lineterm="")
            message = "the recipe has changed since the page was loaded; load the page again"
            raise HTTPException(409, "\n".join([message, *changes]))
        run_dir = self._choose_run_dir(values)
        # The last override counts: the folder is not one of the other keys.
        overrides = [*list_overrides(list_fields(base.path), values), f"run.dir={json.dumps(format_path(run_dir))}"]
        # Wrong values are answered here and not by a command that fails.
        load_recipe(base.path, overrides)
        recipe = format_path(base.path)
        if values.get("action") == "plan":
            self._queue.add(["plan", recipe, *overrides], "", needs_gpu=False)
        else:
            self._queue.add(["train", recipe, *overrides], compute_run_id(run_dir), needs_gpu=True)
        return RedirectResponse(JOBS_PAGE, 303)

    def _read_base(self, source: str) -> BaseRecipe:
        """The shipped recipe, or the recipe of the run, that an address names."""
        if source in list_recipe_names():
            path = find_packaged_files() / "recipes" / f"{source}.yaml"
            return BaseRecipe(path, path.read_text(encoding="utf-8"))
        folder = self._library.get_folder(source)
        path = folder / "config.yaml"
        return BaseRecipe(path, read_inside(folder, path, MAX_YAML_BYTES).decode("utf-8", errors="replace"))

    def _choose_run_dir(self, values: Mapping[str, Any]) -> Path:
        """The new run's folder, directly below one of the studio's folders."""
        # A name and not a path, so that the run is found in the list.
        name = str(values.get("name", ""))
        if _NAME_PATTERN.fullmatch(name) is None:
            raise DitLoraError("the name must have 1 to 100 letters, digits, dots, dashes or underscores")
        roots = {str(root): root for root in self._library.roots}
        root = roots.get(str(values.get("root")))
        if root is None:
            raise DitLoraError("choose one of the studio's folders")
        if (root / name).exists() or (root / name).is_symlink():
            raise DitLoraError(
                f"{root / name} exists already; choose another name, or continue that run from its page"
            )
        return root / name


def list_fields(recipe: Path) -> list[FormField]:
    """The fields of the form, with the values of a recipe."""
    values = load_recipe(recipe).model_dump(mode="json")
    fields = []
    for key in FORM_KEYS:
        value: Any = values
        for name in key.split("."):
            # A section may be null, as `lora` is where every weight is trained.
            value = value.get(name) if isinstance(value, dict) else None
        entry = _find_schema_entry(key)
        types = {entry.get("type"), *(option.get("type") for option in entry.get("anyOf", []))}
        text = "\n".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
        is_number = bool(types & {"integer", "number"})
        fields.append(FormField(key, text, entry.get("description", ""), "array" in types, is_number))
    return fields


def list_overrides(fields: list[FormField], values: Mapping[str, Any]) -> list[str]:
    """The overrides `key.path=value` of a form: only fields that differ from the recipe, then the other lines."""
    overrides = []
    for field in fields:
        text = str(values.get(field.key, field.text)).replace("\r\n", "\n").strip()
        if text == field.text.strip():
            continue
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        # JSON is YAML that needs no further quotes.
        if field.is_list:
            value = json.dumps(lines, ensure_ascii=False)
        elif not text:
            value = "null"
        else:
            # YAML takes 1e-4 for a text, and 1.0e-4 for a number.
            is_number = field.is_number and re.fullmatch(r"[-+]?\d+e[-+]?\d+", text, re.IGNORECASE)
            number = text.lower().replace("e", ".0e", 1)
            value = number if is_number else text if field.is_number else json.dumps(text, ensure_ascii=False)
        overrides.append(f"{field.key}={value}")
    others = [line.strip() for line in str(values.get("overrides", "")).splitlines() if line.strip()]
    # A line without a key could be read as an option of the command.
    refused = next((line for line in others if re.match(r"[a-z_]+(\.\w+)+=", line) is None), None)
    if refused is not None:
        raise DitLoraError(f"an override must be key.path=value, such as train.steps=20; got {refused[:80]!r}")
    return [*overrides, *others]


@cache
def _find_schema_entry(key: str) -> dict[str, Any]:
    """The entry of a key in the recipe's JSON schema."""
    schema = build_recipe_schema()
    entry: dict[str, Any] = schema
    for name in key.split("."):
        entry = entry["properties"][name]
        # A section is a reference, or a choice between a reference and null.
        references = [option["$ref"] for option in (entry, *entry.get("anyOf", [])) if "$ref" in option]
        if references:
            entry = schema["$defs"][references[0].rpartition("/")[2]]
    return entry
