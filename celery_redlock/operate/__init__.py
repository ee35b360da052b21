"""For people who run it."""
