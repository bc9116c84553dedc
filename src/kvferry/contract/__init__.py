"""The contract between a host engine and a connector, which is a scheduler role and a worker role:
their methods and messages, the order of a step, guards, and the fold of all ranks' outputs."""
