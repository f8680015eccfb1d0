"""Rewards: plain functions (args, sample) -> float. `sample.response` is the decoded answer, `sample.label` the reference.

An own reward goes by --custom-rm-path module.function, with the same two arguments (with --group-rm: args and the list of
a group's samples, returning a list); it may be `async`.
"""


def exact(args, sample):
    """1.0 if the answer is the label, white space at both ends aside, else 0.0."""
    return float(sample.response.strip() == str(sample.label).strip())


REWARDS = {"exact": exact}
