"""The page of a folder's captions, to look at and, served, to edit."""
