"""Drills: a fault is provoked in a whole run, and must end in recovery, with nothing lost, or in an error that names it, within a
bounded time. The engines are scripted, and started again by engines.Engines; the trainer and its broadcast are the real ones."""

import os
import re
import signal
import threading
import time
import types

import pytest

import engines
import harness
import light
import watchdog
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


def wait_for(condition, limit=60):
    deadline = time.time() + limit
    while not condition() and time.time() < deadline:
        time.sleep(0.005)
    return condition()


def after(condition, action):
    """A thread that acts once, as soon as the condition holds. Its `acted` is when."""
    def wait():
        if wait_for(condition):
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
    assert pair.report(0)["weights"] == pair.report(1)["weights"] and pair.report(0)["version"] == pair.report(1)["version"]
    assert min(row["perf/engines"] for row in harness.metrics(tmp_path, "run")) == 1


def test_an_engine_that_hangs_is_left_out_until_it_answers(model, fleet, tmp_path):
    """Stopped with its connections open: nothing but the health check can notice."""
    pair = fleet(2, lengths="5")
    stopper = after(lambda: len(records(tmp_path, "trained")) >= 2, lambda: pair.signal(1, signal.SIGSTOP))
    after(lambda: states(tmp_path, 1)[:1] == ["lost"], lambda: pair.signal(1, signal.SIGKILL))
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
        if "flip" in orders:                      # between the broadcast and the question for the fingerprints
            three.script(2, hang=1, seconds=1.0, verb="weights_checker")
            asked = three.report(2)["verbs"].count("weights_checker")
            wait_for(lambda: three.report(2)["verbs"].count("weights_checker") > asked)
        if "init" in orders.get("verb", ""):      # another one has died, so that they join anew
            three.script(2, **orders)
            three.signal(1, signal.SIGKILL)
        three.script(2, **orders)

    after(lambda: len(records(tmp_path, "trained")) >= 2, spoil)
    back = after(lambda: states(tmp_path, 2)[:1] == ["lost"], lambda: three.script(2, reset=True))
    started = time.time()
    light.succeed("train_async.py", harness.flags(model, tmp_path, "run", three.urls, num_rollout=8, **QUICK))
    check_nothing_is_lost(tmp_path, 8)
    lost = [r for r in records(tmp_path, "engine") if r["engine"] == 2 and r["state"] == "lost"]
    assert lost and why in lost[0]["why"] and time.time() - started < 40
    assert back.acted is not None and "up" in states(tmp_path, 2)
    assert not any(three.report(i)["paused"] for i in range(3))


@pytest.mark.parametrize("restarts", [0, 1])
def test_with_no_engine_left_the_run_is_saved_and_ends_or_goes_on_when_one_comes_back(restarts, model, fleet, tmp_path):
    """The only one dies. Where it may not be started again: the weights of the step, what is finished and what was under way are
    saved, the cause is the last line, and --load goes on: each prompt is trained once."""
    one = fleet(1)
    words = lambda **flags: harness.flags(model, tmp_path, "run", one.urls, num_rollout=8, **QUICK, **flags)
    killer = after(lambda: len(records(tmp_path, "trained")) >= 3, lambda: one.signal(0, signal.SIGKILL))
    status, output = light.run("train_async.py", words(max_engine_restarts=restarts))
    if restarts == 0:
        assert status == 1 and time.time() - killer.acted < 15
        assert re.search(r"error: no engine left: engine http://\S+: .*\(0 of --max-engine-restarts 0\)", output.splitlines()[-1])
        done = len(records(tmp_path, "trained"))
        assert f"saved after {done} steps: --load {tmp_path / 'run'}" in output and 3 <= done < 8
        light.succeed("train_async.py", words(load=str(tmp_path / "run")))
    else:
        assert status == 0, output[-2000:]
        assert states(tmp_path, 0) == ["lost", "ready", "up"]
    check_nothing_is_lost(tmp_path, 8)


# ---- the watchdog -----------------------------------------------------------------------------------------
def endless_advantages(args, batch):
    while batch["step"] == 2:
        time.sleep(1)
    return [0.0] * len(batch["tokens"])


def test_a_trainer_that_makes_no_progress_ends_the_run_with_its_rank_and_its_stack(model, fleet, tmp_path):
    started = time.time()
    status, output = light.run("train_async.py", harness.flags(model, tmp_path, "run", fleet(1).urls, watchdog_timeout=3,
                                                               custom_advantage_path="test_faults.endless_advantages"))
    assert status == watchdog.STATUS and time.time() - started < 40
    assert "error: training rank 0: no progress for --watchdog-timeout 3 s in the training of step 2" in output
    assert "in endless_advantages" in (tmp_path / "run" / "logs" / "training rank 0.stacks").read_text()
    at = {r["step"]: r["time"] for r in records(tmp_path, "trained")}[1]
    assert 3 <= os.path.getmtime(tmp_path / "run" / "logs" / "watchdog.txt") - at < 3 + 3


def test_engines_that_make_no_progress_end_the_run_with_what_is_waited_for(model, fleet, tmp_path):
    one = fleet(1)
    after(lambda: len(records(tmp_path, "trained")) >= 2, lambda: one.signal(0, signal.SIGSTOP))
    status, output = light.run("train_sync.py", harness.flags(model, tmp_path, "run", one.urls, watchdog_timeout=3,
                                                              update_weight_timeout=300))
    assert status == watchdog.STATUS
    assert re.search("error: rollout manager: no progress for --watchdog-timeout 3 s in the (generation for step|sync)", output)
    assert re.search("in ask|in everyone", (tmp_path / "run" / "logs" / "rollout manager.stacks").read_text())


def stand(who, folder, limit):
    """A process whose watchdog looks after itself and the others."""
    watchdog.Watchdog(who, types.SimpleNamespace(watchdog_timeout=limit, run_dir=folder)).start()
    time.sleep(60)


def test_a_process_that_is_stopped_is_named_by_the_others(tmp_path):
    context = light.server()
    names = ("training rank 0", "training rank 1")
    processes = [context.Process(target=stand, args=(name, str(tmp_path), 2.0)) for name in names]
    for process in processes:
        process.start()
    try:
        assert wait_for(lambda: all((tmp_path / "logs" / f"{name}.alive").exists() for name in names), 30)
        time.sleep(1)
        os.kill(processes[1].pid, signal.SIGSTOP)
        stopped = time.time()
        processes[0].join(20)
        assert processes[0].exitcode == watchdog.STATUS and 1 < time.time() - stopped < 6
        assert watchdog.said(str(tmp_path / "logs"), 0).startswith("training rank 1: no sign of life for --watchdog-timeout 2 s; its process "
                                                          f"{processes[1].pid} on ")
        assert "in stand" in (tmp_path / "logs" / "training rank 0.stacks").read_text()
    finally:
        for process in processes:
            process.kill()


def test_a_driver_that_asks_for_nothing_is_noticed(tmp_path):
    """All others are idle, for longer than the limit: it is the driver that hangs."""
    said = []
    args = types.SimpleNamespace(watchdog_timeout=2.0, run_dir=str(tmp_path))
    own = watchdog.Watchdog("driver", args, finish=said.append)
    own.started = time.time() - 10
    (tmp_path / "logs").mkdir()
    other = watchdog.Watchdog("rollout manager", args)
    other.sign()
    assert own.problem() is None
    other.last -= 3
    other.sign()
    assert own.problem() == "driver: has asked nobody for anything for --watchdog-timeout 2 s"
    with other.at("the generation for step 3"):
        other.sign()
        assert own.problem() is None
