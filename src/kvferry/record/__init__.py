"""What a stored chunk is: header, components, leaves, checksums. Arithmetic only; no I/O."""
