"""A new run: the form of a recipe becomes overrides of what was changed, which are checked and shown."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from studio_client import ORIGIN, StudioClient

from dit_lora.config.catalog import find_packaged_files_root
from dit_lora.config.load import dump_recipe, load_recipe
from dit_lora.config.recipe_form import FORM_KEYS, list_form_fields, list_overrides
from dit_lora.environment.command_job import CommandJob
from dit_lora.errors import DitLoraError
from dit_lora.studio.app import build_app
from dit_lora.studio.jobs import JobQueue
from dit_lora.studio.library import RunLibrary, compute_run_id
from dit_lora.studio.new_run_pages import NewRunPages

RECIPE = find_packaged_files_root() / "recipes" / "smoke" / "cogvideox.yaml"


class RecordingQueue(JobQueue):
    """Keeps the commands and starts none; the answer of each is that of a test."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.commands: list[tuple[list[str], str, bool]] = []
        self.answers: dict[str, Any] = {"doctor": {"packages": {}, "known_bad": []}}
        self._log_folder = folder

    def add(self, arguments: Any, page: str, *, needs_gpu: bool, results: Path | None = None) -> CommandJob:
        job_id = str(len(self._jobs) + 1)
        log = self._log_folder / f"{job_id}.log"
        log.write_text(f"a library's note\n{json.dumps(self.answers.get(arguments[0], {}), indent=2)}\n")
        job = CommandJob(job_id, list(arguments), log, page, state="done")
        self._jobs[job_id] = self.newest = job
        if arguments[0] != "doctor":
            self.commands.append((list(arguments), page, needs_gpu))
        return job


@pytest.fixture
def queue(tmp_path: Path) -> RecordingQueue:
    return RecordingQueue(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a run, whose recipe is complete."""
    run = tmp_path / "runs" / "earlier"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_recipe(load_recipe(RECIPE)))
    return tmp_path / "runs"


@pytest.fixture
def client(root: Path, queue: RecordingQueue) -> StudioClient:
    return StudioClient(build_app(NewRunPages(RunLibrary([root]), queue).list_routes()))


def post(client: StudioClient, source: str, **fields: str) -> Response:
    version = client.get(f"/new?from={source}").text.split('name="version" value="')[1].split('"')[0]
    data = {"token": client.keys.page_token, "from": source, "version": version, "name": "next", **fields}
    return client.post("/new", data=data, headers={"Origin": ORIGIN})  # type: ignore[return-value]


def test_fields_have_the_values_and_descriptions_of_the_recipe() -> None:
    fields = {field.key: field for field in list_form_fields(RECIPE)}
    assert tuple(fields) == FORM_KEYS
    assert fields["train.steps"].text == "20"
    assert fields["train.steps"].description == "Optimizer steps."
    assert fields["validation.prompts"].is_list
    assert fields["lora.rank"].is_number
    assert not fields["model.path"].is_number


def test_only_what_was_changed_becomes_an_override() -> None:
    fields = list_form_fields(RECIPE)
    unchanged = {field.key: field.text.replace("\n", "\r\n") for field in fields}
    assert list_overrides(fields, unchanged) == []
    changed = unchanged | {
        "train.steps": "500",
        "optim.groups.adapter.lr": "1e-4",
        "data.path": "my: clips # 1",
        "lora.alpha": "",
        "validation.prompts": 'a "cat"\r\n\r\n- a dog',
        "overrides": "guard.max_skips=5\r\n",
    }
    overrides = list_overrides(fields, changed)
    assert overrides[-1] == "guard.max_skips=5"
    recipe = load_recipe(RECIPE, overrides)
    assert (recipe.train.steps, recipe.data.path, recipe.guard.max_skips) == (500, "my: clips # 1", 5)
    assert recipe.model_dump()["optim"]["groups"]["adapter"]["lr"] == 1e-4
    assert list(recipe.validation.prompts) == ['a "cat"', "- a dog"]
    for line in ("--help", "x", "a=1", "train.steps", "-c.d=1"):
        with pytest.raises(DitLoraError, match=r"key\.path=value"):
            list_overrides(fields, unchanged | {"overrides": line})


def test_a_recipe_or_a_run_is_planned_and_started(client: StudioClient, queue: RecordingQueue, root: Path) -> None:
    page = client.get("/new").text
    assert 'href="/new?from=smoke/cogvideox"' in page
    run_id = compute_run_id(root / "earlier")
    assert f'href="/new?from={run_id}">earlier' in page
    fields = {"root": str(root), "train.steps": "7"}
    assert post(client, "smoke/cogvideox", **fields, action="plan").status_code == 303
    assert post(client, run_id, **fields, action="start").status_code == 303
    run_page = f"/runs/{compute_run_id(root / 'next')}/"
    overrides = ["train.steps=7", f"run.dir={json.dumps(str(root / 'next'))}"]
    assert queue.commands == [
        (["plan", str(RECIPE), "train.steps=7", "--json"], "", False),
        (
            ["train", str(root / "earlier" / "config.yaml"), *overrides],
            run_page,
            True,
        ),
    ]


def test_what_cannot_be_started_is_refused_with_its_reason(
    client: StudioClient, queue: RecordingQueue, root: Path
) -> None:
    good = {"root": str(root)}
    for changes, reason in (
        ({"name": "earlier"}, "exists already"),
        ({"name": "../outside"}, "the name must have"),
        ({"name": "-x"}, "the name must have"),
        ({"root": "/"}, "choose one of the studio's folders"),
        ({"train.steps": "many"}, "train.steps"),
        ({"train.steps": "9" * 5000}, "train.steps"),
        ({"overrides": "train.stepz=3"}, "train.stepz"),
    ):
        answer: Any = post(client, "smoke/cogvideox", **good | changes)
        assert answer.status_code == 422, changes
        assert reason in answer.text
    run_id = compute_run_id(root / "earlier")
    path = root / "earlier" / "config.yaml"
    version = client.get(f"/new?from={run_id}").text.split('name="version" value="')[1].split('"')[0]
    path.write_text(path.read_text().replace("steps: 20\n", "steps: 30\n"))
    stale: Any = post(client, run_id, **good, version=version)
    assert stale.status_code == 409
    assert "-  steps: 20\n+  steps: 30\n" in stale.text
    assert client.get("/new?from=../../etc/passwd").status_code == 404
    assert queue.commands == []


PLAN = {
    "phases": {"training": 30.0, "sampling": 20.0},
    "fits": False,
    "gpu": 24.0,
    "cheapest_change": {"overrides": ["train.checkpointing=full"], "sharding": None, "needs": 20.0},
    "training": {"weights": 20.0, "activations": 10.0, "average": 0.0},
    "assumed": ["9 frames"],
}


def test_the_form_shows_the_memory_on_the_card_and_what_doctor_says(
    client: StudioClient, queue: RecordingQueue
) -> None:
    queue.answers["doctor"] = {
        "packages": {"torch": {"what": "torch 1.0 is too old", "severity": "refuse", "remedy": "pip install torch"}},
        "known_bad": [],
        "launch": {"problem": None},
    }
    queue.answers["plan"] = PLAN
    answer: Any = post(client, "smoke/cogvideox", **{"train.steps": "7"}, gpu="24GiB", action="plan")
    assert queue.commands[-1][0] == ["plan", str(RECIPE), "train.steps=7", "--gpu=24GiB", "--json"]
    page = client.get(answer.headers["location"]).text
    assert "does not fit: 30 of 24 GiB" in page
    # Two parts, 20 and 10 of 30 GiB, and the end of the card.
    assert [page.count(text) for text in ('width="400.0"', 'x="400.0" width="200.0"', 'x1="480.0"')] == [1, 1, 1]
    assert "train.checkpointing=full</pre>" in page
    assert "torch 1.0 is too old; <code>pip install torch</code>" in page
    assert 'name="train.steps" value="7"' in page  # what was typed stays
    assert 'value="24GiB"' in page
    # Closed, so that the form stays in its place.
    assert '<summary>dit-lora doctor: <b class="reject">1 refuse</b></summary>' in page
    queue.answers["plan"] = {**PLAN, "gpu": None, "fits": True}
    answer = post(client, "smoke/cogvideox", action="plan")
    assert "needs 30 GiB; no GPU was found" in client.get(answer.headers["location"]).text
    queue.answers["plan"] = "an error"
    answer = post(client, "smoke/cogvideox", action="plan")
    assert "could not be planned" in client.get(answer.headers["location"]).text


def test_the_files_of_a_shipped_recipe_are_made_first(
    client: StudioClient, queue: RecordingQueue, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    command = "dit-lora tiny shapes clips"
    assert command in client.get("/new?from=smoke/cogvideox").text
    (root / "tiny" / "cogvideox-2b").mkdir(parents=True)

    def make(source: str) -> int:
        body = {"token": client.keys.page_token, "from": source}
        return client.post("/new/examples", data=body, headers={"Origin": ORIGIN}).status_code

    # An earlier run and other paths name no recipe of the package.
    assert [make(source) for source in (compute_run_id(root / "earlier"), "../../x", "", "smoke/cogvideox")] == [
        303
    ] * 4
    page = "/new?from=smoke%2Fcogvideox"
    assert queue.commands == [(["tiny", "shapes", "clips"], page, False)]
    job = queue.newest
    job.state = "running"
    # The page shows the command, a second press starts nothing, and a training would begin with half of the clips.
    assert (client.get(page).text.count(command), make("smoke/cogvideox"), len(queue.commands)) == (1, 303, 1)
    assert "still being made" in post(client, "smoke/cogvideox", root=str(root)).text  # type: ignore[attr-defined]
    job.state = "done"
    (root / "clips").mkdir()
    assert command not in client.get(page).text
    assert post(client, "smoke/cogvideox", root=str(root)).status_code == 303


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_command_that_ends_while_the_page_is_made_is_asked_for_again(
    client: StudioClient, queue: RecordingQueue, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Otherwise the page would show no result, and never ask for it."""
    client.get("/new?from=smoke/cogvideox")
    job = queue.newest if command == "doctor" else queue.add(["plan"], "", needs_gpu=False)
    job.state = "running"
    read_answer = CommandJob.read_json_output

    def end_after_reading(read: CommandJob) -> Any:
        answer = read_answer(read)
        job.state = "done"
        return answer

    monkeypatch.setattr(CommandJob, "read_json_output", end_after_reading)
    page = f"/new?from=smoke/cogvideox&plan={job.job_id}"
    assert ["data-live" in client.get(page).text for _ in range(2)] == [True, False]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "latin-1"])
def test_a_recipe_that_cannot_be_read_is_a_sentence(client: StudioClient, root: Path, kind: str) -> None:
    path = root / "earlier" / "config.yaml"
    path.unlink()
    if kind == "link":
        path.symlink_to(RECIPE)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"model: {family: caf\xe9}")
    page = client.get(f"/new?from={compute_run_id(root / 'earlier')}", headers={"Accept": "text/html"})
    assert (page.status_code, f"cannot read {path}: " in page.text, "Errno" in page.text) == (400, True, False)
