"""Settings of the process in which tests run (threads, signals, Triton, Hypothesis); servers."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from hypothesis import settings

# One thread computes, here and in processes that tests start. The models are tiny, and threads
# that wait for each other on cores that other tests use took most of a test's time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores interrupts in its background jobs, and the processes of a test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One definition of each fixture, so that one server serves all tests of a process.
pytest_plugins = ["tests.servers.mooncake", "tests.servers.seaweed", "tests.servers.valkey"]

# Registered before any test module imports these, so that their plain asserts show both sides.
pytest.register_assert_rewrite("kvferry.testing", "tests.store.file.storing")

# Triton decides at its first import whether kernels are interpreted. Where vLLM is tested, vLLM
# decides.
if not os.path.exists("/dev/nvidiactl") and importlib.util.find_spec("vllm") is None:
    os.environ["TRITON_INTERPRET"] = "1"

# Every run has the same examples, and no test fails because the machine is busy.
settings.register_profile("kvferry", deadline=None, derandomize=True)
settings.load_profile("kvferry")
