"""Prompts: files, folders as on the hub, chat messages, and the generated tasks of reasoning-gym with their rewards."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

import harness      # puts scripts/ on the path
import hub
import make_tiny_model
from buffer import Sample
from data import PromptRows, load_rows
from rewards import REWARDS

TASK = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
ARGS = SimpleNamespace(input_key="prompt", label_key="label", metadata_key=None, custom_rm_path=None, apply_chat_template=False)


def test_a_generated_task_has_prompts_labels_and_its_own_score():
    """The label is the sum that the prompt asks for, by Python's own arithmetic; the task's score takes '7', '7.' and '07' for 7,
    gives a part for an answer that holds it among other words, and 0 for one without it."""
    rows = PromptRows(f"{TASK}&size=20&seed=1", ARGS, make_tiny_model.build_tokenizer())
    assert len(rows) == 20 and rows[3] == rows[3]
    for i in range(20):
        row = rows[i]
        question = row["prompt"].removeprefix("State the final answer to the following arithmetic problem: ").removesuffix(" =")
        left, sign, right = question.split()
        assert int(row["label"]) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        assert row["metadata"]["source_dataset"] == "chain_sum"
        label = row["label"]
        for response, want in ((label, 1.0), (f" {label}.", 1.0), ("none", 0.0),
                               (f"it is {label}", len(label) / len(f"it is {label}"))):
            sample = Sample(0, 0, i, row["prompt"], label, row["prompt_tokens"], row["metadata"], response=response)
            assert REWARDS["reasoning_gym"](ARGS, sample) == pytest.approx(want), (response, label)


@pytest.mark.parametrize("path, text", [("reasoning-gym:no_such_task", "no_such_task"), (f"{TASK}&no_option=1", "no_option"),
                                        (f"{TASK}&size=many", "Expecting value")])
def test_a_task_that_does_not_exist_is_one_line_with_the_flag(path, text):
    with pytest.raises(ValueError, match=f"--prompt-data reasoning-gym:.*{text}") as error:
        load_rows(path, ARGS, "--prompt-data")
    assert "\n" not in str(error.value)


# ---- files, folders laid out as on the hub, chat messages --------------------------------------------------
ROWS = [{"question": f"{i}+1", "answer": str(i + 1), "extra": {"level": i}} for i in range(5)]
KEYS = SimpleNamespace(**{**vars(ARGS), "input_key": "question", "label_key": "answer", "metadata_key": "extra"})


def write(tmp_path, kind):
    """The five rows in the given form. Returns the path for --prompt-data."""
    import datasets

    table, text = datasets.Dataset.from_list(ROWS), "".join(json.dumps(row) + "\n" for row in ROWS)
    if kind == "parquet":
        table.to_parquet(str(tmp_path / "rows.parquet"))
        return str(tmp_path / "rows.parquet")
    if kind == "hub":              # a repository of the hub has such a folder: two configurations, two splits
        folder = tmp_path / "sums"
        (folder / "main").mkdir(parents=True)
        (folder / "main" / "train.jsonl").write_text(text.replace("+1", "+0"))
        (folder / "main" / "test.jsonl").write_text(text)
        files = "".join(f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test"))
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
        return f"{folder}?name=main&split=test"
    (tmp_path / f"rows.{kind}").write_text(text)
    return str(tmp_path / f"rows.{kind}")


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "hub"])
def test_every_source_gives_the_same_prompts(kind, tmp_path):
    rows = PromptRows(write(tmp_path, kind), KEYS, make_tiny_model.build_tokenizer())
    assert len(rows) == 5
    for i in range(5):
        want = {"prompt": f"{i}+1", "label": str(i + 1), "metadata": {"level": i}}
        assert {name: rows[i][name] for name in want} == want and len(rows[i]["prompt_tokens"]) == 3


def test_a_part_of_a_split(tmp_path):
    path = write(tmp_path, "hub").replace("split=test", "split=test[1:3]")
    assert [row["question"] for row in load_rows(path, KEYS, "--prompt-data")] == ["1+1", "2+1"]


@pytest.mark.parametrize("options, text", [("name=other", "other"), ("split=validation", "validation"),
                                           ("name", "bad query field")])
def test_a_set_that_is_not_there_is_one_line_with_the_flag(options, text, tmp_path):
    path = write(tmp_path, "hub").partition("?")[0] + "?" + options
    with pytest.raises(ValueError, match="--prompt-data .*sums.*: ") as error:
        load_rows(path, KEYS, "--prompt-data")
    assert text in str(error.value).split(f"{options}: ")[1] and "\n" not in str(error.value)


def test_a_name_of_the_hub_that_does_not_exist_is_one_line(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="--prompt-data nobody/no-such-set: .*nobody/no-such-set") as error:
        load_rows("nobody/no-such-set", KEYS, "--prompt-data")
    assert "\n" not in str(error.value)


LOADER = """
import json, sys, time, types
import data
data.HUB_SECONDS, started = 1, time.time()
args = types.SimpleNamespace(input_key="question", label_key="answer", metadata_key=None, custom_rm_path=None)
try:
    print(json.dumps(list(data.load_rows(sys.argv[1], args, "--prompt-data"))))
except ValueError as error:
    print(f"{time.time() - started:.1f}|{error}")
"""


def load_from(endpoint, path, cache):
    """What a process of its own prints: the libraries read HF_ENDPOINT and HF_HOME when they are imported."""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "PYTHONPATH": harness.ROOT}
    got = subprocess.run([sys.executable, "-c", LOADER, path], env=env, capture_output=True, text=True, timeout=60)
    assert got.returncode == 0 and not got.stderr, got.stderr
    return got.stdout.strip()


def test_a_set_of_the_hub_is_loaded_and_later_found_without_it(tmp_path):
    """From a hub on this machine, the second split of two; then from the cache, with nobody at the hub's address."""
    write(tmp_path, "hub")
    files = {name: (tmp_path / "sums" / name).read_bytes() for name in ("README.md", "main/train.jsonl", "main/test.jsonl")}
    server, endpoint = hub.start("someone/sums", files)
    with server:
        assert json.loads(load_from(endpoint, "someone/sums?name=main&split=test", tmp_path / "cache")) == ROWS
        assert f"GET /datasets/someone/sums/resolve/{hub.SHA}/main/test.jsonl" in server.asked
        said = load_from(endpoint, "someone/none", tmp_path / "cache")
        assert "--prompt-data someone/none: Dataset 'someone/none' doesn't exist on the Hub" in said
        server.shutdown()
    assert json.loads(load_from(endpoint, "someone/sums?name=main&split=test", tmp_path / "cache")) == ROWS


@pytest.mark.parametrize("reason", ["ConnectionError", "ReadTimeout"])
def test_a_hub_out_of_reach_is_one_line_within_seconds(reason, tmp_path):
    """Nobody listens at its address; or it takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if reason == "ConnectionError":
            silent.close()
        seconds, said = load_from(address, "someone/sums", tmp_path).split("|")
    assert float(seconds) < 10
    assert said.startswith(f"--prompt-data someone/sums: {address} cannot be reached ({reason}), and 'someone/sums' is neither a "
                           f"folder here nor in the cache {tmp_path}") and "HF_ENDPOINT" in said and "\n" not in said


@pytest.mark.parametrize("prompt, messages", [
    ("2+3?", [{"role": "user", "content": "2+3?"}]),
    ([{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3?"}],) * 2])
def test_chat_prompts_are_rendered_and_kept_as_messages(prompt, messages, tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": prompt, "label": "5"}) + "\n")
    args = SimpleNamespace(**{**vars(ARGS), "apply_chat_template": True, "apply_chat_template_kwargs": {"mark": "!"}})
    tokenizer = make_tiny_model.build_tokenizer()
    tokenizer.chat_template += "{% if mark is defined %}{{ mark }}{% endif %}"
    row = PromptRows(str(tmp_path / "chat.jsonl"), args, tokenizer)[0]
    want = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n!"
    assert row["prompt"] == want and tokenizer.decode(row["prompt_tokens"]) == want
    assert row["metadata"] == {"prompt_messages": messages}
