"""What a lock costs, as ratios to the least that its I/O can cost."""
