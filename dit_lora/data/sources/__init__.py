"""Folders, tables, tars and data sets that hold clips and captions."""
