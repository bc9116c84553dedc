"""Headless Chromium for tests of pages: the machine's own, or the one in Debian's packages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.debian import environment, unpacked

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run a browser for the block. Fails the test if there is none and none can be fetched."""
    program, its_environment = next(filter(None, map(shutil.which, NAMES)), None), dict(os.environ)
    if program is None:
        root = unpacked("chromium-headless-shell")
        program = str(root / "usr/lib/chromium/chromium-headless-shell")
        its_environment = environment(root)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=program, env=its_environment, args=["--no-sandbox"], timeout=120_000
        )
        try:
            yield running
        finally:
            running.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running
