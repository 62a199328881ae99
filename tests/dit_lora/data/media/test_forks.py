"""A forked process frees nothing of FFmpeg's that it has inherited: the threads that belong to it are not there."""

import gc
import os
import signal
import time

import av
import numpy as np

import dit_lora.data.media.opened  # noqa: F401  # sets up forks


def test_a_fork_does_not_wait_for_the_threads_of_its_parents_frames() -> None:
    gc.disable()
    try:
        for _ in range(8):
            frame = av.VideoFrame.from_ndarray(np.zeros((512, 512, 3), np.uint8), format="rgb24")
            references: list[object] = [
                frame,
                frame.reformat(width=256, height=256, format="yuv420p", threads=4),
            ]
            references.append(references)  # a circle, which the collector alone frees
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        ends = time.monotonic() + 60
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > ends:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError("it waits for ever")
            time.sleep(0.01)
    finally:
        gc.enable()
