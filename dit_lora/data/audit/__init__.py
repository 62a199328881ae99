"""Audit: checks every clip, caption and label before any GPU time is spent on it."""
