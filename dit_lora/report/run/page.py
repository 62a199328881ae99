"""The report of a run, finished or not, as one self-contained page."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dit_lora.config.experts import EXPERT_NAMES
from dit_lora.config.lora import ADAPTER_KIND_NAMES, INITS, PEFT_ONLY_KINDS, WEIGHT_INITS
from dit_lora.config.validation import build_sample_titles
from dit_lora.families import CHAT_FAMILIES
from dit_lora.redact import make_redactor
from dit_lora.report.charts.heat_map import build_heat_maps
from dit_lora.report.pages import render_page, write_page
from dit_lora.report.run.charts import (
    build_curve_data,
    build_run_charts,
    build_timestep_chart,
    choose_smoothing_window,
    list_smoothing_windows,
)
from dit_lora.report.run.data import MAX_ROWS as DATA_ROWS
from dit_lora.report.run.data import describe_data
from dit_lora.report.run.files import OBJECT_FILES, RunFiles, RunReader, RunState
from dit_lora.report.run.history import ensure_dict
from dit_lora.report.run.phases import build_phase_charts, list_reduced_checks
from dit_lora.report.run.recipe_diff import compare_with_shipped, flatten_section
from dit_lora.report.run.samples import EMBED_LIMIT_BYTES, find_samples
from dit_lora.report.run.saves import list_saved_adapters
from dit_lora.report.run.summary import build_summary, choose_run_path
from dit_lora.report.run.words import (
    MAX_BARS,
    STATE_TEXTS,
    build_event_row,
    build_figures,
    build_quarantine_rows,
    build_verification_rows,
)

NUM_VISIBLE_ROWS = 20
"""Number of events and rows that are visible; the others can be expanded."""
# A page opened as a file may load samples from its own folder.
_FILE_POLICY = "img-src data: file: 'self'; media-src data: file: 'self'"
# A served page may load samples and ask for the run's state.
_SERVED_POLICY = "img-src data: 'self'; media-src 'self'; connect-src 'self'"


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` atomically from the files that the run has written so far."""
    return write_run_page(RunReader(Path(run_dir)))


def write_run_page(reader: RunReader, *, state: RunState | None = None, embed: bool = True) -> Path:
    """Write a run's report with an incremental reader of its folder; without `embed`, samples are linked."""
    page = render_run(reader.read(state), embed=embed)
    return write_page(reader.folder / "report.html", page, allow_stream=False)


def render_run(run: RunFiles, *, embed: bool = True, fingerprint: str = "") -> str:
    """Render a run's report as HTML.

    A served page compares `fingerprint` with the server's.
    """
    # Redact before anything is computed: names of groups or events could hold a path.
    clean = make_redactor()
    names = ("config", "events", "quarantine", *OBJECT_FILES)
    run = replace(run, **{name: clean(getattr(run, name)) for name in names})
    # The recipe's prompts, by the index in the samples' file names.
    prompts = get_sample_prompts(ensure_dict(run.config.get("validation")))
    events, recipe = [build_event_row(event) for event in run.events], run.status.get("recipe")
    packages = ensure_dict(run.environment.get("packages"))
    # Packages have a table of their own.
    machine = {key: value for key, value in run.environment.items() if key != "packages"}
    state, color = STATE_TEXTS[run.state]
    target, sampled = choose_run_path(run), find_samples(run.folder, prompts, embed=embed)
    return render_page(
        "page.html",
        scripts=("vendor/uPlot.iife.min.js", "viewer.js", "page.js"),
        sources=_SERVED_POLICY if fingerprint else _FILE_POLICY,
        run=run,
        live=fingerprint,
        state=state,
        state_color=color,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        about=_describe_run(run),
        figures=build_figures(run),
        charts=build_run_charts(run),
        timesteps=build_timestep_chart(run.metrics),
        curve_data=build_curve_data(run),
        window=choose_smoothing_window(run),
        windows=list_smoothing_windows(run),
        heat=build_heat_maps(run.metrics.modules),
        summary=build_summary(run, target, sampled.checkpoint_steps),
        sampled=sampled,
        form=choose_export_format(run.config),
        target=target,
        limit_mib=EMBED_LIMIT_BYTES // 2**20,
        embedding=embed,
        events=events[:NUM_VISIBLE_ROWS],
        more_events=events[NUM_VISIBLE_ROWS:],
        earlier_events=run.event_count - len(events),
        verified=build_verification_rows(run.verification),
        saves=list_saved_adapters(run),
        phases=build_phase_charts(run),
        reductions=list_reduced_checks(run),
        bars=MAX_BARS,
        data=describe_data(run),
        data_rows=DATA_ROWS,
        left_out=build_quarantine_rows(run),
        shown=NUM_VISIBLE_ROWS,
        diff=compare_with_shipped(run.config, recipe if isinstance(recipe, str) else None),
        config={str(name): list(flatten_section(section)) for name, section in run.config.items()},
        machine=list(flatten_section(machine)) if machine else [],
        packages=list(flatten_section(packages)) if packages else [],
    )


def get_sample_prompts(validation: Mapping[str, Any]) -> list[str]:
    """The prompts of the run's samples, from the recipe's validation section, in the order of their files."""
    prompts, count, seed = (validation.get(name) for name in ("prompts", "count", "seed"))
    # Values of an edited recipe may have any type.
    texts = [str(prompt) for prompt in prompts] if isinstance(prompts, list) else []
    if not (isinstance(count, int) and isinstance(seed, int)):
        return texts  # a run of a version without these settings
    return build_sample_titles(texts, count, seed)


def choose_export_format(config: Mapping[str, Any]) -> str | None:
    """The format in which a run's adapter is exported, from its recipe; None if there is nothing to export."""
    lora, train, model = (ensure_dict(config.get(name)) for name in ("lora", "train", "model"))
    groups = ensure_dict(ensure_dict(config.get("optim")).get("groups"))
    # Without an adapter there is nothing to export. A group that is None is not trained.
    if train.get("mode") == "full" or groups.get("adapter", True) is None:
        return None
    # A checkpoint of an adapter initialized from the weights lacks the modified base weights.
    if model.get("family") in CHAT_FAMILIES or lora.get("init") in WEIGHT_INITS:
        return None
    return "peft" if lora.get("kind") in PEFT_ONLY_KINDS else "diffusers"


def _describe_run(run: RunFiles) -> list[tuple[str, str]]:
    model = ensure_dict(run.config.get("model"))
    base = str(model.get("path", "unknown model"))
    # Of a model with two experts, only one was trained.
    expert = EXPERT_NAMES.get(str(model.get("part")))
    if expert:
        base += f", the expert for {expert.replace('_', ' ')}"
    rows = [
        ("Model", base),
        ("Family", str(model.get("family", "unknown family"))),
        ("Trained", _describe_training(run.config)),
        ("Data", _describe_data(run)),
    ]
    return [(name, text) for name, text in rows if text]


def _describe_training(config: Mapping[str, Any]) -> str:
    train, lora, optim = (ensure_dict(config.get(name)) for name in ("train", "lora", "optim"))
    if train.get("mode") == "full":
        return "every weight of the transformer"
    groups = ensure_dict(optim.get("groups"))
    base = [name for name in ("connector", "backbone") if groups.get(name)]
    # Runs of earlier versions have no kind.
    name = ADAPTER_KIND_NAMES.get(str(lora.get("kind", "lora")), str(lora.get("kind")))
    text = f"{name} of rank {lora['rank']}" if lora.get("rank") else name
    if lora.get("init", "kaiming") not in INITS:
        text += f", continued from {lora['init']}"
    if groups.get("adapter", True) is None:
        text = "no adapter"
    return f"{text}; of the base {' and '.join(base)}" if base else text


def _describe_data(run: RunFiles) -> str:
    data = ensure_dict(run.config.get("data"))
    sources = data.get("sources")
    paths = [str(data["path"])] if data.get("path") else []
    if isinstance(sources, list):
        paths += [str(s["path"]) for s in sources if isinstance(s, dict) and "path" in s]
    # Missing numbers become the text "None", which is left out below.
    shape = [str(data.get(name)) for name in ("frames", "height", "width")]
    count = run.data.get("samples")
    # A mixture can have dozens of sources.
    parts = [", ".join(paths[:4]) + (" and others" if paths[4:] else "")]
    parts += [f"{count:,} samples"] if isinstance(count, int) else []
    parts += [f"{'x'.join(shape)} (frames, height, width)"] if "None" not in shape else []
    return "; ".join(filter(None, parts))
