"""Fixtures that several test files share."""

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")     # before torch: on few cores, threads that spin as they wait starve others

import pytest

import harness


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A Hugging Face folder of a random tiny model and its tokenizer, with train.jsonl and eval.jsonl. Read only."""
    return harness.make_model(tmp_path_factory.mktemp("tiny_model"))

# A shell's background job ignores Ctrl-C, and so would the runs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
