"""The page that starts a run from a recipe or from an earlier run, with a form for the keys that matter most."""

import difflib
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from dit_lora.config.catalog import PackagedRecipe, find_recipe, list_recipe_names
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe_form import list_form_fields, list_overrides
from dit_lora.environment.command_job import CommandJob
from dit_lora.errors import DitLoraError
from dit_lora.report.machine import build_memory_bar, list_machine_problems
from dit_lora.report.run.files import read_recipe_text
from dit_lora.studio.access import write_route
from dit_lora.studio.job_pages import JOBS_PAGE
from dit_lora.studio.jobs import JobQueue
from dit_lora.studio.library import RunLibrary, compute_run_id
from dit_lora.studio.pages import format_path, render_studio_page

_NEW_PAGE = "/new"
_NAME_PATTERN = re.compile(r"\w[\w.-]{0,99}")


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
        self._planned_values: dict[str, dict[str, str]] = {}
        """The values of forms whose memory was planned, by the job's id."""
        self._doctor: CommandJob | None = None

    def list_routes(self) -> list[BaseRoute]:
        return [
            Route(_NEW_PAGE, self.show),
            write_route(_NEW_PAGE, self.start),
            write_route(f"{_NEW_PAGE}/examples", self.make_example_data),
        ]

    def show(self, request: Request) -> Response:
        source = request.query_params.get("from", "")
        if not source:
            runs = {run_id: self._library.get_name(folder) for run_id, folder in self._library.list_runs().items()}
            return render_studio_page(request, "studio_new.html", source="", recipes=list_recipe_names(), runs=runs)
        base = self._read_base_recipe(source)
        self._contents[base.version] = base.content
        plan_id = request.query_params.get("plan", "")
        # What was typed before its memory was planned.
        typed = self._planned_values.get(plan_id, {})
        fields = [replace(field, text=typed.get(field.key, field.text)) for field in list_form_fields(base.path)]
        # Commands end while the page is made. It asks again if they had not ended here, before their results are read.
        plan = {job.job_id: job for job in self._queue.list_jobs()}.get(plan_id)
        example_jobs = self._list_example_jobs(source)
        # The machine is checked once.
        self._doctor = self._doctor or self._queue.add(["doctor", "--json"], "", needs_gpu=False)
        doctor = replace(self._doctor)
        return render_studio_page(
            request,
            "studio_new.html",
            source=source,
            roots=[str(root) for root in self._library.roots],
            fields=fields,
            version=base.version,
            recipe=str(base.path),
            typed={name: typed.get(name, "") for name in ("root", "name", "overrides", "gpu")},
            plan=plan,
            bar=build_memory_bar(answer) if plan and (answer := plan.read_json_output()) else None,
            doctor=doctor,
            problems=list_machine_problems(doctor.read_json_output() or {}),
            examples=[shlex.join(["dit-lora", *arguments]) for arguments in self._list_missing_examples(source)],
            # Finished commands have made their folders.
            example_jobs=[job for job in example_jobs if job.state != "done"],
            folder=Path.cwd(),
        )

    def make_example_data(self, request: Request, values: Mapping[str, Any]) -> Response:
        source = str(values.get("from", ""))
        page = _get_form_page(source)
        for arguments in self._list_missing_examples(source):
            self._queue.add(arguments, page, needs_gpu=False)
        return RedirectResponse(page, 303)

    def start(self, request: Request, values: Mapping[str, Any]) -> Response:
        source = str(values.get("from", ""))
        base = self._read_base_recipe(source)
        if values.get("version") != base.version:
            seen = self._contents.get(str(values.get("version")), "").splitlines()
            changes = difflib.unified_diff(seen, base.content.splitlines(), "as the page saw it", "now", lineterm="")
            message = "the recipe has changed since the page was loaded; load the page again"
            raise HTTPException(409, "\n".join([message, *changes]))
        overrides, recipe = list_overrides(list_form_fields(base.path), values), format_path(base.path)
        if values.get("action") == "plan":
            # Wrong values are answered here and not by a command that fails.
            load_recipe(base.path, overrides)
            # In one word, so that a text that starts with a dash is no option.
            gpu = [f"--gpu={values['gpu']}"] if values.get("gpu") else []
            job = self._queue.add(["plan", recipe, *overrides, *gpu, "--json"], "", needs_gpu=False)
            # The form is shown again with what was typed, next to the plan.
            self._planned_values[job.job_id] = {name: str(value) for name, value in values.items()}
            return RedirectResponse(f"{_NEW_PAGE}?{urlencode({'from': source, 'plan': job.job_id})}", 303)
        # A training would start with the clips that are there already.
        if any(job.is_active for job in self._list_example_jobs(source)):
            raise DitLoraError("the recipe's model and clips are still being made; start the run when they are there")
        run_dir = self._choose_run_dir(values)
        # The last override counts: the folder is not one of the other keys.
        overrides.append(f"run.dir={json.dumps(format_path(run_dir))}")
        load_recipe(base.path, overrides)
        self._queue.add(["train", recipe, *overrides], f"/runs/{compute_run_id(run_dir)}/", needs_gpu=True)
        return RedirectResponse(JOBS_PAGE, 303)

    def _list_missing_examples(self, source: str) -> list[list[str]]:
        """Arguments of the commands that make what a shipped recipe trains on, where it is not there yet."""
        if source not in list_recipe_names():
            return []
        started = [job.arguments for job in self._list_example_jobs(source) if job.is_active]
        commands = PackagedRecipe.from_name(source).example_commands
        return [
            arguments for folder, arguments in commands.items() if not (Path(folder).exists() or arguments in started)
        ]

    def _list_example_jobs(self, source: str) -> list[CommandJob]:
        return [job for job in self._queue.list_jobs() if job.page == _get_form_page(source)]

    def _read_base_recipe(self, source: str) -> BaseRecipe:
        """The shipped recipe, or the recipe of the run, that an address names."""
        if source in list_recipe_names():
            path = find_recipe(source)
            return BaseRecipe(path, path.read_text(encoding="utf-8"))
        folder = self._library.get_run_folder(source)
        return BaseRecipe(folder / "config.yaml", read_recipe_text(folder))

    def _choose_run_dir(self, values: Mapping[str, Any]) -> Path:
        """The new run's folder, directly below one of the studio's folders."""
        # A name and not a path, so that the run is found in the list.
        name = str(values.get("name", ""))
        if _NAME_PATTERN.fullmatch(name) is None:
            raise DitLoraError("the name must have 1 to 100 letters, digits, dots, dashes or underscores")
        root = next((root for root in self._library.roots if str(root) == values.get("root")), None)
        if root is None:
            raise DitLoraError("choose one of the studio's folders")
        if (root / name).exists() or (root / name).is_symlink():
            raise DitLoraError(
                f"{root / name} exists already; choose another name, or continue that run from its page"
            )
        return root / name


def _get_form_page(source: str) -> str:
    """URL of the page that starts a run from a recipe, or like another run."""
    return f"{_NEW_PAGE}?{urlencode({'from': source})}"
