"""Rewards: plain functions (args, sample) -> float. `sample.response` is the decoded answer, `sample.label` the reference.

An own reward goes by --custom-rm-path module.function, with the same two arguments (with --group-rm: args and the list of
a group's samples, returning a list); it may be `async`. A time-out or a connection that fails (OSError) is tried again, and
then drops the group; `raise Dropped(reason)` drops it at once; any other exception ends the run.

Run as a program, this file is a checker of mathematical answers: see `math_answer`.
"""

import contextlib
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys

from buffer import Dropped


def exact(args, sample):
    """1.0 if the answer is the label, white space at both ends aside, else 0.0."""
    return float(sample.response.strip() == str(sample.label).strip())


def regex(args, sample):
    """1.0 if the last match of --rm-regex in the answer is the label, else 0.0. With a group in it, the group counts."""
    found = re.findall(args.rm_regex, sample.response, re.DOTALL)
    return float(bool(found) and found[-1].strip() == sample.label.strip())


# a letter after "answer", "choice" or "option"; in \boxed{}; or alone on its line, but for brackets, stars and dots
CHOICE = re.compile(r"""(?i:answer|choice|option)\W*(?:(?i:is|are|would\ be)\W+)?(?:(?i:option|choice)\W+)?([A-Z])\b(?!['’])
                        | \\boxed\s*\{\W*(?:(?:text|mathrm|mathbf|textbf)\W*)?([A-Za-z])\W*\}
                        | ^\W*([A-Za-z])\W*$""", re.MULTILINE | re.VERBOSE)


def multiple_choice(args, sample):
    """1.0 if the last choice that the answer names is the label's letter, else 0.0. 'B', '(b)', 'Answer: B', 'the answer is
    **B**.' and '\\boxed{B}' all name B; a letter within a sentence names nothing."""
    found = [next(filter(None, letters)) for letters in CHOICE.findall(sample.response)]
    label = re.sub(r"\W", "", sample.label).upper()
    if len(label) != 1:
        raise ValueError(f"--rm-type multiple_choice: the label of row {sample.row} is {sample.label!r}, not a letter")
    return float(bool(found) and found[-1].upper() == label)


def reasoning_gym(args, sample):
    """The score that the task itself gives, 0.0 to 1.0; the data are --prompt-data reasoning-gym:TASK."""
    from reasoning_gym import get_score_answer_fn      # takes two seconds

    entry = {"question": sample.prompt, "answer": sample.label, "metadata": sample.metadata}
    return float(get_score_answer_fn(sample.metadata["source_dataset"])(sample.response.strip(), entry))


def remote_rm(args, sample):
    """What the service at --rm-url answers to a POST of {"prompt", "response", "label", "metadata"}: a JSON number. 4xx is
    final, all else is tried again."""
    import requests

    body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label, "metadata": sample.metadata}
    with requests.Session() as session:
        session.trust_env = False      # a proxy of the environment has no business here
        answer = session.post(args.rm_url, json=body, timeout=args.reward_timeout)
    if 400 <= answer.status_code < 500 and answer.status_code != 429:                # the request itself is wrong
        raise Dropped(f"error: --rm-url {args.rm_url} answered {answer.status_code}: {' '.join(answer.text.split())[:200]}")
    answer.raise_for_status()          # an OSError, as a refused connection is
    return answer.json()


# ---- mathematical answers ---------------------------------------------------------------------------------
CPU_SECONDS = 10                       # that one comparison may take; math-verify's own limits are 3 s each
CHECKERS = queue.LifoQueue()           # idle checkers, None for one that is still to be started; as many as there are cores
for _ in range(os.cpu_count() or 1):
    CHECKERS.put(None)


def math_answer(args, sample):
    """1.0 if the answer equals the label as a mathematical object, else 0.0: \\boxed{\\frac{1}{2}} is 0.5. By math-verify
    (https://github.com/huggingface/Math-Verify), which takes the last boxed expression, else what stands behind 'the answer is',
    else the last number. A label's rationale before '####' (GSM8K) is left out. ValueError for a label that cannot be read.

    It runs in a process of its own, since math-verify bounds its time by signals, which only a main thread gets. What cannot
    be compared within CPU_SECONDS is not a right answer: models find 9^9^9^9.
    """
    checker = CHECKERS.get()
    try:
        if checker is None or checker.poll() is not None:
            checker = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = ""
        with contextlib.suppress(BrokenPipeError):                 # it has died: said below
            checker.stdin.write(json.dumps([str(sample.label), sample.response]) + "\n")
            checker.stdin.flush()
            line = checker.stdout.readline()
    finally:
        CHECKERS.put(checker)
    if not line and (status := checker.wait()) != -signal.SIGPROF:
        raise RuntimeError(f"--rm-type math: the checker ended with status {status}; its output is in the log")
    verdict = json.loads(line) if line else False
    if verdict is None:
        raise ValueError(f"--rm-type math: the label of row {sample.row} cannot be read: {sample.label!r}")
    return float(verdict)


def check_math():
    """The checker: reads lines [label, answer], writes lines true, false, or null for an unreadable label. Ends with its owner,
    whose end of the pipe closes then; the timer's signal ends it where it hangs."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)      # of answers that are no mathematics
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        label, answer = json.loads(line)
        label = label.split("####")[-1].strip()
        gold = parse(label if "\\boxed" in label else f"\\boxed{{{label.strip('$')}}}", parsing_timeout=3) if label else []
        verdict = verify(gold, parse(answer, parsing_timeout=3), timeout_seconds=3) if gold else None
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


REWARDS = {"exact": exact, "regex": regex, "math": math_answer, "multiple_choice": multiple_choice,
           "reasoning_gym": reasoning_gym, "remote_rm": remote_rm}

if __name__ == "__main__":
    check_math()
