"""The parts of the guard that watch a loop that is not ours."""
