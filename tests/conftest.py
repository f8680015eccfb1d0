"""Fixtures that several test files share."""

import pytest

import harness


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A Hugging Face folder of a random tiny model and its tokenizer, with train.jsonl and eval.jsonl. Read only."""
    return harness.make_model(tmp_path_factory.mktemp("tiny_model"))
