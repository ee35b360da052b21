"""The example shop: orders that lose updates without the lock, and none with it."""
