"""The page of the commands that the studio has started."""

import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from dit_lora.environment.command_job import CommandJob
from dit_lora.files import can_open_inside_folder
from dit_lora.studio.access import write_route
from dit_lora.studio.jobs import JobQueue
from dit_lora.studio.pages import render_studio_page

JOBS_PAGE = "/jobs"
RESULT_PATTERN = re.compile(r"studio/[\d_-]+/[\w.,=-]{1,200}\.(mp4|png)")
"""Paths, below a run's folder, of samples that were made from its page."""


class JobPages:
    """The routes of the commands."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    def list_routes(self) -> list[BaseRoute]:
        return [Route(JOBS_PAGE, self.show), write_route(f"{JOBS_PAGE}/stop", self.stop)]

    def show(self, request: Request) -> Response:
        jobs = [(job, list_written_samples(job)) for job in self._queue.list_jobs()]
        return render_studio_page(request, "studio_jobs.html", jobs=jobs)

    def stop(self, request: Request, values: Mapping[str, Any]) -> Response:
        self._queue.stop(str(values.get("job")))
        # Only an address of a data set's page, so that no form leads to another site.
        back = str(values.get("back"))
        return RedirectResponse(back if re.fullmatch(r"/data/[0-9a-f]{16}/", back) else JOBS_PAGE, 303)


def list_written_samples(job: CommandJob) -> list[str]:
    """Paths of the samples that a command has written, below the folder of its run."""
    if job.results is None:
        return []
    # `glob` yields nothing while the folder does not exist.
    folder, paths = job.results.parents[1], sorted(job.results.glob("*.*"))
    names = [path.relative_to(folder).as_posix() for path in paths if can_open_inside_folder(folder, path)]
    return [name for name in names if RESULT_PATTERN.fullmatch(name)]
