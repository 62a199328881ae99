"""Audit: every clip, caption and label is judged before any GPU time is spent on it."""
