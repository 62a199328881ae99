"""The pages of data sets: a contact sheet with findings and filters, and captions that are edited on it."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from dit_lora.data.audit.stored_audit import AUDIT_FILE, LENGTHS, SHAPES, SampleFilter
from dit_lora.data.sources.caption_changes import CaptionChange
from dit_lora.data.sources.caption_table import TABLE_NAME, make_work_folder
from dit_lora.data.sources.made_captions import count_generated
from dit_lora.errors import DitLoraError
from dit_lora.files import open_file_inside_folder
from dit_lora.report.captions.edits import CaptionEdits, StaleCaptionError
from dit_lora.report.captions.extra_files import RelatedFile, find_extra_files
from dit_lora.report.captions.page import decode_address
from dit_lora.report.captions.rules import CaptionRules, load_text_rules
from dit_lora.report.captions.sheet import ContactSheet
from dit_lora.report.captions.thumbnails import get_thumbnail
from dit_lora.studio.access import json_response, write_route
from dit_lora.studio.jobs import JobQueue
from dit_lora.studio.library import RunLibrary
from dit_lora.studio.pages import (
    OpenedFileResponse,
    format_path,
    parse_page_number,
    parse_whole_number,
    render_studio_page,
)

_MAX_EDITS = 8  # folders, each with its recipe and trigger word, whose tables are held in memory
_MAX_TEXT_LENGTH = 10_000
_MAX_SHOWN_CHANGES = 50
_QUERY_NAMES = (*SampleFilter.list_names(), "recipe", "word")
"""Values of an address that stay while a user goes through the pages."""
# By the extension; files of other types are not served.
_CONTENT_TYPES = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "image/jpeg"),
    **{f".{name}": f"image/{name}" for name in ("png", "webp", "gif", "bmp", "apng", "avif")},
    ".avifs": "image/avif",
    # Browsers play QuickTime and Matroska files as these, but refuse their own types.
    **dict.fromkeys((".mp4", ".m4v", ".mov"), "video/mp4"),
    **dict.fromkeys((".webm", ".mkv"), "video/webm"),
}


class _AnyPathConvertor(PathConvertor):
    """Starlette's `path` without its exception: file names may contain line ends."""

    regex = "(?s:.*)"


register_url_convertor("any_path", _AnyPathConvertor())


class DataPages:
    """The routes of the data sets below the studio's folders."""

    def __init__(self, library: RunLibrary, queue: JobQueue, rules: CaptionRules | None = None) -> None:
        self._library, self._queue = library, queue
        self._default_rules = rules or CaptionRules()
        self._edits: dict[tuple[str, ...], CaptionEdits] = {}
        self._loader = ThreadPoolExecutor(1, "text-rules")
        self._rules: dict[str, Future[CaptionRules]] = {}
        """The rules of recipes by the id of their run. They load in a thread, because tokenizers take seconds."""

    def list_routes(self) -> list[BaseRoute]:
        path = "/data/{data_id}/"
        return [
            Route("/data", self.list_folders),
            Route(path, self.show_sheet),
            Route(f"{path}change", self.show_change),
            Route(f"{path}media/{{name:any_path}}", self.send_media),
            Route(f"{path}thumbnail/{{name:any_path}}", self.send_thumbnail),
            write_route(f"{path}caption", self.save_caption),
            write_route(f"{path}change", self.change_captions),
            write_route(f"{path}undo", self.undo),
            write_route(f"{path}audit", self.start_audit),
            write_route(f"{path}describe", self.start_captioning),
        ]

    def list_folders(self, request: Request) -> Response:
        folders = {
            data_id: self._library.get_name(folder) for data_id, folder in self._library.list_data_folders().items()
        }
        return render_studio_page(request, "studio_data.html", folders=folders, roots=self._library.roots)

    def show_sheet(self, request: Request) -> Response:
        page = f"/data/{request.path_params['data_id']}/"
        # Before what they write: the page asks again if a command had not ended here.
        jobs = [job for job in self._queue.list_jobs() if job.page == page]
        query = _read_query(request.query_params)
        edits, note = self._get_edits(request, query)
        sheet = edits.build_sheet(SampleFilter.from_values(query), parse_page_number(request))
        extra_files, hidden_folders = self._find_extra_files(query, edits.root, sheet)
        return render_studio_page(
            request,
            "studio_sheet.html",
            sheet=sheet,
            name=self._library.get_name(edits.root),
            page=page,
            query={key: query.get(key, "") for key in _QUERY_NAMES},
            suffix=urlencode(query),
            note=note,
            extra_files=extra_files,
            hidden_folders=hidden_folders,
            codes=[("any", "any"), *((code, f"{code} ({count:,})") for code, count in sheet.codes)],
            shapes=[(shape, shape) for shape in SHAPES],
            lengths=[(length, length) for length in LENGTHS],
            has_limit=self._default_rules.max_tokens is not None,
            # Captions of a command that is under way.
            num_generated=count_generated(edits.root),
            jobs=jobs,
            is_working=any(job.is_active for job in jobs),
            runs={run_id: self._library.get_name(folder) for run_id, folder in self._library.list_runs().items()},
        )

    def show_change(
        self, request: Request, values: Mapping[str, Any] | None = None, *, is_stale: bool = False
    ) -> Response:
        """A page with each caption that would change. `values` are those of a form."""
        values = request.query_params if values is None else values
        query, change = _read_query(values), _read_change(values)
        edits, _ = self._get_edits(request, query)
        preview = edits.preview(change, SampleFilter.from_values(query))
        return render_studio_page(
            request,
            "studio_change.html",
            409 if is_stale else 200,
            is_stale=is_stale,
            name=self._library.get_name(edits.root),
            query=query,
            change=asdict(change),
            total=len(preview.captions),
            version=preview.version,
            shown=list(preview.captions.items())[:_MAX_SHOWN_CHANGES],
        )

    def change_captions(self, request: Request, values: Mapping[str, Any]) -> Response:
        query, change = _read_query(values), _read_change(values)
        edits, _ = self._get_edits(request, query)
        version = str(values.get("version"))
        if edits.apply(change, SampleFilter.from_values(query), version).version != version:
            return self.show_change(request, values, is_stale=True)
        return RedirectResponse(f"./?{urlencode(query)}" if query else "./", 303)

    def undo(self, request: Request, values: Mapping[str, Any]) -> Response:
        query = _read_query(values)
        self._get_edits(request, query)[0].undo(str(values.get("step")))
        return RedirectResponse(f"./?{urlencode(query)}" if query else "./", 303)

    def start_audit(self, request: Request, values: Mapping[str, Any]) -> Response:
        folder = self._library.get_data_folder(request.path_params["data_id"])
        make_work_folder(folder)
        path = format_path(folder)
        return self._start(request, ["audit", path, f"--json={path}/{AUDIT_FILE}"], needs_gpu=False)

    def start_captioning(self, request: Request, values: Mapping[str, Any]) -> Response:
        folder = self._library.get_data_folder(request.path_params["data_id"])
        texts = {name: str(values.get(name, "")).strip() for name in ("model", "prompt", "trigger")}
        if not texts["model"] or any(len(text) > _MAX_TEXT_LENGTH or "\0" in text for text in texts.values()):
            raise DitLoraError("give the model that describes the files: a folder, a run, or a name on the Hub")
        # In one word each, so that a text that starts with a dash is no option.
        arguments = ["caption", format_path(folder), *(f"--{name}={text}" for name, text in texts.items() if text)]
        arguments.append(f"--max-tokens={parse_whole_number(values, 'max_tokens', 1, 10_000)}")
        return self._start(request, arguments, needs_gpu=True)

    def save_caption(self, request: Request, values: Mapping[str, Any]) -> Response:
        # The body comes from the network, so every type is checked.
        name, caption, version = (values.get(key) for key in ("file", "caption", "version"))
        if not (isinstance(name, str) and isinstance(caption, str) and isinstance(version, str)):
            raise HTTPException(400, "an edit needs a file, a caption, and the version of the edited caption")
        edits, _ = self._get_edits(request, _read_query(request.query_params))
        try:
            return json_response(asdict(edits.save_caption(decode_address(name), caption, version)))
        except StaleCaptionError as error:
            # The page then shows the current caption; the rejected text stays in its text area.
            return json_response(asdict(error.state), 409)

    def send_media(self, request: Request) -> Response:
        file = self._find_media(request, "media/")
        content_type = _CONTENT_TYPES.get(file.suffix.lower())
        if content_type is None:
            raise HTTPException(404, "browsers do not show files of this type")
        root = self._library.get_data_folder(request.path_params["data_id"]).resolve()
        return OpenedFileResponse(open_file_inside_folder(root, file), content_type)

    def send_thumbnail(self, request: Request) -> Response:
        file = self._find_media(request, "thumbnail/")
        thumbnail = get_thumbnail(self._library.get_data_folder(request.path_params["data_id"]), file)
        if thumbnail is None:
            raise HTTPException(503, "other thumbnails are being made; load it again", {"Retry-After": "1"})
        if not thumbnail:
            raise HTTPException(404, "this file cannot be decoded")
        return Response(thumbnail, media_type="image/jpeg")

    def _find_media(self, request: Request, prefix: str) -> Path:
        """The media file that an address names. Links inside the folder are followed, and others refused."""
        data_id = request.path_params["data_id"]
        # The raw path also represents names that are not UTF-8.
        address = request.scope["raw_path"].decode("ascii").removeprefix(f"/data/{quote(data_id)}/{prefix}")
        edits, _ = self._get_edits(request, {})
        file, root = edits.find_media(decode_address(address)), edits.root.resolve()
        if file is None:
            raise HTTPException(404, "this file is not in the folder")
        # A named pipe or a device cannot be opened this way either.
        try:
            target = file.resolve()
            open_file_inside_folder(root, target).close()
        except (OSError, ValueError) as error:
            raise HTTPException(404, "this file does not exist, or is a link to another folder") from error
        return target

    def _find_extra_files(
        self, query: Mapping[str, str], root: Path, sheet: ContactSheet
    ) -> tuple[dict[str, list[RelatedFile]], list[str]]:
        """Find the masks and references of the files on a page, if a recipe is chosen that names their folders.

        Returns them by the name of their sample, and the folders that cannot be shown.
        """
        if not query.get("recipe"):
            return {}, []
        pages = {
            folder.resolve(): f"/data/{data_id}/" for data_id, folder in self._library.list_data_folders().items()
        }
        names = [card.name for card in sheet.cards]
        # Without masks where the recipe cannot be read, as the page's note says.
        with suppress(DitLoraError):
            return find_extra_files(self._library.get_run_folder(query["recipe"]) / "config.yaml", root, names, pages)
        return {}, []

    def _get_edits(self, request: Request, query: Mapping[str, str]) -> tuple[CaptionEdits, str]:
        """The captions of a folder with the rules that an address asks for, and a note about these rules."""
        folder = self._library.get_data_folder(request.path_params["data_id"])
        # A write to a linked table changes the target of the link.
        table = (folder / TABLE_NAME).resolve()
        if not any(table.is_relative_to(root.resolve()) for root in self._library.roots):
            raise DitLoraError(f"{folder / TABLE_NAME} is a link to a file outside of the studio's folders")
        recipe, word = query.get("recipe", ""), query.get("word", "")
        rules, note = self._default_rules, ""
        if recipe:
            config = self._library.get_run_folder(recipe) / "config.yaml"
            # Once for each run: a tokenizer does not change while the studio runs.
            if recipe not in self._rules:
                self._rules[recipe] = self._loader.submit(load_text_rules, config, None)
            future, rules = self._rules[recipe], CaptionRules()
            if not future.done():
                note = "The tokenizer is being loaded; words are counted until then. Load the page again."
            elif (error := future.exception()) is not None:
                note = f"Its text encoder gives no limit: {error}"
            else:
                rules = future.result()
        key = (str(folder), recipe if rules.tokenizer else "", word)
        # Large tables take seconds to read, so the latest ones are kept.
        edits = self._edits.pop(key, None)
        if edits is None:
            edits = CaptionEdits(folder, CaptionRules(rules.tokenizer, rules.max_tokens, word or rules.trigger))
        # The latest is the last.
        self._edits[key] = edits
        for old_key in list(self._edits)[:-_MAX_EDITS]:
            self._edits.pop(old_key, None)
        return edits, note

    def _start(self, request: Request, arguments: list[str], *, needs_gpu: bool) -> Response:
        page = f"/data/{request.path_params['data_id']}/"
        self._queue.add(arguments, page, needs_gpu=needs_gpu)
        return RedirectResponse(page, 303)


def _read_query(values: Mapping[str, Any]) -> dict[str, str]:
    """The filter, recipe and trigger word of an address or a form; empty ones are left out."""
    query = {name: str(values[name]) for name in _QUERY_NAMES if values.get(name)}
    if any(len(text) > _MAX_TEXT_LENGTH for text in query.values()):
        raise HTTPException(400, f"a text can have at most {_MAX_TEXT_LENGTH:,} characters")
    return query


def _read_change(values: Mapping[str, Any]) -> CaptionChange:
    find, replacement, trigger = (str(values.get(name, "")) for name in ("find", "replacement", "trigger"))
    if not (find or trigger):
        raise HTTPException(400, "give a text to find, or a trigger word")
    return CaptionChange(find, replacement, trigger.strip())
