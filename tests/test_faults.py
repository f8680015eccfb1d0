"""Drills: a fault is provoked in a whole run, and must end in recovery, with nothing lost, or in an error that names it, within a
bounded time. The engines are scripted, and started again by engines.Engines; the trainer and its broadcast are the real ones."""

import os
import re
import signal
import threading
import time

import pytest
import requests

import engines
import harness
import light
from buffer import Ledger

pytestmark = pytest.mark.drill


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fleet():
    started = []

    def start(n, **options):
        started.append(engines.Engines(n, **{"vocab_size": 250, "lengths": "1:2,1:5", "unit_seconds": 0.02, "budget": 6, **options}))
        return started[-1]

    yield start
    for each in started:
        each.stop()


QUICK = {"rollout_health_check_interval": 0.5, "rollout_health_check_timeout": 1, "update_weight_timeout": 4, "generate_timeout": 60}


def script(url, **orders):
    requests.post(f"{url}/script", json=orders, timeout=10).raise_for_status()


def records(out, event):
    return [r for r in harness.read_jsonl(out / "run" / "ledger.jsonl") if r["event"] == event]


def states(out, rank):
    return [r["state"] for r in records(out, "engine") if r["engine"] == rank]


def check_nothing_is_lost(out, steps, groups=4):
    """Every prompt that was drawn was trained once, in the order of the steps, or waits; none was dropped."""
    outcomes = Ledger.outcomes(str(out / "run" / "ledger.jsonl"))
    trained = [group for group in outcomes.values() if group["outcome"] == "trained"]
    assert len(trained) == groups * steps and {group["step"] for group in trained} == set(range(steps))
    assert {group["outcome"] for group in outcomes.values()} <= {"trained", "buffered", "in_flight"}
    assert sorted(outcomes) == list(range(len(outcomes)))
    assert [row["step"] for row in harness.metrics(out, "run")] == list(range(steps))


def after(condition, action, limit=60):
    """A thread that acts once, as soon as the condition holds. Its `acted` is when."""
    def wait():
        deadline = time.time() + limit
        while not condition():
            if time.time() > deadline:
                return
            time.sleep(0.005)
        thread.acted = time.time()
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.acted = None
    thread.start()
    return thread


# ---- engines ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, changes", [("train_async.py", {}), ("train_fully_async.py", dict(staleness_threshold=1.0, partial_rollout=True))])
def test_an_engine_that_dies_comes_back_with_the_current_weights(name, changes, model, fleet, tmp_path):
    """Killed in mid-generation: the other one takes its samples, from the tokens that they have; it is started again, joins the
    group and gets the next version, and requests."""
    pair = fleet(2)
    killer = after(lambda: len(records(tmp_path, "trained")) >= 2, lambda: pair.signal(1, signal.SIGKILL))
    light.succeed(name, harness.flags(model, tmp_path, "run", pair.urls, num_rollout=10, **QUICK, **changes))
    check_nothing_is_lost(tmp_path, 10)
    assert states(tmp_path, 1) == ["lost", "ready", "up"] and states(tmp_path, 0) == []
    lost, _, up = (r["time"] for r in records(tmp_path, "engine"))
    assert 0 <= lost - killer.acted < 3
    assert any(r["engine"] == 1 and r["time"] > up for r in records(tmp_path, "submit")), "it gets no requests any more"
    assert not any(r["engine"] == 1 and lost < r["time"] < up for r in records(tmp_path, "submit"))
    held = [requests.get(f"{url}/script", timeout=10).json()["weights"] for url in pair.urls]
    assert held[0] == held[1] or name == "train_fully_async.py" and held[0]
    assert min(row["perf/engines"] for row in harness.metrics(tmp_path, "run")) == 1


def test_an_engine_that_hangs_is_left_out_until_it_answers(model, fleet, tmp_path):
    """Stopped with its connections open: nothing but the health check can notice."""
    pair = fleet(2, lengths="5")
    def stop():
        pair.signal(1, signal.SIGSTOP)
        after(lambda: states(tmp_path, 1)[:1] == ["lost"], lambda: pair.signal(1, signal.SIGKILL))
    stopper = after(lambda: len(records(tmp_path, "trained")) >= 2, stop)
    light.succeed("train_async.py", harness.flags(model, tmp_path, "run", pair.urls, num_rollout=8, **QUICK))
    check_nothing_is_lost(tmp_path, 8)
    assert states(tmp_path, 1)[0] == "lost" and records(tmp_path, "engine")[0]["time"] - stopper.acted < 6


@pytest.mark.parametrize("orders, why", [
    ({"die": 1, "verb": "update_weights_from_distributed", "seconds": 0.0}, "update_weights_from_distributed: "),
    ({"hang": 1, "verb": "update_weights_from_distributed"}, "no answer within 4 s"),
    ({"die": 1, "verb": "init_weights_update_group", "seconds": 0.0}, "init_weights_update_group: "),
    ({"refuse": 1, "verb": "continue_generation"}, "continue_generation: HTTP 500"),
    ({"flip": True}, "tensors are not the trainer's"),
    ({"stale": "tensors"}, "tensors are not the trainer's"),
    ({"answers": "old_version"}, "generated with version"),
], ids=lambda value: "" if isinstance(value, str) else " ".join(map(str, value)))
def test_an_engine_that_fails_in_a_sync_is_left_out_and_comes_back(orders, why, model, fleet, tmp_path):
    """In the middle of a run: the sync is repeated without it, within the time limit of a bucket; it is back at a later sync."""
    three = fleet(3)
    def spoil():
        script(three.urls[2], **orders)
        if "init" in orders.get("verb", ""):      # so that they join anew
            three.signal(1, signal.SIGKILL)
    trigger = "flip" in orders
    def flip():                                   # right behind a broadcast, before the fingerprints are asked for
        before = requests.get(f"{three.urls[2]}/script", timeout=10).json()["updates"]
        deadline = time.time() + 20
        while requests.get(f"{three.urls[2]}/script", timeout=10).json()["updates"] == before and time.time() < deadline:
            pass
        spoil()
    if trigger:
        script(three.urls[2], hang=1, seconds=0.5, verb="weights_checker")
    after(lambda: len(records(tmp_path, "trained")) >= 2, flip if trigger else spoil)
    back = after(lambda: states(tmp_path, 2)[:1] == ["lost"], lambda: script(three.urls[2], reset=True))
    started = time.time()
    light.succeed("train_async.py", harness.flags(model, tmp_path, "run", three.urls, num_rollout=8, **QUICK))
    check_nothing_is_lost(tmp_path, 8)
    lost = [r for r in records(tmp_path, "engine") if r["engine"] == 2 and r["state"] == "lost"]
    assert lost and why in lost[0]["why"] and time.time() - started < 40
    assert back.acted is not None and "up" in states(tmp_path, 2)
    assert not any(requests.get(f"{url}/script", timeout=10).json()["paused"] for url in three.urls)
