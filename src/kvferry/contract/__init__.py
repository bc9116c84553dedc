"""What a host engine and a connector promise each other: two roles, a plan down, an output up, the
order of a step, and the fold of all ranks' outputs."""

from kvferry.moved import moved_names

__getattr__ = moved_names(__name__)
