"""The list of runs, with what each is doing."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dit_lora.report.run.overview import get_last_write_time, read_overview
from dit_lora.studio.library import RunLibrary
from dit_lora.studio.pages import parse_page_number, studio_page

ROWS_PER_PAGE = 200


class RunListPage:
    """The route of the list of runs."""

    def __init__(self, library: RunLibrary) -> None:
        self._library = library

    def list_routes(self) -> list[BaseRoute]:
        return [Route("/", self.show)]

    def show(self, request: Request) -> Response:
        number = parse_page_number(request)
        folders = self._library.list_runs()
        # The newest first.
        run_ids = sorted(folders, key=lambda run_id: get_last_write_time(folders[run_id]), reverse=True)
        num_pages = max(1, -(-len(run_ids) // ROWS_PER_PAGE))
        number = min(max(1, number), num_pages)
        page_run_ids = run_ids[(number - 1) * ROWS_PER_PAGE : number * ROWS_PER_PAGE]
        page_runs = [(run_id, folders[run_id]) for run_id in page_run_ids]
        return studio_page(
            request,
            "studio_runs.html",
            rows=[read_overview(run_id, folder, self._library.get_name(folder)) for run_id, folder in page_runs],
            total=len(run_ids),
            number=number,
            num_pages=num_pages,
            roots=[str(root) for root in self._library.roots],
        )
