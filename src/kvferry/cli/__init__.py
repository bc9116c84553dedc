"""The command line. A function imports what takes long to load, so that no other command waits for
it, nor the help."""
