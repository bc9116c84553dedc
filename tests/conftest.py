"""For all tests."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from hypothesis import settings

# One thread for computing, here and in processes that tests start: models of tests are tiny, and
# threads that wait for each other on cores that other tests use took most of the time of a test.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts jobs in its background with interrupts ignored, and the processes of a test would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before any test module imports the kits: their plain asserts then show both sides.
pytest.register_assert_rewrite("kvferry.testing", "tests.store.file.storing")

# Triton decides as it is loaded, by whoever loads it first, whether kernels are interpreted. Where
# vLLM is tested, it is vLLM's to decide.
if not os.path.exists("/dev/nvidiactl") and importlib.util.find_spec("vllm") is None:
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples in every run, and no failure because a machine was busy.
settings.register_profile("kvferry", deadline=None, derandomize=True)
settings.load_profile("kvferry")
