"""Sound of a video: measured once, and checked for recipes that train it.

Nothing here needs torch, so that the audit's worker processes start quickly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import av
import numpy as np

from dit_lora.data.audit.finding import AuditedSample, Finding
from dit_lora.data.media.media import Media
from dit_lora.data.media.opened import get_error_message, open_media
from dit_lora.data.media.sound_stream import explain_no_sound, explain_short_sound, iter_audio_frames

# Maximum level of silence. One step of 16 bits is 3e-5; dithered silence, and silence encoded as AAC, is below this.
_MAX_SILENCE = 1e-4
# A clipped wave stays at full level; an unclipped one of 100 Hz at 44.1 kHz is there for less than three samples.
_FULL, _RUN = 0.9999, 3
_MAX_CLIPPED_SHARE = 1e-3


def measure_sound(media: Media, first_frame_s: float, heartbeat: Callable[[], None]) -> dict[str, Any] | None:
    """Measurements of a video's sound, or None; `first_frame_s` is the time of its first frame, in seconds."""
    facts: dict[str, Any] = {}
    samples = clipped = 0
    peak = 0.0
    try:
        with open_media(media) as container:
            to_floats = av.AudioResampler(format="fltp")
            for frame in iter_audio_frames(container):
                heartbeat()
                if not facts:
                    start_s = (frame.time or 0.0) - first_frame_s
                    rate, channels = frame.sample_rate, frame.layout.nb_channels
                    facts |= {"rate": rate, "channels": channels, "begins": round(start_s, 3)}
                    end_s = start_s
                # A frame without a time stamp follows the previous one.
                frame_start_s = end_s if frame.time is None else frame.time - first_frame_s
                end_s = frame_start_s + frame.samples / frame.sample_rate
                # Written in every iteration, so that a file that fails later still has the part that was decoded.
                facts["ends"] = round(end_s, 3)
                # (channels, samples); the loudest channel counts.
                for converted in to_floats.resample(frame):
                    levels = np.abs(converted.to_ndarray()).max(axis=0)
                    peak, samples = max(peak, float(levels.max())), samples + len(levels)
                    # Count the samples that begin a run at full level. The padding gives one window for each sample;
                    # the windows that reach into it are never full.
                    is_full = np.concatenate([levels >= _FULL, np.zeros(_RUN - 1, bool)])
                    clipped += int(np.lib.stride_tricks.sliding_window_view(is_full, _RUN).all(axis=1).sum())
    except (av.error.FFmpegError, OSError, ValueError) as error:
        facts["fault"] = get_error_message(error)
    if not facts:
        return None
    return {**facts, "peak": round(peak, 5), "clipped": round(clipped / max(1, samples), 5)}


def check_sound(facts: Mapping[str, Any], frames: int, fps: float) -> Iterator[Finding]:
    """Yield findings about the sound of `frames` frames at `fps`, for a recipe that trains sound."""
    sound = facts.get("sound")
    if not sound:
        yield _make_rejection(explain_no_sound("seconds" not in facts), "remove it, or add its sound")
        return
    if "fault" in sound:
        message = f"sound_corrupt: its sound cannot be decoded: {sound['fault']}"
        yield _make_rejection(message, "encode it again, or remove it")
        return
    # The message begins with the code of the finding and a colon.
    short = explain_short_sound(sound["ends"], frames, fps)
    if short:
        yield _make_rejection(short, "lower data.frames, or remove it")
    if sound["peak"] < _MAX_SILENCE:
        message = "its sound is silent from beginning to end, and the model would learn that"
        yield Finding("sound_silent", message, "warn", "remove it, unless it is intended")
    if sound["clipped"] > _MAX_CLIPPED_SHARE:
        message = f"its sound is cut off at the full level for {sound['clipped']:.1%} of its time"
        yield Finding("sound_clipped", message, "warn", "use a quieter copy, or remove it")


def _make_rejection(text: str, remedy: str) -> Finding:
    """Finding that rejects a sample, from a message that begins with its code and a colon."""
    code, _, message = text.partition(": ")
    return Finding(code, message, "reject", remedy)


def summarise_sound(samples: Sequence[AuditedSample]) -> list[str]:
    """A line that says how many clips of a set have sound; empty without clips."""
    # Images have no duration, and no sound.
    clips = [sample for sample in samples if "seconds" in sample.facts]
    heard = sum(1 for sample in clips if sample.facts.get("sound"))
    return [f"sound: {heard:,} of {len(clips):,} clips have sound"] if clips else []
