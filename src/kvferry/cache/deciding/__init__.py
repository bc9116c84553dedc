"""The scheduler's half: what to load, save and compare. Memory only, and no tensors."""
