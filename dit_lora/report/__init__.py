"""What a run did, as one HTML file that needs nothing beside it."""
