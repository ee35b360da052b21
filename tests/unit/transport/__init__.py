"""The transport over socket pairs: real sockets, and a server that says what a test wants."""
