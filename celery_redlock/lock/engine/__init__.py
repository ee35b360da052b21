"""How one process acquires, renews and releases: its rounds over the nodes, and its threads."""
