"""Records in the memory of another process, read by key over a connection."""
