"""The command line: each command is a function that `main` registers. Slow imports are inside the
functions that need them, so that neither the help nor another command waits for them."""
