"""Measures a chat model's accuracy at multiple-choice questions, by MVBench's protocol, beside that of its base."""

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from tqdm import tqdm

from dit_lora.data.chat import mvbench
from dit_lora.data.chat.conversation import Turn
from dit_lora.data.chat.mvbench import Question, named_options
from dit_lora.errors import DitLoraError, InterruptedRunError, listed
from dit_lora.files import write_whole
from dit_lora.training.tasks.chat.answerer import Answerer, Seen, load_answerer

Protocol = Literal["notebook", "trained"]
"""The way of asking.

`notebook`: prompt, frames and pictures of the original's MVBench notebook, whose published figures are made so;
`trained`: frames, pictures, time stamps and system text as in training and `chat`. Question and answer are the
benchmark's in both.
"""

PREDICTIONS_FILE = "predictions.jsonl"
RESULTS_FILE = "results.json"
MAX_TOKENS = 8
"""Tokens of an answer: the first word decides; the notebook generates 100 and reads no further."""
_READERS = 4  # threads that decode what is asked next


@dataclass(frozen=True)
class EvaluationRequest:
    """A request to evaluate."""

    target: Path
    """A run's folder, an adapter's folder or a checkpoint."""
    data: Path
    """MVBench's folder, or a .json or .jsonl file of questions."""
    media: Path | None = None
    """The folder that the questions' videos are below, where it is not beside them."""
    model: str | None = None
    """The base checkpoint, by default the run's."""
    against_base: bool = False
    """True to ask the base too, without the fine-tune."""
    limit: int | None = None
    """Questions of each task."""
    frames: int | None = None
    """Frames of each video; by default 16 for MVBench, as published, and else as trained."""
    protocol: Protocol | None = None
    """The protocol; by default the notebook's for MVBench's folder, and else as trained."""
    skip: bool = False
    """True to leave out questions that cannot be asked, in place of refusing them all."""
    out: Path | None = None


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation."""

    out: Path
    results: dict[str, Any]
    questions: list[Question]
    predictions: list[dict[str, Any]]
    """One line for each question, in order."""


def evaluate_target(request: EvaluationRequest, *, quiet: bool = False) -> Evaluation:
    """Ask every question and write predictions.jsonl and results.json.

    A second call goes on where the first was stopped. Raises `DitLoraError` with every question that cannot be
    asked, unless they are to be left out.
    """
    read = mvbench.read_questions(request.data, request.media)
    left_out = {one.file: one.words for one in read.problems}
    if left_out and not request.skip:
        lines = [f"{name}: {words}" for name, words in left_out.items()]
        raise DitLoraError(
            listed(f"{request.data}: correct these, or leave them out with --skip", lines)
        )
    questions = mvbench.at_most(read.all, request.limit)
    if not questions:
        raise DitLoraError(f"{request.data}: no question can be asked")
    published = request.data.is_dir()
    frames = request.frames or (mvbench.FRAMES if published else None)
    answerer = load_answerer(request.target, request.model, frames=frames)
    out = request.out or _out(request)
    return evaluate(
        answerer,
        questions,
        out,
        protocol=request.protocol or ("notebook" if published else "trained"),
        against_base=request.against_base,
        left_out=left_out,
        quiet=quiet,
    )


def evaluate(
    answerer: Answerer,
    questions: Sequence[Question],
    out: Path,
    *,
    protocol: Protocol = "notebook",
    against_base: bool = False,
    left_out: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> Evaluation:
    """Ask the model each question, and with `against_base` its base about the same frames.

    A video that cannot be read is one failed question, asked again by the next call. Raises `DitLoraError` if
    `out` holds the answers of another model or another protocol, and `InterruptedRunError` on Ctrl-C.
    """
    if against_base and not answerer.is_tuned:
        raise DitLoraError(
            "--against base needs an adapter or trained weights; this is a base model"
        )
    if protocol == "notebook":
        answerer = _as_published(answerer)
    # All that changes an answer, the weights' digest included: a call under another one does not go on.
    setting = {
        **answerer.made,
        "protocol": protocol,
        "against_base": against_base,
        "dtype": str(answerer.dtype),
    }
    # Each answer is on disk as it comes: hours of questions survive a kill.
    book = _Book(out, setting)
    keys = [_key(one) for one in questions]
    open_questions = [
        (key, one) for key, one in zip(keys, questions, strict=True) if not book.holds(key)
    ]
    looked = tqdm(
        _looked(answerer, open_questions),
        total=len(open_questions),
        desc="evaluating",
        unit="question",
        disable=quiet,
        dynamic_ncols=True,
    )
    try:
        for key, question, seen in looked:
            book.add(key, _asked(answerer, question, seen, against_base))
    except KeyboardInterrupt as error:
        done = sum(book.holds(key) for key in keys)
        raise InterruptedRunError(
            f"{done:,} of {len(keys):,} questions are answered and kept in {out}; the same command goes on",
            130,
        ) from error
    predictions = [book.lines[key] for key in keys]
    results = {
        "setting": setting,
        **summarize(questions, predictions, compared=against_base),
        "left_out": dict(left_out or {}),
    }
    write_whole(out / RESULTS_FILE, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return Evaluation(out, results, list(questions), predictions)


def summarize(
    questions: Sequence[Question], predictions: Sequence[Mapping[str, Any]], *, compared: bool
) -> dict[str, Any]:
    """Return counts and accuracies of each task, and of all: `average` is the mean of the tasks' accuracies.

    An accuracy is a share of all questions; `accuracy_read` of those whose video could be read, None where none
    could. The notebook's own average is over questions, which for MVBench, with 200 a task, is the same.
    """
    by_task: dict[str, list[tuple[Question, Mapping[str, Any]]]] = {}
    pairs = list(zip(questions, predictions, strict=True))
    for one in pairs:
        by_task.setdefault(one[0].task, []).append(one)
    tasks = [{"task": task, **_counted(ones, compared)} for task, ones in by_task.items()]
    average: dict[str, Any] = {
        "accuracy": fmean(one["accuracy"] for one in tasks),
        "chance": fmean(one["chance"] for one in tasks),
    }
    if compared:
        average["base"] = {"accuracy": fmean(one["base"]["accuracy"] for one in tasks)}
    return {"average": average, "all": _counted(pairs, compared), "tasks": tasks}


def told(results: Mapping[str, Any]) -> list[str]:
    """Return the table of results, in lines for a terminal."""
    total, average = results["all"], results["average"]
    compared = "base" in total
    rows = [(one["task"], f"{one['questions']:,}", one) for one in results["tasks"]]
    rows += [("all questions", f"{total['questions']:,}", total), ("mean of tasks", "", average)]
    wide = max(len(name) for name, _, _ in rows)
    head = f"{'':{wide}}  questions  accuracy"
    lines = [f"{head}    base  difference" if compared else head]
    for name, count, one in rows:
        line = f"{name:{wide}}  {count:>9}  {one['accuracy']:>8.1%}"
        if compared:
            base = one["base"]["accuracy"]
            line += f"  {base:>6.1%}  {100 * (one['accuracy'] - base):>+10.1f}"
        lines.append(line)
    if compared:
        lines.append(
            f"right only with the fine-tune: {total['only_tuned']:,}; only without: {total['only_base']:,}"
        )
    lines.append(f"chance {average['chance']:.1%}; no option named: {total['unnamed']:,}")
    if total["failed"]:
        read = total["accuracy_read"]
        share = "" if read is None else f"; of the others {read:.1%} are right"
        lines.append(
            f"could not be read, and counts as wrong: {total['failed']:,}{share}; {PREDICTIONS_FILE} says why"
        )
    if results.get("left_out"):
        lines.append(f"left out: {len(results['left_out']):,}; {RESULTS_FILE} says why")
    return lines


def _as_published(answerer: Answerer) -> Answerer:
    """Return the answerer without timestamps or a system text of its own, with the notebook's frames and crop.

    A model that is always told when its frames are is told so here too, and tiles are cut as in training.
    """
    checkpoint = answerer.checkpoint.in_notebook()
    fit: Literal["cover"] | None = None if checkpoint.how.tiles else "cover"
    return replace(answerer, checkpoint=checkpoint, system="", fit=fit, notebook=True)


def _looked(
    answerer: Answerer, questions: Sequence[tuple[str, Question]]
) -> Iterator[tuple[str, Question, Future[Seen]]]:
    """Yield each question in order, its frames read while the model answers those before."""
    waiting: deque[tuple[str, Question, Future[Seen]]] = deque()
    pool = ThreadPoolExecutor(_READERS)
    try:
        for key, one in questions:
            seen = pool.submit(answerer.look, one.media, start=one.start, end=one.end)
            waiting.append((key, one, seen))
            # Bounded: decoded frames of all questions would not fit into memory.
            if len(waiting) > 2 * _READERS:
                yield waiting.popleft()
        yield from waiting
    finally:
        # After Ctrl-C nobody asks about the frames that wait.
        pool.shutdown(cancel_futures=True)


def _asked(
    answerer: Answerer, question: Question, looked: Future[Seen], against_base: bool
) -> dict[str, Any]:
    """Ask one question, and return its line of predictions.jsonl."""
    line: dict[str, Any] = {"id": question.id, "task": question.task, "answer": question.answer}
    try:
        seen = looked.result()
    except DitLoraError as error:
        return line | {"failed": str(error)}
    line["seconds"] = [round(at, 3) for at in seen.seconds]
    line |= _judged(answerer, seen, question)
    if against_base:
        # The same frames and the same prompt: only the weights differ.
        with answerer.as_base():
            line["base"] = _judged(answerer, seen, question)
    return line


def _judged(answerer: Answerer, seen: Seen, question: Question) -> dict[str, Any]:
    turn = Turn(mvbench.prompt(question), "", mvbench.SYSTEM)
    answer = answerer.say(seen, (turn,), answer_prefix=mvbench.ANSWER_START, max_tokens=MAX_TOKENS)
    named = named_options(answer, len(question.candidates))
    return {"said": answer, "named": list(named), "right": question.answer in named}


def _counted(ones: Sequence[tuple[Question, Mapping[str, Any]]], compared: bool) -> dict[str, Any]:
    read = [line for _, line in ones if "failed" not in line]
    counts: dict[str, Any] = {
        "questions": len(ones),
        "failed": len(ones) - len(read),
        "chance": fmean(1 / len(question.candidates) for question, _ in ones),
        **_accuracy(read, len(ones)),
    }
    if compared:
        counts["base"] = _accuracy([one["base"] for one in read], len(ones))
        counts["only_tuned"] = sum(one["right"] and not one["base"]["right"] for one in read)
        counts["only_base"] = sum(one["base"]["right"] and not one["right"] for one in read)
    return counts


def _accuracy(read: Sequence[Mapping[str, Any]], questions: int) -> dict[str, Any]:
    right = sum(one["right"] for one in read)
    return {
        "right": right,
        "unnamed": sum(not one["named"] for one in read),
        "accuracy": right / questions,
        "accuracy_read": right / len(read) if read else None,
    }


class _Book:
    """Keeps predictions.jsonl: the setting in its first line, then one answer a line, each written whole."""

    def __init__(self, out: Path, setting: Mapping[str, Any]) -> None:
        self.path = out / PREDICTIONS_FILE
        self.lines: dict[str, dict[str, Any]] = {}
        """Answers by the question's key; the last one counts."""
        stored = self._read()
        if not stored:
            write_whole(self.path, json.dumps({"setting": setting}) + "\n")
            return
        # Answers of two settings in one file would be averaged as one model's.
        if stored[0].get("setting") != setting:
            raise DitLoraError(
                f"{self.path} holds the answers of another model or setting "
                f"({_differences(stored[0].get('setting'), setting)}); choose another --out"
            )
        self.lines = {one["key"]: one for one in stored[1:]}

    def holds(self, key: str) -> bool:
        """Return true if the question was asked; one that failed is asked again."""
        return key in self.lines and "failed" not in self.lines[key]

    def add(self, key: str, line: Mapping[str, Any]) -> None:
        self.lines[key] = {"key": key, **line}
        data = json.dumps(self.lines[key], ensure_ascii=False) + "\n"
        with self.path.open("ab") as file:
            # In one write: a kill leaves at most one torn line, the last.
            file.write(data.encode("utf-8", errors="backslashreplace"))

    def _read(self) -> list[dict[str, Any]]:
        """Return the whole lines; a last one that a kill cut short is taken out of the file."""
        if not self.path.is_file():
            return []
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            write_whole(self.path, whole)
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise DitLoraError(
                f"{self.path} is damaged ({error}); remove it, and all questions are asked anew"
            ) from error


def _differences(stored: Any, setting: Mapping[str, Any]) -> str:
    stored = stored if isinstance(stored, dict) else {}
    names = [name for name in setting if stored.get(name) != setting[name]]
    return "; ".join(f"{name}: {stored.get(name)!r}, now {setting[name]!r}" for name in names)


def _key(question: Question) -> str:
    """Return a hash of everything that is asked, so that a question that changed is asked again."""
    what = [
        question.id,
        question.task,
        question.media.name,
        question.question,
        question.candidates,
        question.answer,
        question.start,
        question.end,
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _out(request: EvaluationRequest) -> Path:
    """Return a folder beside a run's results; for a checkpoint or an adapter alone, in the working folder."""
    name = f"evaluation_{request.data.stem}"
    if (request.target / "config.yaml").is_file():
        return request.target / name
    return Path(f"{request.target.name}_{name}")
