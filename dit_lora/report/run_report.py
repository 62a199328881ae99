"""The report of a run: what its folder holds, finished or not, as one self-contained page."""

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.report.charts import Bar, Series, bar_chart, line_chart, number, smooth, wants_log
from dit_lora.report.run_samples import EMBED_LIMIT_BYTES, Sample, find_answers, find_samples

_NONE = "\u2013"


@dataclass(frozen=True)
class RunFiles:
    """What could be read of a run's folder; `notes` says what could not."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    held_out: dict[int, float]
    events: list[dict[str, Any]]
    notes: list[str]

    @property
    def steps(self) -> list[int]:
        return [line["step"] for line in self.metrics]

    def column(self, key: str) -> list[float]:
        """One value a step, NaN where the line has no such number."""
        return [_float(line.get(key)) for line in self.metrics]

    def groups(self, key: str) -> dict[str, list[float]]:
        """One column a name, in the order of appearance, NaN where a step lacks it."""
        maps = [_mapping(line.get(key)) for line in self.metrics]
        names = dict.fromkeys(name for values in maps for name in values)
        return {name: [_float(values.get(name)) for values in maps] for name in names}


@dataclass(frozen=True)
class Figure:
    """A number of the headline row."""

    label: str
    value: str
    detail: str = ""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` in one rename from whatever the run has written so far."""
    run_dir = Path(run_dir)
    run = read_run(run_dir)
    prompts = _mapping(run.config.get("validation")).get("prompts") or ()
    samples, linked = find_samples(run.folder, [str(one) for one in prompts])
    page = _render(run, samples, linked)
    path = run_dir / "report.html"
    try:
        write_whole(path, page)
    except OSError as error:
        raise DitLoraError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def read_run(run_dir: Path) -> RunFiles:
    """Everything but the videos; refuses a folder without a readable config.yaml."""
    notes: list[str] = []
    config = _read_config(run_dir)
    # A resumed run may have written a step twice: the later line is the one it went on from.
    by_step = {line["step"]: line for line in _steps(run_dir / "metrics.jsonl", notes)}
    held_out = {
        line["step"]: _float(line["held_out_loss"])
        for line in [*by_step.values(), *_steps(run_dir / "held_out.jsonl", notes)]
        if "held_out_loss" in line
    }
    run = RunFiles(
        folder=run_dir,
        config=config,
        environment=_read_environment(run_dir / "environment.json", notes),
        metrics=[by_step[step] for step in sorted(by_step)],
        held_out={step: held_out[step] for step in sorted(held_out)},
        events=list(_read_lines(run_dir / "events.jsonl", notes)),
        notes=notes,
    )
    notes += [
        *_not_finite("loss", zip(run.steps, run.column("loss"), strict=True)),
        *_not_finite("gradient norm", zip(run.steps, run.column("grad_norm"), strict=True)),
        *_not_finite("held-out loss", run.held_out.items()),
    ]
    return run


def _read_config(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DitLoraError(
            f"{run_dir} is not a run: it has no config.yaml; give the folder that run.dir named"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DitLoraError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise DitLoraError(
            f"{path} is not a recipe: it must hold sections such as model: and data:; got {config!r}"
        )
    return config


def _read_environment(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return _mapping(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:
        notes.append(f"{path.name} is not valid JSON and is left out.")
        return {}


def _read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; a line that is torn or no object is left out and noted."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for index, text in enumerate(lines):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            yield line
        elif index == len(lines) - 1:
            notes.append(
                f"The last line of {path.name} is cut off: the run was stopped while writing it. "
                "It is left out."
            )
        else:
            notes.append(f"Line {index + 1} of {path.name} is not a JSON object. It is left out.")


def _steps(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    return (line for line in _read_lines(path, notes) if isinstance(line.get("step"), int))


def _not_finite(name: str, values: Iterable[tuple[int, float]]) -> Iterator[str]:
    steps = [step for step, value in values if not math.isfinite(value)]
    if steps:
        shown = ", ".join(str(step) for step in steps[:8])
        more = f" and {len(steps) - 8:,} more" if len(steps) > 8 else ""
        yield f"The {name} is not finite at step{'s' if len(steps) > 1 else ''} {shown}{more}."


def _render(run: RunFiles, samples: list[Sample], linked: int) -> str:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("dit_lora.report").joinpath("page.html").read_text(encoding="utf-8")
    model, packages = _mapping(run.config.get("model")), run.environment.get("packages")
    machine = {key: value for key, value in run.environment.items() if key != "packages"}
    return environment.from_string(source).render(
        name=run.folder.resolve().name,
        model=model.get("path", "unknown model"),
        family=model.get("family", "unknown family"),
        notes=run.notes,
        figures=_figures(run),
        charts=_charts(run),
        held_out=bool(run.held_out),
        samples=samples,
        answers=find_answers(run.folder),
        linked=linked,
        limit_mib=EMBED_LIMIT_BYTES // 2**20,
        events=[_event_row(event) for event in run.events],
        config={name: list(_rows(section)) for name, section in run.config.items()},
        machine=list(_rows(machine)) if machine else [],
        packages=list(_rows(packages)) if packages else [],
    )


def _figures(run: RunFiles) -> list[Figure]:
    asked = _mapping(run.config.get("train")).get("steps")
    done, window = max(run.steps, default=0), _window(run)
    losses, seconds, peaks = (
        [value for value in values if math.isfinite(value)]
        for values in (
            smooth(run.column("loss"), window),
            run.column("seconds"),
            run.column("peak_gib"),
        )
    )
    of = f"of {asked:,}{', not finished' if done < asked else ''}" if isinstance(asked, int) else ""
    last = number(losses[-1]) if losses else _NONE
    median = number(statistics.median(seconds), 3) if seconds else _NONE
    return [
        Figure("Steps", f"{done:,}", of),
        Figure("Training loss", last, f"mean of the last {window}" if window > 1 else ""),
        _held_out_figure(run.held_out),
        Figure("Seconds per step", median, "median" if seconds else ""),
        Figure("Peak memory", f"{number(max(peaks), 3)} GiB" if peaks else _NONE),
    ]


def _held_out_figure(held_out: Mapping[int, float]) -> Figure:
    label = "Held-out loss"
    if not held_out:
        return Figure(label, _NONE, "not measured")
    first, last = min(held_out), max(held_out)
    before, after = held_out[first], held_out[last]
    if first == last:
        return Figure(label, number(before), f"at step {first:,} only")
    steps = f"step {first:,} to {last:,}"
    comparable = math.isfinite(before) and math.isfinite(after) and before != 0
    change = f"{100 * (after / before - 1):+.1f}%, " if comparable else ""
    return Figure(label, f"{number(before)} \u2192 {number(after)}", change + steps)


def _window(run: RunFiles) -> int:
    """Steps that a smoothed line averages: a twentieth of the run, at least 5."""
    return max(1, min(len(run.steps), 100, max(5, len(run.steps) // 20)))


def _charts(run: RunFiles) -> dict[str, str]:
    """The page's charts by name; those without data are absent."""
    if not run.metrics and not run.held_out:
        return {}
    charts = {
        "loss": _loss_chart(run),
        "by_timestep": _parts_chart(run, "loss_by_timestep", "Loss by timestep"),
        "by_media": _parts_chart(run, "loss_by_media", "Loss by kind of media"),
    }
    window, norms = _window(run), run.groups("grad_norm_groups")
    name = "all groups" if len(norms) > 1 else "gradient norm"
    norm_lines = _raw_and_smooth(run, "grad_norm", name)
    if len(norms) > 1:
        norm_lines += [
            Series(name, run.steps, smooth(values, window), color)
            for color, (name, values) in enumerate(norms.items(), start=1)
        ]
    charts["grad_norm"] = _chart(run, "Gradient norm", "norm before clipping", norm_lines)
    rates = run.groups("lr_groups")
    peaks = [max((v for v in values if math.isfinite(v)), default=0.0) for values in rates.values()]
    lines = [Series(name, run.steps, y, color) for color, (name, y) in enumerate(rates.items())]
    log_y = wants_log(
        peaks
    )  # by the peaks: a warm-up or decay to zero alone reads well on a linear axis
    charts["lr"] = _chart(run, "Learning rate", "learning rate", lines, log_y=log_y, from_zero=True)
    seconds = [
        *_raw_and_smooth(run, "seconds", "whole step"),
        Series("waiting for data", run.steps, smooth(run.column("data_seconds"), window), 1),
    ]
    charts["seconds"] = _chart(run, "Time per step", "seconds", seconds, from_zero=True)
    return {name: chart for name, chart in charts.items() if chart}


def _loss_chart(run: RunFiles) -> str:
    lines = _raw_and_smooth(run, "loss", "training")
    if run.held_out:
        steps, losses = zip(*run.held_out.items(), strict=True)
        lines.append(Series("held-out", steps, losses, 1, "dots"))
    return _chart(run, "Loss", "loss", lines)


def _parts_chart(run: RunFiles, key: str, title: str) -> str:
    """Late in the run only: the early steps would blur where the adapter ended up."""
    late = run.metrics[-math.ceil(len(run.metrics) / 4) :] if run.metrics else []
    seen: dict[str, list[float]] = {}
    for line in late:
        for part, loss in _mapping(line.get(key)).items():
            seen.setdefault(part, []).append(_float(loss))
    bars = []
    for part, losses in sorted(seen.items(), key=lambda item: (len(item[0]), item[0])):
        finite = [loss for loss in losses if math.isfinite(loss)]
        mean = sum(finite) / len(finite) if finite else math.nan
        count = f"{len(finite):,} step{'' if len(finite) == 1 else 's'}"
        bars.append(Bar(part.replace("-", "\u2013"), mean, count))
    if not bars:
        return ""
    span = f"mean loss, steps {late[0]['step']:,} to {late[-1]['step']:,}"
    return bar_chart(title, bars, label=span)


def _raw_and_smooth(run: RunFiles, key: str, name: str) -> list[Series]:
    values, window = run.column(key), _window(run)
    if window == 1:
        return [Series(name, run.steps, values)]
    return [
        Series(f"{name}, each step", run.steps, values, 0, "faint"),
        Series(f"{name}, mean of {window}", run.steps, smooth(values, window), 0),
    ]


def _chart(
    run: RunFiles,
    title: str,
    y_label: str,
    series: Sequence[Series],
    *,
    log_y: bool | None = None,
    from_zero: bool = False,
) -> str:
    """A chart over the whole run, all with the same steps below; "" without any finite value."""
    series = [one for one in series if any(math.isfinite(y) for y in one.y)]
    if not series:
        return ""
    if log_y is None:
        log_y = wants_log([y for one in series for y in one.y])
    last = max([*run.steps, *run.held_out], default=0)
    labels = {"x_label": "step", "y_label": y_label}
    return line_chart(title, series, **labels, x_range=(0, last), log_y=log_y, from_zero=from_zero)


def _event_row(event: Mapping[str, Any]) -> list[str]:
    """The cells of the columns that page.html names."""
    keys = ("step", "micro_step", "rank", "kind", "sample_ids", "verdict", "action")
    verdict = _mapping(event.get("verdict"))
    if "cause" in verdict and "words" in verdict:  # the evidence stays in events.jsonl
        event = {**event, "verdict": f"{verdict['cause']}: {verdict['words']}"}
    seconds = _float(event.get("seconds"))
    return [_words(event.get(key)) for key in keys] + [
        number(seconds, 3) if math.isfinite(seconds) else ""
    ]


def _words(value: Any) -> str:
    """Nested plain values in words: `cause: data; offenders: sample: a; rank: 0`."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_words(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        words = [_words(inner) for inner in value]
        return ("\n" if any(" " in text for text in words) else ", ").join(words)
    return str(value)


def _rows(section: Any, parent: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values of nested mappings, for a table."""
    if isinstance(section, dict) and section:
        for key, value in section.items():
            yield from _rows(value, f"{parent}.{key}" if parent else str(key))
    else:
        as_yaml = section is None or isinstance(section, bool)
        yield parent, json.dumps(section) if as_yaml else _words(section) or "none"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
