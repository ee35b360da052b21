"""A plugin of an application: its tasks are the story's, and know nothing of locks."""
