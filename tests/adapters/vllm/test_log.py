"""kvferry's lines stand where vLLM's do."""

from __future__ import annotations

import io
import logging

from kvferry.adapters.vllm.connector import log_as


def make_logger(level: int, *handlers: logging.Handler) -> logging.Logger:
    logger = logging.Logger("test")  # noqa: LOG001 - of this test alone
    logger.setLevel(level)
    logger.handlers = list(handlers)
    return logger


def test_answers_at_debug_are_in_the_log_of_the_host():
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    host, ours = make_logger(logging.DEBUG, handler), make_logger(logging.NOTSET)
    log_as(host, ours)
    log_as(host, ours)
    ours.debug("request 1")
    assert text.getvalue() == "request 1\n"
    host.setLevel(logging.INFO)
    quiet = make_logger(logging.NOTSET)
    log_as(host, quiet)
    quiet.debug("request 2")
    assert text.getvalue() == "request 1\n"


def test_a_logger_that_was_set_up_is_left_alone():
    own, host = logging.NullHandler(), make_logger(logging.DEBUG, logging.StreamHandler())
    for ours in (make_logger(logging.NOTSET, own), make_logger(logging.ERROR)):
        before = (ours.level, ours.handlers)
        log_as(host, ours)
        assert (ours.level, ours.handlers) == before
