"""What the beats of a story send; standard library only."""

EVERY = 2.0  # seconds between two sends
SCHEDULE = {"story": {"task": "story.work", "args": ["a"], "schedule": EVERY}}
