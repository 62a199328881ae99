"""How quickly the studio answers with many files and many runs.

    python -m benchmarks.studio_load [--files 30000] [--runs 200] [--rounds 10]

The files are pictures of 64x48 pixels, hard links to a hundred contents, each with a caption of its own and with the
findings of a made-up audit; a second folder has the same captions in a .txt file beside each picture. Requests come
one after another from a client in the same process, whose CPU time is part of the figures. The first page after the
start comes before the findings; the time until it has them is its own row. A page is its HTML; thumbnails are measured
one by one, when they are made and when they are cached.
"""

import argparse
import http.client
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Thread
from urllib.parse import urlencode

import numpy as np
from PIL import Image

from dit_lora.data.audit.stored_audit import AUDIT_FILE
from dit_lora.report.captions.page import compute_caption_version
from dit_lora.studio.app import build_app, list_pages
from dit_lora.studio.library import RunLibrary, compute_run_id
from dit_lora.studio.server import HOST, StudioServer

_NUM_CONTENTS = 100
_NUM_STEPS = 300  # of a made-up run
_NUM_THUMBNAILS = 60


def write_data(folder: Path, num_files: int, *, has_table: bool = True) -> None:
    """Write pictures, their captions in a table or in .txt files, and an audit with a finding for each tenth file."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    contents = []
    for number in range(min(num_files, _NUM_CONTENTS)):
        contents.append(folder / f"{number:06d}.png")
        Image.fromarray(random.integers(0, 256, (48, 64, 3), np.uint8)).save(contents[-1])
    names = [f"{number:06d}.png" for number in range(num_files)]
    for number, name in enumerate(names[len(contents) :]):
        os.link(contents[number % len(contents)], folder / name)
    captions = [f"picture {number} of a red disc that moves to the left" for number in range(num_files)]
    rows = [{"file_name": name, "text": caption} for name, caption in zip(names, captions, strict=True)]
    if has_table:
        (folder / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        for number, caption in enumerate(captions):
            (folder / f"{number:06d}.txt").write_text(caption)
    samples = [
        {
            "file": name,
            "verdict": "ok" if number % 10 else "warn",
            "reasons": [] if number % 10 else ["blurred: it is soft"],
            "facts": {"width": 64, "height": 48, "frames": 1},
        }
        for number, name in enumerate(names)
    ]
    (folder / AUDIT_FILE).parent.mkdir()
    (folder / AUDIT_FILE).write_text(json.dumps({"samples": samples}))


def write_runs(folder: Path, num_runs: int) -> None:
    """Write finished runs with metrics and eval losses."""
    metrics = [{"step": step, "loss": 1 / step, "seconds": 0.5} for step in range(1, _NUM_STEPS + 1)]
    losses = [{"step": step, "eval_loss": 1 / step} for step in range(10, _NUM_STEPS + 1, 10)]
    for number in range(num_runs):
        run = folder / f"run_{number:03d}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"model: {{family: cogvideox}}\ntrain: {{steps: {_NUM_STEPS}}}\n")
        (run / "status.json").write_text('{"state": "finished"}')
        for name, rows in (("metrics.jsonl", metrics), ("eval_loss.jsonl", losses)):
            (run / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@contextmanager
def serve(root: Path) -> Iterator[StudioServer]:
    server = StudioServer(build_app(list_pages(RunLibrary([root]))))
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)


def send(server: StudioServer, path: str, body: dict[str, str] | None = None, *, is_json: bool = False) -> bytes:
    """The answer to a request of a page; with a body, to a write."""
    keys = server.keys
    headers = {"Cookie": f"{keys.cookie_name}={keys.session}"}
    data = None
    if body is not None:
        values = {"token": keys.page_token, **body}
        data = json.dumps(values) if is_json else urlencode(values)
        headers |= {"Origin": f"http://{HOST}:{keys.port}"}
        headers |= {"Content-Type": "application/json" if is_json else "application/x-www-form-urlencoded"}
    connection = http.client.HTTPConnection(HOST, keys.port, timeout=600)
    connection.request("GET" if body is None else "POST", path, data, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status >= 400:
        raise RuntimeError(f"{path} was answered with {answer.status}: {content[:200]!r}")
    return content


def measure(name: str, request: Callable[[int], object], rounds: int) -> None:
    """Print a row: median and largest seconds by the clock, and the median of CPU time."""
    times, cpu_times = [], []
    for number in range(rounds):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        request(number)
        times.append(time.perf_counter() - begin)
        cpu_times.append(time.process_time() - cpu_begin)
    print(f"| {name} | {median(times):.3f} | {max(times):.3f} | {median(cpu_times):.3f} |", flush=True)


def wait_for_findings(server: StudioServer, path: str) -> None:
    """Load a page until all captions are checked, which the page itself does every 3 seconds."""
    while b"being checked" in send(server, path):
        time.sleep(0.05)


def measure_data(server: StudioServer, folder: Path, rounds: int) -> None:
    path = f"/data/{compute_run_id(folder)}/"
    names = sorted(file.name for file in folder.glob("*.png"))[:_NUM_THUMBNAILS]
    measure("files: the first page after the start", lambda _: send(server, path), 1)
    measure("files: the first page until it has the findings", lambda _: wait_for_findings(server, path), 1)
    measure("files: another page", lambda number: send(server, f"{path}?page={number + 2}"), rounds)
    measure("files: with a finding", lambda _: send(server, f"{path}?finding=blurred"), rounds)
    measure("files: with a text", lambda number: send(server, f"{path}?text=picture+{number}"), rounds)
    change = {"find": "red disc", "replacement": "blue disc"}
    measure("files: preview of a change of all", lambda _: send(server, f"{path}change?{urlencode(change)}"), rounds)
    measure("a thumbnail that is made", lambda number: send(server, f"{path}thumbnail/{names[number]}"), len(names))
    measure("a thumbnail that is cached", lambda number: send(server, f"{path}thumbnail/{names[number]}"), len(names))

    def save(number: int) -> None:
        caption = f"picture {number} of a red disc that moves to the left"
        values = {"file": names[number], "caption": f"{caption}, slowly", "version": compute_caption_version(caption)}
        send(server, f"{path}caption", values, is_json=True)

    measure("a caption that is saved", save, min(rounds, len(names)))
    measure("files: the page after a save", lambda _: send(server, path), 1)


def measure_texts(server: StudioServer, folder: Path, rounds: int) -> None:
    path = f"/data/{compute_run_id(folder)}/"
    measure(".txt files: the first page after the start", lambda _: send(server, path), 1)
    measure(".txt files: the first page until it has the findings", lambda _: wait_for_findings(server, path), 1)
    measure(".txt files: another page", lambda number: send(server, f"{path}?page={number + 2}"), rounds)
    measure(".txt files: with a text", lambda number: send(server, f"{path}?text=picture+{number}"), rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=30_000)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        write_data(root / "data", options.files)
        write_data(root / "texts", options.files, has_table=False)
        write_runs(root / "runs", options.runs)
        for name in ("data", "texts"):
            # As long ago: folders that have just changed are listed again.
            os.utime(root / name, (1, 1))
        print("| request | median, s | most, s | CPU, s |\n|---|---:|---:|---:|")
        with serve(root) as server:
            measure("runs: the list", lambda _: send(server, "/"), options.rounds)
            measure_data(server, root / "data", options.rounds)
            measure_texts(server, root / "texts", options.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
