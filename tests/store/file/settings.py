"""Settings of directory stores for tests on busy machines and tests that wait for timed work."""

from kvferry.store.file.settings import FileBounds, FileSettings

PATIENT = FileSettings(bounds=FileBounds(lock_seconds=60.0, room_seconds=60.0))
"""No thread gives up because the machine is busy."""

SHORT_RESTS = FileSettings(bounds=FileBounds(compare_seconds=0.1, rest_factor=1.0))
"""Comparisons follow each other soon, however long a busy machine took for one."""

FAST = FileSettings(
    bounds=FileBounds(compare_seconds=0.1, rest_factor=1.0, tick_seconds=0.05, clean_seconds=1.0)
)
"""The other timed work comes soon, too."""
