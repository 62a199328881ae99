"""Readers of clips and captions from folders, tables, tars and datasets."""
