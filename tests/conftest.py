"""For all tests."""

from __future__ import annotations

import pytest

# Before any test module imports the kits: their plain asserts then show both sides.
pytest.register_assert_rewrite("kvferry.testing")
