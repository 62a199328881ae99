"""Captions: encoding one at a time, chat templates, and truncation by masks."""
