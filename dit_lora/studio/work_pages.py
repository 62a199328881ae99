"""The page that works with a run: sample its saves again, export them, check the result, and continue it."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from dit_lora.adapters.marked_save import mark_step_as_best, read_best_marked_step
from dit_lora.adapters.strengths import parse_comma_separated_numbers
from dit_lora.config.experts import EXPERT_NAMES
from dit_lora.config.lora import PEFT_ONLY_KINDS
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES
from dit_lora.report.run.files import RunFiles, RunReader
from dit_lora.report.run.history import ensure_dict
from dit_lora.report.run.page import choose_export_format, get_sample_prompts
from dit_lora.report.run.samples import find_checkpoint_steps
from dit_lora.report.run.saves import SavedAdapter, list_saved_adapters
from dit_lora.report.run.words import STATE_TEXTS
from dit_lora.studio.access import write_route
from dit_lora.studio.job_pages import JOBS_PAGE
from dit_lora.studio.jobs import JobQueue
from dit_lora.studio.library import RunLibrary
from dit_lora.studio.pages import format_path, parse_whole_number, render_studio_page

_MAX_PROMPT_LENGTH = 10_000
_MAX_STRENGTHS = 16


class WorkPages:
    """The routes of the page that works with a run."""

    def __init__(self, library: RunLibrary, queue: JobQueue) -> None:
        self._library, self._queue = library, queue

    def list_routes(self) -> list[BaseRoute]:
        path = "/runs/{run_id}/work"
        return [
            Route(path, self.show),
            write_route(f"{path}/sample", self.sample),
            write_route(f"{path}/export", self.export),
            write_route(f"{path}/continue", self.continue_training),
            write_route(f"{path}/mark", self.mark_best),
        ]

    def show(self, request: Request) -> Response:
        run_id = request.path_params["run_id"]
        folder = self._library.get_run_folder(run_id)
        run = RunReader(folder).read()
        saves = list_saved_adapters(run)
        validation = ensure_dict(run.config.get("validation"))
        prompts = get_sample_prompts(validation)
        return render_studio_page(
            request,
            "studio_work.html",
            run_id=run_id,
            name=self._library.get_name(folder),
            state=STATE_TEXTS[run.state],
            saves=saves,
            choices=[_build_save_choice(folder, save) for save in reversed(saves)],
            prompt=prompts[0] if prompts else "",
            inference_steps=validation.get("inference_steps", 50),
            can_sample=_can_sample(run),
            marked=read_best_marked_step(folder),
            formats=_list_formats(run),
            can_continue=run.state not in ("running", "finished") and bool(find_checkpoint_steps(folder)),
            version=_get_run_version(run),
        )

    def sample(self, request: Request, values: Mapping[str, Any]) -> Response:
        run_id = request.path_params["run_id"]
        folder = self._library.get_run_folder(run_id)
        prompt = str(values.get("prompt", "")).strip()
        if not prompt or len(prompt) > _MAX_PROMPT_LENGTH or "\0" in prompt:
            raise DitLoraError(f"the prompt must have 1 to {_MAX_PROMPT_LENGTH:,} characters")
        # The command checks all of this again; here a mistake is shown in the form's answer.
        seed = parse_whole_number(values, "seed", 0, 2**63 - 1)
        num_steps = parse_whole_number(values, "inference_steps", 1, 1000)
        strengths = parse_comma_separated_numbers(str(values.get("strengths", "")), max_numbers=_MAX_STRENGTHS)
        results = folder / "studio" / time.strftime("%Y%m%d-%H%M%S")
        arguments = [
            # Absolute or relative, as the studio was given its folder.
            "sample",
            format_path(_find_chosen_save(folder, values)),
            # In one word, so that a prompt that starts with a dash is no option.
            f"--prompt={prompt}",
            f"--strengths={','.join(f'{strength:g}' for strength in strengths)}",
            f"--seed={seed}",
            f"--inference-steps={num_steps}",
            f"--out={format_path(results)}",
        ]
        if (folder / "studio").is_symlink():
            raise DitLoraError(f"{folder / 'studio'} is a link; remove it")
        self._queue.add(arguments, f"/runs/{run_id}/", needs_gpu=True, results=results)
        return RedirectResponse(JOBS_PAGE, 303)

    def export(self, request: Request, values: Mapping[str, Any]) -> Response:
        run_id = request.path_params["run_id"]
        folder = self._library.get_run_folder(run_id)
        form = values.get("form")
        if form not in _list_formats(RunReader(folder).read()):
            raise DitLoraError("this run cannot be exported in this format; choose another")
        save = _find_chosen_save(folder, values)
        # The command refuses an existing folder too, but only after its imports.
        output = folder / "exports" / f"{save.name}_{form}"
        if output.exists() or any(path.is_symlink() for path in (output, output.parent)):
            raise DitLoraError(f"{output} exists already, or is a link; remove it to export again")
        arguments = ["export", format_path(save), "--to", str(form), "--out", format_path(output)]
        self._queue.add(arguments, f"/runs/{run_id}/", needs_gpu=False)
        return RedirectResponse(JOBS_PAGE, 303)

    def mark_best(self, request: Request, values: Mapping[str, Any]) -> Response:
        run_id = request.path_params["run_id"]
        folder = self._library.get_run_folder(run_id)
        # Two pages could mark different saves: the later one must have seen the earlier mark.
        marked = read_best_marked_step(folder)
        if values.get("marked") != str(marked):
            message = f"another save has been marked since the page was loaded: step {marked}"
            raise HTTPException(409, f"{message}; load the page again")
        is_removal = values.get("action") == "remove"
        # "step_000020" of the save that the page showed.
        mark_step_as_best(
            folder, None if is_removal else int(_find_chosen_save(folder, values).name.rpartition("_")[2])
        )
        return RedirectResponse(f"/runs/{run_id}/work", 303)

    def continue_training(self, request: Request, values: Mapping[str, Any]) -> Response:
        run_id = request.path_params["run_id"]
        folder = self._library.get_run_folder(run_id)
        version = _get_run_version(RunReader(folder).read())
        if values.get("version") != version:
            message = f"the run has changed: it was {values.get('version')}, and is {version}"
            raise HTTPException(409, f"{message}; load the page again")
        # The run's own recipe: any other key would change what is continued.
        arguments = ["train", format_path(folder / "config.yaml"), "train.resume=auto"]
        self._queue.add(arguments, f"/runs/{run_id}/", needs_gpu=True)
        return RedirectResponse(JOBS_PAGE, 303)


def _can_sample(run: RunFiles) -> bool:
    model = ensure_dict(run.config.get("model"))
    # Chat models answer questions, and a second expert samples together with the first.
    return model.get("family") not in CHAT_FAMILIES and model.get("part") not in EXPERT_NAMES


def _list_formats(run: RunFiles) -> list[str]:
    if choose_export_format(run.config) is None:
        return []
    is_peft_only = ensure_dict(run.config.get("lora")).get("kind") in PEFT_ONLY_KINDS
    return ["peft"] if is_peft_only else ["diffusers", "comfyui", "kohya", "peft"]


def _build_save_choice(folder: Path, save: SavedAdapter) -> tuple[str, str]:
    """Value and label of a save in a form: the value is its step, and the version that the page shows."""
    label = f"step {save.step:,}" + (f", eval loss {save.eval_loss:.4g}" if save.eval_loss is not None else "")
    label += ", marked as best" if save.is_marked else ""
    return f"{save.step}@{_get_save_version(_get_save_folder(folder, save.step))}", label


def _get_save_folder(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:06d}"


def _get_save_version(save: Path) -> str:
    """When a save was written: another one of the same step has another version."""
    try:
        written = save.lstat().st_mtime_ns
    except OSError:
        return "none"
    return f"{time.strftime('%Y-%m-%d_%H:%M:%S', time.gmtime(written // 10**9))}.{written % 10**9}"


def _find_chosen_save(folder: Path, values: Mapping[str, Any]) -> Path:
    """The folder of the save that was chosen. Raises if it is not the one that the page showed."""
    match = re.fullmatch(r"(\d{1,12})@(\S{1,60})", str(values.get("save", "")))
    if match is None:
        raise DitLoraError("choose a save")
    save = _get_save_folder(folder, int(match[1]))
    version = _get_save_version(save)
    if version != match[2] or save.is_symlink() or save.parent.is_symlink():
        message = f"step {match[1]} has changed: it was written {match[2]}, and now {version}"
        raise HTTPException(409, f"{message}; load the page again")
    return save


def _get_run_version(run: RunFiles) -> str:
    return f"{STATE_TEXTS[run.state][0]} at step {run.num_steps_taken}"
