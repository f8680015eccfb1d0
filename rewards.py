"""Rewards: plain functions (args, sample) -> float. `sample.response` is the decoded answer, `sample.label` the reference.

An own reward goes by --custom-rm-path module.function, with the same two arguments (with --group-rm: args and the list of
a group's samples, returning a list); it may be `async`.
"""


def exact(args, sample):
    """1.0 if the answer is the label, white space at both ends aside, else 0.0."""
    return float(sample.response.strip() == str(sample.label).strip())


def reasoning_gym(args, sample):
    """The score that the task itself gives, 0.0 to 1.0; the data are --prompt-data reasoning-gym:TASK."""
    from reasoning_gym import get_score_answer_fn      # takes two seconds

    entry = {"question": sample.prompt, "answer": sample.label, "metadata": sample.metadata}
    return float(get_score_answer_fn(sample.metadata["source_dataset"])(sample.response.strip(), entry))


REWARDS = {"exact": exact, "reasoning_gym": reasoning_gym}
