"""The processes of a run: launch, ranks, run folder and lock."""
