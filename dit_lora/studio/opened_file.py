"""Send files that are open already, so that nothing can be put in their place meanwhile."""

import os
from typing import BinaryIO

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send


class OpenedFileResponse(FileResponse):
    """Sends an open file, or the requested range of it, and closes it."""

    def __init__(self, file: BinaryIO, media_type: str) -> None:
        self._file = file
        # The base class opens a path: this one is the open file, whatever has become of its name.
        path = f"/dev/fd/{file.fileno()}"
        super().__init__(path, stat_result=os.fstat(file.fileno()), media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)
