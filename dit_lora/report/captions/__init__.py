"""The page of a folder's captions, for viewing and, when served, for editing."""
