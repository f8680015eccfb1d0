"""Rewards on hand-chosen answers, right and wrong ones, and the service behind --rm-url."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

import harness
import rewards
from buffer import Dropped, Sample
from rewards import REWARDS


def score(name, label, response, **args):
    return REWARDS[name](SimpleNamespace(**args), Sample(0, 0, 7, "What?", label, [], response=response))


@pytest.mark.parametrize("label, right, wrong", [
    ("42", ["42", "The answer is 42.", "\\boxed{42}", "so $42$", "42.0", "\\boxed{\\frac{84}{2}}", "first 41, no: \\boxed{42}"],
     ["", "43", "\\boxed{43}", "42 or 43", "\\boxed{42} and then \\boxed{43}", "4 2", "I do not know", "\\boxed{}", "-42"]),
    ("\\frac{1}{2}", ["1/2", "0.5", "\\boxed{\\frac12}", "$\\frac{2}{4}$", "\\boxed{.5}", "\\boxed{50\\%}"],
     ["2", "1", "\\boxed{\\frac{2}{1}}", "0.51", "\\frac{1}{2"]),
    ("\\boxed{7}", ["7", "it is $7$"], ["70", "17"]),
    ("5 cm", ["5", "\\boxed{5\\text{ cm}}", "5 cm"], ["6 cm", "cm"]),
    ("1,000", ["1000", "1,000", "\\boxed{10^3}"], ["1", "10000"]),
    ("x^2-1", ["$(x-1)(x+1)$", "\\boxed{-1+x^2}"], ["\\boxed{x^2+1}", "\\boxed{x-1}"]),
    ("(1,2)", ["\\boxed{(1, 2)}"], ["\\boxed{(2, 1)}", "\\boxed{1}"]),
    ("\\{1,2\\}", ["\\boxed{\\{2, 1\\}}", "\\boxed{1, 2}"], ["\\boxed{\\{1\\}}"]),
    ("2\\sqrt{2}", ["\\boxed{\\sqrt{8}}"], ["\\boxed{\\sqrt{2}}", "2"]),
    ("x=3", ["3", "\\boxed{x = 3}"], ["\\boxed{x=4}"]),
    ("90^\\circ", ["90", "\\boxed{90^\\circ}"], ["9"]),
    ("She has 9 + 9 = 18 eggs.\n#### 18", ["18", "\\boxed{18}", "18 eggs"], ["9", "\\boxed{9}"]),
    ("\\text{Tuesday}", ["\\boxed{\\text{Tuesday}}"], ["\\boxed{\\text{Monday}}"]),
])
def test_mathematics(label, right, wrong):
    assert [score("math", label, response) for response in right] == [1.0] * len(right), right
    assert [score("math", label, response) for response in wrong] == [0.0] * len(wrong), wrong


@pytest.mark.parametrize("label", ["", "  ", "#### "])
def test_a_label_that_is_no_answer_ends_the_run(label):
    with pytest.raises(ValueError, match="--rm-type math: the label of row 7 cannot be read: "):
        score("math", label, "42")


def test_answers_that_take_for_ever_are_wrong_and_bounded():
    before = time.time()
    for response in ("\\boxed{9^{9^{9^{9}}}}", "\\boxed{(10^{100000})!}", "(" * 5000, "\\boxed{" * 3000, "1" * 100000):
        assert score("math", "42", response) == 0.0
    assert time.time() - before < 60
    assert score("math", "42", "42") == 1.0


@pytest.mark.drill
@pytest.mark.parametrize("body, status", [("while True: pass", None), ("sys.exit(3)", 3)])
def test_a_checker_that_hangs_or_dies_is_replaced(body, status, monkeypatch, tmp_path):
    """This file as the checker, with less time, and with a math_verify that hangs in spite of its limit, or ends the process."""
    program = tmp_path / "checker.py"
    program.write_text(Path(rewards.__file__).read_text().replace("CPU_SECONDS = 10", "CPU_SECONDS = 0.3"))
    (tmp_path / "math_verify.py").write_text(f"import sys\ndef parse(*_, **__):\n    {body}\nverify = parse\n")
    while not rewards.CHECKERS.empty():
        rewards.CHECKERS.get()
    rewards.CHECKERS.put(None)
    with monkeypatch.context() as patch:
        patch.setattr(rewards, "__file__", str(program))
        patch.setenv("PYTHONPATH", f"{tmp_path}:{harness.ROOT}")
        before = time.time()
        if status is None:
            assert score("math", "42", "42") == 0.0, "killed by its timer: not a right answer"
        else:
            with pytest.raises(RuntimeError, match="--rm-type math: the checker ended with status 3"):
                score("math", "42", "42")
        assert time.time() - before < 8
    assert score("math", "42", "42") == 1.0, "the next one is sound"


def test_mathematics_beside_each_other():
    """Forty threads, as many checkers as cores: nobody gets another's verdict."""
    pairs = [(str(i % 5), str(i % 3)) for i in range(40)]
    with ThreadPoolExecutor(40) as pool:
        got = list(pool.map(lambda pair: score("math", *pair), pairs))
    assert got == [float(label == answer) for label, answer in pairs]


def test_a_checker_ends_with_its_owner():
    process = subprocess.Popen([sys.executable, rewards.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write(json.dumps(["1", "1"]) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "true\n"
    process.stdin.close()
    assert process.wait(10) == 0


@pytest.mark.parametrize("label, right, wrong", [
    ("B", ["B", "b", "(B)", "B.", "**B**", "Answer: B", "The answer is B", "the answer is (B), since A is not",
           "The correct option is B.", "\\boxed{B}", "\\boxed{\\text{B}}", "$\\boxed{(b)}$", "A would be wrong.\nAnswer: B", "A\nNo:\nB",
           "answer: **B) Paris**", "Answer: A\nOn reflection, the answer is B."],
     ["", "A", "Answer: A", "The answer is a bird", "Between A and B", "BB", "Answer: Because", "\\boxed{AB}",
      "The answer is B. Or rather:\nC", "Bob", "The answer isn't clear, B'"]),
    ("(c)", ["C", "option C"], ["B"]),
])
def test_multiple_choice(label, right, wrong):
    assert [response for response in right if score("multiple_choice", label, response) != 1.0] == []
    assert [response for response in wrong if score("multiple_choice", label, response) != 0.0] == []


def test_a_label_that_is_no_letter_ends_the_run():
    with pytest.raises(ValueError, match="--rm-type multiple_choice: the label of row 7 is 'Paris', not a letter"):
        score("multiple_choice", "Paris", "B")


def test_exact_and_regex():
    assert score("exact", "42", " 42\n") == 1.0 and score("exact", "42", "42.") == 0.0
    pattern = r"<answer>(.*?)</answer>"
    for response, want in (("<answer>42</answer>", 1.0), ("<answer> 42\n</answer> done", 1.0), ("<answer>\n42</answer>", 1.0),
                           ("<answer>1</answer><answer>42</answer>", 1.0), ("<answer>42</answer><answer>1</answer>", 0.0),
                           ("42", 0.0), ("<answer>42", 0.0)):
        assert score("regex", "42", response, rm_regex=pattern) == want, response
    assert score("regex", "42", "41, then 42", rm_regex=r"\d+") == 1.0 and score("regex", "4", "42", rm_regex=r"\d+") == 0.0


# ---- a service --------------------------------------------------------------------------------------------
@pytest.fixture
def service():
    """(url, requests so far, answers to come): a service that answers as it is told, [status, text] one after the other."""
    asked, answers = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, text = answers.pop(0) if len(answers) > 1 else answers[0]
            if status is None:
                time.sleep(2)
                status = 200
            self.send_response(status)
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score", asked, answers
    server.shutdown()


def test_a_service_gets_the_sample_and_says_the_reward(service, monkeypatch):
    url, asked, answers = service
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")                   # must not be asked
    answers.append((200, "0.25"))
    sample = Sample(0, 0, 7, "What?", "42", [], {"level": 3}, response="forty-two")
    assert REWARDS["remote_rm"](SimpleNamespace(rm_url=url, reward_timeout=5), sample) == 0.25
    assert asked == [{"prompt": "What?", "response": "forty-two", "label": "42", "metadata": {"level": 3}}]


@pytest.mark.drill
@pytest.mark.parametrize("status, error", [(400, Dropped), (404, Dropped), (429, OSError), (500, OSError), (503, OSError)])
def test_what_is_tried_again_and_what_is_not(status, error, service):
    url, _, answers = service
    answers.append((status, "no such model"))
    with pytest.raises(error, match=str(status)):
        score("remote_rm", "42", "42", rm_url=url, reward_timeout=5)


@pytest.mark.drill
def test_a_service_that_is_slow_or_away_is_bounded(service):
    url, _, answers = service
    answers.append((None, "1"))
    before = time.time()
    with pytest.raises(OSError):
        score("remote_rm", "42", "42", rm_url=url, reward_timeout=0.3)
    with pytest.raises(OSError):
        score("remote_rm", "42", "42", rm_url="http://127.0.0.1:9/", reward_timeout=5)
    assert time.time() - before < 2
