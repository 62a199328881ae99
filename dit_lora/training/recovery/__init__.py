"""The guard of a run: setup, preflight, recovery, and the files they write."""
