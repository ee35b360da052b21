"""The lock in a task's life."""
