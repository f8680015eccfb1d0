"""The whole stack as a user starts it: scripts as subprocesses, SGLang and all. Slow, so only what needs it."""

import os
import random
import re
import signal
import subprocess
import time

import psutil
import pytest

import harness
from buffer import Ledger


@pytest.mark.drill
@pytest.mark.contract
def test_kill_9_with_a_real_engine_and_resume_with_one_that_hangs(tmp_path):
    """The server dies with the run, and the resumed run trains every prompt exactly once. OFFBEAT_STACK_KILLS=6 asks for more
    kills than one, each at the n-th record of a kind behind a save.
    In the resumed run the server's scheduler is stopped, while its HTTP side goes on answering: only a token that does not come
    can tell. The run waits for the new server, which joins the group, gets the weights, proves them, and serves."""
    path, told = tmp_path / "runs" / "cut" / "ledger.jsonl", []

    def of_run(event):
        return [r for r in harness.read_jsonl(path) if r["event"] == event]

    def run_with_a_hang(script, words):
        before = len(of_run("trained"))
        process = harness.start(script, words)
        deadline = time.time() + 200
        while len(of_run("trained")) < before + 2 and process.poll() is None and time.time() < deadline:
            time.sleep(0.01)
        family = psutil.Process(process.pid).children(recursive=True)
        schedulers = [p for p in family if "sglang::scheduler" in " ".join(p.cmdline())]
        assert len(schedulers) == 1, process.communicate(timeout=60)[0][-3000:]
        schedulers[0].suspend()
        told.append(time.time())
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output[-3000:]
        assert not schedulers[0].is_running()

    kill_and_resume(tmp_path, int(os.environ.get("OFFBEAT_STACK_KILLS", 1)), run_with_a_hang, rollout_max_response_len=24,
                    rollout_health_check_interval=0.5, rollout_health_check_timeout=3, update_weight_timeout=10)
    resumed = of_run("resume")[-1]["time"]                # the manager that was killed may have seen its engine die before it
    states = [r for r in of_run("engine") if r["time"] > resumed]
    assert [r["state"] for r in states] == ["lost", "ready", "up"]
    times = [r["time"] - told[0] for r in states]
    print(f"noticed after {times[0]:.1f} s ({states[0]['why'][:120]}), up again after {times[2]:.1f} s")
    assert 0 < times[0] < 60


def kill_and_resume(folder, kills, last=harness.succeed, **flags):
    """last(script, words): the run that nobody kills."""
    model, draw, out = harness.make_model(folder), random.Random(0), folder / "runs"
    settings, load = dict(num_rollout=8, save_interval=2, lr=1e-3, **flags), {}
    path = str(out / "cut" / "ledger.jsonl")
    for _ in range(kills):
        event, count, before = draw.choice(("draw", "submit", "finish", "batch", "trained", "sync")), draw.randint(1, 4), None

        def come():
            nonlocal before
            records = harness.read_jsonl(path)
            if before is None and any(r["event"] == "save" for r in records) and (not load or records[-1]["event"] != "resume"):
                before = len(records)
            return before is not None and sum(r["event"] == event for r in records[before:]) >= count

        process = harness.start("train_async.py", harness.flags(model, out, "cut", **settings, **load))
        harness.interrupt(process, come, signal.SIGKILL, timeout=300)
        print(f"killed at the {count}. {event} behind a save, after step {len(harness.metrics(out, 'cut'))}")
        load, settings["num_rollout"] = {"load": str(out / "cut")}, settings["num_rollout"] + 6
    last("train_async.py", harness.flags(model, out, "cut", **settings, **load))
    outcomes, steps = Ledger.outcomes(path), settings["num_rollout"]
    assert len(outcomes) == 4 * steps and all(group["outcome"] == "trained" for group in outcomes.values())
    assert [row["step"] for row in harness.metrics(out, "cut")] == list(range(steps))
    assert all(row["train/logprob_abs_diff"] < 0.5 for row in harness.metrics(out, "cut"))


@pytest.mark.contract
@pytest.mark.slow
def test_quick_start_learns(tmp_path):
    """The first 20 of its steps, from another folder: the evaluation rises, lags are 0 and then 1, and the last line says so."""
    done = subprocess.run(["bash", os.path.join(harness.ROOT, "scripts", "quickstart.sh"), "--num-rollout", "20", "--output-dir",
                           str(tmp_path), "--run-name", "quick"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    before, after = map(float, re.fullmatch(r"eval_reward (\d\.\d+) -> (\d\.\d+)", last).groups())
    assert after - before > 0.1
    rows = harness.metrics(tmp_path, "quick")
    assert [(row["staleness/min"], row["staleness/max"]) for row in rows] == [(0, 0)] + [(1, 1)] * 19
    for key in ("step", "version", "rollout/reward", "rollout/response_len", "staleness/min", "staleness/max", "perf/wait_prev_gen",
                "perf/step_time", "perf/train_time", "sync/time", "sync/bytes", "train/logprob_abs_diff"):
        assert all(key in row for row in rows), key
