"""The list of runs, and the page that compares some: figures, curves, recipes, samples at the same step."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dit_lora.report.run.compare import (
    choose_step,
    find_nearest_steps,
    find_step_folders,
    list_curves,
    list_differences,
    list_headline_figures,
    list_prompts,
    overlay_curves,
)
from dit_lora.report.run.files import RunReader
from dit_lora.report.run.overview import get_last_write_time, read_overview
from dit_lora.report.run.words import STATE_TEXTS
from dit_lora.studio.library import RunLibrary
from dit_lora.studio.pages import parse_page_number, render_studio_page

ROWS_PER_PAGE = 200
_MIN_RUNS, _MAX_RUNS = 2, 4  # to compare


class RunListPage:
    """The routes of the list of runs and of their comparison."""

    def __init__(self, library: RunLibrary) -> None:
        self._library = library

    def list_routes(self) -> list[BaseRoute]:
        return [Route("/", self.show), Route("/compare", self.compare)]

    def show(self, request: Request) -> Response:
        folders = self._library.list_runs()
        # The newest first.
        run_ids = sorted(folders, key=lambda run_id: get_last_write_time(folders[run_id]), reverse=True)
        num_pages = max(1, -(-len(run_ids) // ROWS_PER_PAGE))
        number = min(max(1, parse_page_number(request)), num_pages)
        page_runs = [(run_id, folders[run_id]) for run_id in run_ids[(number - 1) * ROWS_PER_PAGE :][:ROWS_PER_PAGE]]
        return render_studio_page(
            request,
            "studio_runs.html",
            rows=[read_overview(run_id, folder, self._library.get_name(folder)) for run_id, folder in page_runs],
            total=len(run_ids),
            number=number,
            num_pages=num_pages,
            roots=[str(root) for root in self._library.roots],
        )

    def compare(self, request: Request) -> Response:
        run_ids = list(dict.fromkeys(request.query_params.getlist("run")))
        if not _MIN_RUNS <= len(run_ids) <= _MAX_RUNS:
            message = f"choose {_MIN_RUNS} to {_MAX_RUNS} runs, not {len(run_ids)}; go back to the list of runs"
            raise HTTPException(400, message)
        folders = [self._library.get_run_folder(run_id) for run_id in run_ids]
        runs = [RunReader(folder).read() for folder in folders]
        step_samples = [find_step_folders(folder) for folder in folders]
        steps = sorted(set().union(*step_samples))
        charts = [overlay_curves(title, curves) for title, curves in list_curves(runs)]
        chosen = request.query_params.get("step", "")
        step = next((step for step in steps if str(step) == chosen), choose_step(step_samples))
        run_steps = [] if step is None else find_nearest_steps(step_samples, step)
        return render_studio_page(
            request,
            "studio_compare.html",
            run_ids=run_ids,
            names=[self._library.get_name(folder) for folder in folders],
            states=[STATE_TEXTS[run.state] for run in runs],
            figures=list_headline_figures(runs),
            charts=[chart for chart in charts if any(chart.lines)],
            differences=list_differences(runs),
            steps=steps,
            step=step,
            run_steps=run_steps,
            prompts=list_prompts(runs, run_steps) if run_steps else [],
        )
