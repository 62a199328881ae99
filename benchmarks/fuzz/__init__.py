"""Damaged input for every parser of files that strangers may have written; see `__main__`."""
