"""Where records are kept: the store contract, the embedded directory store, memory, wrappers."""
