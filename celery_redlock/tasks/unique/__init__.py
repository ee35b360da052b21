"""Read first."""
