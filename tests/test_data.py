"""Generated tasks of reasoning-gym as prompts and rewards."""

from types import SimpleNamespace

import pytest

import harness      # noqa: F401  (puts scripts/ on the path)
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
