"""The report of a run, finished or not, as one self-contained page."""

import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dit_lora.adapters.kinds import WITHOUT_DIFFUSERS
from dit_lora.config.experts import EXPERTS
from dit_lora.config.lora import FROM_WEIGHT, INITS, KIND_NAMES
from dit_lora.config.validation import sampled_prompts
from dit_lora.families import CHAT_FAMILIES
from dit_lora.redact import redactor
from dit_lora.report.charts.heat_map import heat_maps
from dit_lora.report.pages import render, write_page
from dit_lora.report.run.charts import curve_data, run_charts, window_of, windows_of
from dit_lora.report.run.data import ROWS as DATA_ROWS
from dit_lora.report.run.data import run_data
from dit_lora.report.run.files import OBJECTS, RunFiles, RunReader, State
from dit_lora.report.run.history import mapping
from dit_lora.report.run.phases import phase_charts
from dit_lora.report.run.recipe_diff import against_stock, flat
from dit_lora.report.run.samples import EMBED_LIMIT_BYTES, find_sampled
from dit_lora.report.run.words import BARS, STATES, event_rows, figures, left_out, verified

SHOWN = 20
"""Number of events and rows that are visible; the others can be expanded."""
# A page opened as a file may load samples from its own folder.
_FILE = "img-src data: file: 'self'; media-src data: file: 'self'"
# A served page may load samples and ask for the run's state.
_SERVED = "img-src data: 'self'; media-src 'self'; connect-src 'self'"


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` atomically from the files that the run has written so far."""
    return write_run_page(RunReader(Path(run_dir)))


def write_run_page(reader: RunReader, *, state: State | None = None, embed: bool = True) -> Path:
    """Write the report from an incremental reader; without `embed`, samples are linked."""
    page = render_run(reader.read(state), embed=embed)
    return write_page(reader.folder / "report.html", page, allow_stream=False)


def render_run(run: RunFiles, *, embed: bool = True, live: str = "", token: str = "") -> str:
    """Render the page.

    A served page compares the fingerprint `live` with the server's; `token` enables exports.
    """
    # Redact before anything is computed: names of groups or events could hold a path.
    run = _public(run)
    # The recipe's prompts, by the index in the samples' file names.
    texts = texts_of(mapping(run.config.get("validation")))
    run_samples = find_sampled(run.folder, texts, embed=embed)
    events, recipe = event_rows(run), run.status.get("recipe")
    packages = mapping(run.environment.get("packages"))
    # Packages have a table of their own.
    machine = {key: value for key, value in run.environment.items() if key != "packages"}
    state, color = STATES[run.state]
    return render(
        "page.html",
        scripts=("vendor/uPlot.iife.min.js", "page.js"),
        sources=_SERVED if live else _FILE,
        run=run,
        live=live,
        state=state,
        state_color=color,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        about=_about(run),
        figures=figures(run),
        charts=run_charts(run),
        curve_data=curve_data(run),
        window=window_of(run),
        windows=windows_of(run),
        heat=heat_maps(run.metrics.modules),
        sampled=run_samples,
        token=token,
        form=form_of(run.config),
        name=shlex.quote(run.folder.resolve().name),
        limit_mib=EMBED_LIMIT_BYTES // 2**20,
        embedding=embed,
        events=events[:SHOWN],
        more_events=events[SHOWN:],
        earlier_events=run.event_count - len(events),
        verified=verified(run.verification),
        phases=phase_charts(run),
        bars=BARS,
        data=run_data(run),
        data_rows=DATA_ROWS,
        left_out=left_out(run),
        shown=SHOWN,
        diff=against_stock(run.config, recipe if isinstance(recipe, str) else None),
        config={str(name): list(flat(section)) for name, section in run.config.items()},
        machine=list(flat(machine)) if machine else [],
        packages=list(flat(packages)) if packages else [],
    )


def texts_of(validation: Mapping[str, Any]) -> list[str]:
    """The prompts of the run's samples, from the recipe's validation section, in the order of their files."""
    prompts, count, seed = (validation.get(name) for name in ("prompts", "count", "seed"))
    texts = [str(prompt) for prompt in prompts] if isinstance(prompts, list) else []
    if not (isinstance(count, int) and isinstance(seed, int)):
        return texts  # a run of a version without these settings
    return sampled_prompts(texts, count, seed)


def form_of(config: Mapping[str, Any]) -> str | None:
    """The format in which a run's adapter is exported, from its recipe; None if there is nothing to export."""
    lora, train, model = (mapping(config.get(name)) for name in ("lora", "train", "model"))
    groups = mapping(mapping(config.get("optim")).get("groups"))
    # Without an adapter there is nothing to export. A group that is None is not trained.
    if train.get("mode") == "full" or groups.get("adapter", True) is None:
        return None
    # A checkpoint of an adapter initialized from the weights lacks the modified base weights.
    if model.get("family") in CHAT_FAMILIES or lora.get("init") in FROM_WEIGHT:
        return None
    return "peft" if lora.get("kind") in WITHOUT_DIFFUSERS else "diffusers"


def _public(run: RunFiles) -> RunFiles:
    """The run's files with secrets and absolute paths redacted, for charts too."""
    clean = redactor()
    names = ("config", "events", "quarantine", *OBJECTS)
    return replace(run, **{name: clean(getattr(run, name)) for name in names})


def _about(run: RunFiles) -> list[tuple[str, str]]:
    """Rows on the trained model and data, one line each."""
    model, data = mapping(run.config.get("model")), mapping(run.config.get("data"))
    rows = [
        ("Model", _model(model)),
        ("Family", str(model.get("family", "unknown family"))),
        ("Trained", _trained(run.config)),
        ("Data", _data(data, run)),
    ]
    return [(name, text) for name, text in rows if text]


def _model(model: Mapping[str, Any]) -> str:
    """The base model's path, and which of two experts was trained."""
    expert = EXPERTS.get(str(model.get("part")))
    path = str(model.get("path", "unknown model"))
    return f"{path}, the expert for {expert.replace('_', ' ')}" if expert else path


def _trained(config: Mapping[str, Any]) -> str:
    train, lora, optim = (mapping(config.get(name)) for name in ("train", "lora", "optim"))
    if train.get("mode") == "full":
        return "every weight of the transformer"
    groups = mapping(optim.get("groups"))
    base = [name for name in ("connector", "backbone") if groups.get(name)]
    name = KIND_NAMES.get(str(lora.get("kind", "lora")), str(lora.get("kind")))
    text = f"{name} of rank {lora['rank']}" if lora.get("rank") else name
    if lora.get("init", "kaiming") not in INITS:
        text += f", continued from {lora['init']}"
    if groups.get("adapter", True) is None:
        text = "no adapter"
    return f"{text}; of the base {' and '.join(base)}" if base else text


def _data(data: Mapping[str, Any], run: RunFiles) -> str:
    sources = data.get("sources")
    paths = [str(data["path"])] if data.get("path") else []
    if isinstance(sources, list):
        paths += [str(s["path"]) for s in sources if isinstance(s, dict) and "path" in s]
    # Missing numbers become the text "None", which is left out below.
    shape = [str(data.get(name)) for name in ("frames", "height", "width")]
    count = run.data.get("samples")
    parts = [", ".join(paths[:4]) + (" and others" if paths[4:] else "")]
    parts += [f"{count:,} samples"] if isinstance(count, int) else []
    parts += [f"{'x'.join(shape)} (frames, height, width)"] if "None" not in shape else []
    return "; ".join(word for word in parts if word)
