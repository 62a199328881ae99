"""Says what a run has made when it has ended."""

from pathlib import Path

from dit_lora.adapters.diffusers_format import BASE_FILE
from dit_lora.files import read_lines
from dit_lora.results.verify.verify import Verification
from dit_lora.training.journal import held_out_losses
from dit_lora.training.session.session import Session


def summary(
    session: Session, adapter: Path, verification: Verification | None, report: Path | None
) -> str:
    """Return lines on what the run made, where, and by how much the held-out loss fell."""
    losses = held_out_losses(session.dir)
    kind = "model" if session.recipe.train.mode == "full" else "adapter"
    lines = [f"{kind + ':':9}{adapter}", *([f"report:  {report}"] if report else [])]
    base = adapter.with_name(BASE_FILE)
    if base.exists() and base != adapter:
        lines.insert(
            1, f"base weights: {base}: load these too, before the adapter (docs/design.md)"
        )
    if len(losses) > 1:
        first, last = losses[min(losses)], losses[max(losses)]
        change = 100 * (last / first - 1)
        lines.append(f"held-out loss: {first:.4f} before, {last:.4f} after ({change:+.1f}%)")
    # Of the whole run, resumes included: the file has a line for each step taken.
    waited, spent = (
        sum(line[name] for line in read_lines(session.dir / "metrics.jsonl")[0])
        for name in ("data_seconds", "seconds")
    )
    if spent:
        lines.append(f"waiting for data: {waited / spent:.0%} of {spent:.0f} s of steps")
    if verification is not None:
        lines.append(verification.line())
    return "\n".join(lines)
