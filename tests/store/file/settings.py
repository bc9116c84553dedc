"""Settings of stores whose tests run on a busy machine, or wait for what happens by the clock."""

from kvferry.store.file.settings import FileBounds, FileSettings

PATIENT = FileSettings(bounds=FileBounds(lock_seconds=60.0, room_seconds=60.0))
"""No thread gives up because the machine was busy."""

SHORT_RESTS = FileSettings(bounds=FileBounds(compare_seconds=0.1, rest_factor=1.0))
"""Comparisons follow each other at once, however long a busy machine took for one."""

FAST = FileSettings(
    bounds=FileBounds(compare_seconds=0.1, rest_factor=1.0, tick_seconds=0.05, clean_seconds=1.0)
)
"""All that happens by the clock is faster, too."""
