"""The scheduler's half: decides what to load, save and compare. It never sees a tensor."""
