"""For all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Before any test module imports the kits: their plain asserts then show both sides.
pytest.register_assert_rewrite("kvferry.testing")

# The same examples in every run, and no failure because a machine was busy.
settings.register_profile("kvferry", deadline=None, derandomize=True)
settings.load_profile("kvferry")
