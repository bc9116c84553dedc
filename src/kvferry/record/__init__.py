"""The format of a stored chunk: header, components, leaves, checksums. Arithmetic; no I/O."""
