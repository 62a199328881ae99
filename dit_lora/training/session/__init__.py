"""The processes of a run: launch, ranks, folder and lock."""
