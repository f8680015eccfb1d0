"""The whole stack as a user starts it: scripts as subprocesses, SGLang and all. Slow, so only what needs it."""

import os
import re
import signal
import subprocess

import pytest

import harness
from buffer import Ledger


@pytest.mark.contract
def test_kill_9_with_a_real_engine_and_resume(tmp_path):
    """The server dies with the run, and the resumed run trains every prompt exactly once."""
    model = harness.make_model(tmp_path)
    settings = dict(num_rollout=12, save_interval=2, lr=1e-3)
    path = str(tmp_path / "runs" / "cut" / "ledger.jsonl")
    process = harness.start("train_async.py", harness.flags(model, tmp_path / "runs", "cut", **settings))
    harness.interrupt(process, lambda: any(r["event"] == "trained" and r["step"] == 4 for r in harness.read_jsonl(path)), signal.SIGKILL)
    harness.succeed("train_async.py", harness.flags(model, tmp_path / "runs", "cut", **settings, load=str(tmp_path / "runs" / "cut")))
    outcomes = Ledger.outcomes(path)
    assert len(outcomes) == 48 and all(group["outcome"] == "trained" for group in outcomes.values())
    assert [row["step"] for row in harness.metrics(tmp_path / "runs", "cut")] == list(range(12))
    assert all(row["train/logprob_abs_diff"] < 0.5 for row in harness.metrics(tmp_path / "runs", "cut"))


@pytest.mark.contract
@pytest.mark.slow
def test_quick_start_learns(tmp_path):
    """The first 40 of its steps, from another folder: the evaluation rises, lags are 0 and then 1, and the last line says so."""
    done = subprocess.run(["bash", os.path.join(harness.ROOT, "scripts", "quickstart.sh"), "--num-rollout", "40", "--output-dir",
                           str(tmp_path), "--run-name", "quick"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = map(float, re.fullmatch(r"eval_reward (\d\.\d+) -> (\d\.\d+)", done.stdout.strip().splitlines()[-1]).groups())
    assert after - before > 0.1
    rows = harness.metrics(tmp_path, "quick")
    assert [(row["staleness/min"], row["staleness/max"]) for row in rows] == [(0, 0)] + [(1, 1)] * 39
    for key in ("step", "version", "rollout/reward", "rollout/response_len", "staleness/min", "staleness/max", "perf/wait_prev_gen",
                "perf/step_time", "perf/train_time", "sync/time", "sync/bytes", "train/logprob_abs_diff"):
        assert all(key in row for row in rows), key
