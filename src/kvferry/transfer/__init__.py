"""Reads records by key from the memory of another process, over a connection."""
