"""The page that compares two to four runs: figures, curves, recipes, and samples at the same prompt and step."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dit_lora.report.run.compare import (
    find_step_folders,
    list_curves,
    list_differences,
    list_figures,
    list_prompts,
    overlay_curves,
)
from dit_lora.report.run.files import RunReader
from dit_lora.report.run.words import STATE_TEXTS
from dit_lora.studio.library import RunLibrary
from dit_lora.studio.pages import studio_page

_MIN_RUNS, _MAX_RUNS = 2, 4


class ComparePage:
    """The route of the comparison."""

    def __init__(self, library: RunLibrary) -> None:
        self._library = library

    def list_routes(self) -> list[BaseRoute]:
        return [Route("/compare", self.show)]

    def show(self, request: Request) -> Response:
        run_ids = list(dict.fromkeys(request.query_params.getlist("run")))
        if not _MIN_RUNS <= len(run_ids) <= _MAX_RUNS:
            message = f"choose {_MIN_RUNS} to {_MAX_RUNS} runs, not {len(run_ids)}; go back to the list of runs"
            raise HTTPException(400, message)
        folders = [self._library.get_folder(run_id) for run_id in run_ids]
        runs = [RunReader(folder).read() for folder in folders]
        step_samples = [find_step_folders(folder) for folder in folders]
        # Steps that every run has can be compared; without such, those of any run.
        steps = sorted(set.intersection(*map(set, step_samples)) or set().union(*step_samples))
        charts = [overlay_curves(title, curves) for title, curves in list_curves(runs)]
        chosen = request.query_params.get("step", "")
        step = next((step for step in steps if str(step) == chosen), steps[-1] if steps else None)
        return studio_page(
            request,
            "studio_compare.html",
            run_ids=run_ids,
            names=[self._library.get_name(folder) for folder in folders],
            states=[STATE_TEXTS[run.state] for run in runs],
            figures=list_figures(runs),
            charts=[chart for chart in charts if any(chart.lines)],
            differences=list_differences(runs),
            steps=steps,
            step=step,
            prompts=[] if step is None else list_prompts(runs, step),
        )
