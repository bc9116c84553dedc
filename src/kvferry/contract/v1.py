"""The names of `kvferry.v1`, for code that still imports them from here.

They load on first use, since this package is below that one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.v1 import *  # noqa: F403


def __getattr__(name: str) -> object:
    value: object = getattr(importlib.import_module("kvferry.v1"), name)
    return value
