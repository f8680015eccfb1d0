"""Drills: a fault is provoked in a whole run, and must end in recovery, with nothing lost, or in an error that names it, within a
bounded time. The engines are scripted, and started again by engines.Engines; the trainer and its broadcast are the real ones."""

import ast
import errno
import glob
import ipaddress
import json
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
import types
from collections import Counter

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import engines
import harness
import light
import sync_weights
import watchdog
from args import parse_args
from batch import load_groups
from buffer import Ledger
from data import PromptRows
from engine import EngineError, free_address, server_command
from fingerprint import check_fingerprints, fingerprint

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
        if wait_for(condition, 240):           # Ray may take long to start
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

    def kill():
        pair.again = False
        pair.signal(1, signal.SIGKILL)

    killer = after(lambda: len(records(tmp_path, "trained")) >= 2, kill)
    after(lambda: len(records(tmp_path, "trained")) >= 6, lambda: setattr(pair, "again", True))    # steps with one engine
    light.succeed(name, harness.flags(model, tmp_path, "run", pair.urls, num_rollout=16, **QUICK, **changes))
    check_nothing_is_lost(tmp_path, 16)
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
    assert states(tmp_path, 1)[0] == "lost" and records(tmp_path, "engine")[0]["time"] - stopper.acted < 20


@pytest.mark.parametrize("orders, why", [
    ({"die": 1, "verb": "update_weights_from_distributed", "seconds": 0.0}, "update_weights_from_distributed: "),
    ({"hang": 1, "verb": "update_weights_from_distributed"}, "no answer within 4 s"),
    ({"die": 1, "verb": "init_weights_update_group", "seconds": 0.0}, "init_weights_update_group: "),
    ({"refuse": 1, "verb": "update_weights_from_distributed"}, "update_weights_from_distributed: HTTP 500"),
    ({"flip": True}, r"\b1 of \d+ tensors are not the trainer's"),
    ({"swap": True}, r"\b2 of \d+ tensors are not the trainer's"),
    ({"stale": "tensors"}, "tensors are not the trainer's"),
    ({"answers": "old_version"}, "generated with version"),
], ids=lambda value: "" if isinstance(value, str) else " ".join(map(str, value)))
def test_an_engine_that_fails_in_a_sync_is_left_out_and_comes_back(orders, why, model, fleet, tmp_path):
    """In the middle of a run: the sync is repeated without it, within the time limit of a bucket; it is back at a later sync."""
    three = fleet(3)

    def spoil():
        if {"flip", "swap"} & orders.keys():      # between the broadcast and the question for the fingerprints
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
    assert lost and re.search(why, lost[0]["why"]) and time.time() - started < 40
    assert back.acted is not None and "up" in states(tmp_path, 2)


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


@pytest.mark.parametrize("when, restarts", [("generating", 0), ("generating", 1), ("training", 1), ("releasing", 1)])
def test_a_colocated_engine_that_dies_comes_back_or_the_run_is_saved(when, restarts, model, fleet, tmp_path):
    """There is no doing without one of two: the run waits for it, and begins at its step again, with a sync. The one that has lent
    its memory gets it back once, the new one has lent nothing. With no restart left the run ends with the cause, saved."""
    pair = fleet(2)
    words = lambda **flags: harness.flags(model, tmp_path, "run", pair.urls, num_rollout=6, colocate=True, actor_num_gpus_per_node=1,
                                          custom_advantage_path="test_faults.slow_advantages", **QUICK, **flags)
    event = "submit" if when == "generating" else "batch"

    def spoil():
        if when == "releasing":
            return pair.script(1, die=1, verb="release_memory_occupation", seconds=0.0)
        time.sleep(0.15 if when == "training" else 0)
        pair.signal(1, signal.SIGKILL)

    killer = after(lambda: len(records(tmp_path, "trained")) >= 2 and records(tmp_path, event)[-1]["time"] > records(
        tmp_path, "trained")[-1]["time"], spoil)
    status, output = light.run("train_sync.py", words(max_engine_restarts=restarts))
    if restarts == 0:
        assert status == 1 and time.time() - killer.acted < 15
        assert re.search(r"error: no engine left: engine http://\S+: .*\(0 of --max-engine-restarts 0\)", output.splitlines()[-1])
        assert f"saved after {len(records(tmp_path, 'trained'))} steps: --load {tmp_path / 'run'}" in output
        light.succeed("train_sync.py", words(load=str(tmp_path / "run")))
    else:
        assert status == 0, output[-2000:]
        assert states(tmp_path, 1) == ["lost", "ready", "up"] and states(tmp_path, 0) == []
        lost, _, up = (r["time"] for r in records(tmp_path, "engine"))
        print(f"noticed after {lost - killer.acted:.1f} s, serves again after {up - killer.acted:.1f} s")
        assert 0 <= lost - killer.acted < 5
        verbs = pair.report(0)["verbs"]
        assert verbs.count("resume_memory_occupation") == 2 * (verbs.count("release_memory_occupation") - 1)   # none behind the last
    check_nothing_is_lost(tmp_path, 6)


def slow_advantages(args, batch):
    time.sleep(0.3)
    return [0.0] * len(batch["tokens"])


# ---- the watchdog -----------------------------------------------------------------------------------------
def endless_advantages(args, batch):
    while batch["step"] == 2:
        time.sleep(1)
    return [0.0] * len(batch["tokens"])


def test_a_trainer_that_makes_no_progress_ends_the_run_with_its_rank_and_its_stack(model, fleet, tmp_path):
    status, output = light.run("train_async.py", harness.flags(model, tmp_path, "run", fleet(1).urls, watchdog_timeout=3,
                                                               custom_advantage_path="test_faults.endless_advantages"))
    assert status == watchdog.STATUS
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
    assert re.search("error: (rollout manager|training rank 0): no progress for --watchdog-timeout 3 s in the (generation|sync)", output)
    stacks = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*.stacks"))
    assert re.search("in (serve|land|update_from_distributed|health_generate)$", stacks, re.MULTILINE)


async def blocking_reward(args, sample):
    time.sleep(60 if sample.group_id == 8 else 0)
    return 1.0


def test_a_function_that_blocks_the_rollout_manager_ends_the_run_with_its_stack(model, fleet, tmp_path):
    """It is async and sleeps all the same: no time limit of that event loop can act, and no call is answered."""
    status, output = light.run("train_async.py", harness.flags(model, tmp_path, "run", fleet(1).urls, watchdog_timeout=3, reward_timeout=1,
                                                               custom_rm_path="test_faults.blocking_reward"))
    assert status == watchdog.STATUS, output[-2000:]
    assert "error: rollout manager: no progress for --watchdog-timeout 3 s in the generation for step 2" in output
    assert "in blocking_reward" in (tmp_path / "run" / "logs" / "rollout manager.stacks").read_text()
    at = next(r["time"] for r in records(tmp_path, "submit") if r["group"] == 8)
    assert 3 <= os.path.getmtime(tmp_path / "run" / "logs" / "watchdog.txt") - at < 3 + 3


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


def test_engines_that_take_no_bucket_and_say_that_all_is_there_are_not_believed(monkeypatch):
    monkeypatch.setattr(sync_weights, "over", lambda updated, patience: True)
    started, never = time.time(), types.SimpleNamespace(is_completed=lambda: False)
    with pytest.raises(EngineError, match="say that they have all weights, but took none of a bucket"):
        sync_weights.land(never, None, 300)
    assert time.time() - started < 15


# ---- processes --------------------------------------------------------------------------------------------
def check_who_listens(pid):
    """Of a run's processes: no port of Ray's or of an engine's can be reached from outside. (A rendezvous of torch's, which carries no
    code, takes all addresses.)"""
    run, seen = psutil.Process(pid), Counter()
    for process in [run, *run.children(recursive=True)]:
        for port in process.net_connections("inet"):
            if port.status == psutil.CONN_LISTEN:
                inside = ipaddress.ip_address(port.laddr.ip.removeprefix("::ffff:")).is_loopback
                seen[" ".join(process.cmdline())[:40], inside] += 1
    outside = [name for name, inside in seen if not inside and not name.startswith("ray::TrainWorker")]
    assert seen.total() > 5 and not outside, seen


def run_until_killed(words, who, tmp_path):
    """Kills the process behind three steps: the run ends within 30 s and names it. Returns its output."""
    before = len(records(tmp_path, "trained"))

    def kill():
        check_who_listens(process.pid)
        killer.heard = True
        with open(tmp_path / "run" / "logs" / f"{who}.alive") as f:
            os.kill(json.load(f)["pid"], signal.SIGKILL)

    process = harness.start("train_async.py", words)
    killer = after(lambda: len(records(tmp_path, "trained")) >= before + 3, kill)
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 1 and killer.heard and time.time() - killer.acted < 30
    last = output.splitlines()[-3:]           # what Ray passes on of the other processes may come behind it
    assert any(f"error: RuntimeError: {who} has died: " in line for line in last), output[-2000:]
    return output


def test_a_rank_and_then_a_rollout_manager_that_die_end_the_run_with_their_names_and_other_layouts_go_on(model, fleet, tmp_path):
    """One of two data-parallel ranks is killed in a step: the other one must not wait for --distributed-timeout. Two
    tensor-parallel ranks go on from their checkpoint, at a learning rate of 0, until the rollout manager is killed, with all that
    it holds. What one rank finds in the checkpoints of both is the same weights, to the bit; each prompt is trained once."""
    one = fleet(1)
    words = lambda steps, **flags: harness.flags(model, tmp_path, "run", one.urls, **{
        "num_rollout": steps, "save_interval": 2, "distributed_timeout": 300, **flags})
    load = {"load": str(tmp_path / "run")}
    saved = lambda: max(checkpoint.complete(tmp_path / "run" / "checkpoints"), default=0)
    exported = lambda folder: {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
    run_until_killed(words(1000, actor_num_gpus_per_node=2), "training rank 1", tmp_path)
    first = saved()
    light.succeed("train_async.py", words(first, save_hf=str(tmp_path / "before"), **load))

    again = words(1000, actor_num_gpus_per_node=2, tensor_model_parallel_size=2, lr=0, **load)
    output = run_until_killed(again, "rollout manager", tmp_path)
    assert "random states of the ranks are not kept, all else is" in output
    assert saved() > first
    steps = saved() + 3
    light.succeed("train_async.py", words(steps, lr=0, save_hf=str(tmp_path / "after"), **load))
    assert harness.same_bits(exported(tmp_path / "before"), exported(tmp_path / "after"))
    assert not harness.same_bits(exported(tmp_path / "before"), load_file(os.path.join(model, "model.safetensors")))
    check_nothing_is_lost(tmp_path, steps)


# ---- disks ------------------------------------------------------------------------------------------------
def full_disk():
    """The ledger's 60th record of this run is cut off in the middle."""
    write = Ledger.write

    def write_half(self, event, **fields):
        if self.path and self.seq == 59:
            with open(self.path, "ab") as f:
                f.write(b'{"seq": 60, "time": 17')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        write(self, event, **fields)

    Ledger.write = write_half


@pytest.mark.parametrize("script", ["train_async.py", "train_fully_async.py"])
def test_a_disk_that_is_full_when_the_ledger_is_written_ends_the_run_and_a_resume_goes_on(script, model, fleet, tmp_path):
    """At once, with the reason; the torn line is left aside and its number used again. Each prompt is trained once."""
    words = lambda **flags: harness.flags(model, tmp_path, "run", fleet(1, lengths="2", unit_seconds=0.0).urls, num_rollout=8, save_interval=1, **flags)
    started = time.time()
    status, output = tiny(script, words(), prepare=full_disk)
    assert status == 1 and time.time() - started < 20
    assert "No space left on device" in output.splitlines()[-1] and "ledger.jsonl" in output.splitlines()[-1]
    status, output = tiny(script, words(load=str(tmp_path / "run")))
    assert status == 0, output[-2000:]
    check_nothing_is_lost(tmp_path, 8)


# ---- checkpoints ------------------------------------------------------------------------------------------
def tiny(script, words, **options):
    return light.run(script, words, worker=light.TinyWorker, **options)


def small_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))       # then a write fails half-way, as on a full disk


def test_a_checkpoint_that_does_not_fit_the_disk_or_was_cut_off_is_left_aside(model, fleet, tmp_path):
    """A save that fails half-way ends the run with the reason, and leaves the one before; of those that are there, a truncated one
    is named and the one before it is loaded; at most --keep-checkpoints stay."""
    one = fleet(1, lengths="2", unit_seconds=0.0)
    words = lambda **flags: harness.flags(model, tmp_path, "run", one.urls, num_rollout=8, save_interval=1, keep_checkpoints=3, **flags)
    saved = lambda: sorted(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step_*") if path.suffix != ".tmp")
    status, output = tiny("train_sync.py", [*words(), "--no-record"], prepare=small_files)
    assert status == 1 and "File too large" in output.splitlines()[-1]
    kept = saved()
    assert 1 <= len(kept) <= 3 and kept[-1] < 8
    status, output = tiny("train_sync.py", [*words(load=str(tmp_path / "run")), "--no-record"])
    assert status == 0, output[-2000:]
    assert saved() == [6, 7, 8]
    file = tmp_path / "run" / "checkpoints" / "step_0000008" / "rank_00000.pt"
    os.truncate(file, file.stat().st_size - 1)
    status, output = tiny("train_sync.py", [*words(load=str(tmp_path / "run"))[:-2], "--no-record", "--load", str(tmp_path / "run")])
    assert status == 0 and f"warning: checkpoint {file.parent} is not whole and is left aside" in output
    check_nothing_is_lost(tmp_path, 8)
    assert [r["step"] for r in Ledger.read(str(tmp_path / "run" / "ledger.jsonl")) if r["event"] == "resume"] == [kept[-1], 7]


def die_while_removing():
    """In the second checkpoint that makes room, behind its first file."""
    remove, calls = shutil.rmtree, Counter()

    def remove_and_die(path, **options):
        calls[path] += "step_0000002" in path
        if calls[path]:
            os.remove(os.path.join(path, "meta.json"))
            os.kill(os.getpid(), signal.SIGKILL)
        remove(path, **options)

    checkpoint.shutil = types.SimpleNamespace(rmtree=remove_and_die)


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_part_of_it(model, fleet, tmp_path):
    """Nothing that has the name of a checkpoint is a part of one, and the next save removes what is left."""
    words = lambda **flags: harness.flags(model, tmp_path, "run", fleet(1, lengths="2", unit_seconds=0.0).urls, num_rollout=6, save_interval=1,
                                          keep_checkpoints=2, **flags)
    folder = tmp_path / "run" / "checkpoints"
    status, _ = tiny("train_sync.py", words(), prepare=die_while_removing)
    assert status == -signal.SIGKILL and {path.name for path in folder.iterdir()} == {"step_0000002.tmp", "step_0000003", "step_0000004"}
    status, output = tiny("train_sync.py", words(load=str(tmp_path / "run")))
    assert status == 0 and "is not whole" not in output, output[-2000:]
    assert {path.name for path in folder.iterdir()} == {"step_0000005", "step_0000006"}
    check_nothing_is_lost(tmp_path, 6)


@pytest.mark.parametrize("name, place", [("rank_00000.pt", 0.5), ("buffer.json", 0.3), ("meta.json", 0.7)])
def test_a_checkpoint_with_one_changed_byte_is_left_aside(name, place, model, fleet, tmp_path):
    """Of the same size, so only a checksum can tell. The one before is used, and nothing is lost or trained twice."""
    words = lambda **flags: harness.flags(model, tmp_path, "run", fleet(1, lengths="2", unit_seconds=0.0).urls, save_interval=1, **flags)
    status, output = tiny("train_sync.py", words(num_rollout=4))
    assert status == 0, output[-2000:]
    folder = tmp_path / "run" / "checkpoints" / "step_0000004"
    content = bytearray((folder / name).read_bytes())
    content[int(len(content) * place)] ^= 1
    (folder / name).write_bytes(content)
    started = time.time()
    status, output = tiny("train_sync.py", words(num_rollout=6, load=str(tmp_path / "run")))
    assert status == 0 and time.time() - started < 20, output[-2000:]
    if name == "meta.json":
        assert f"warning: checkpoint {folder} is " in output
    else:
        assert f"warning: checkpoint {folder} is damaged and is left aside: {name}: the bytes are not those that were" in output
    check_nothing_is_lost(tmp_path, 6)
    assert [r["step"] for r in records(tmp_path, "resume")] == [3]


def test_data_that_were_changed_between_save_and_resume_are_noticed(model, fleet, tmp_path):
    """One letter in one row of two hundred."""
    data = tmp_path / "data.jsonl"
    shutil.copy(os.path.join(model, "train.jsonl"), data)
    words = lambda **flags: harness.flags(model, tmp_path, "run", fleet(1).urls, save_interval=1, prompt_data=str(data), **flags)
    status, output = tiny("train_sync.py", words(num_rollout=2))
    assert status == 0, output[-2000:]
    lines = data.read_text().splitlines(True)
    lines[7] = lines[7].replace("+", "-")
    data.write_text("".join(lines))
    status, output = tiny("train_sync.py", words(num_rollout=4, load=str(tmp_path / "run")))
    assert status == 1 and "error: --prompt-data (bytes of the file): the checkpoint has" in output.splitlines()[-1]


# ---- who may speak to whom --------------------------------------------------------------------------------
def test_engines_want_the_key_and_get_it(model, fleet, tmp_path):
    urls = fleet(1, api_key="secret").urls
    status, output = tiny("train_sync.py", [*harness.flags(model, tmp_path, "run", urls, num_rollout=1), "--sglang-api-key", "secret"])
    assert status == 0, output[-2000:]
    assert "secret" not in (tmp_path / "run" / "args.json").read_text()
    status, output = tiny("train_sync.py", harness.flags(model, tmp_path, "other", urls, num_rollout=1))
    assert status == 1 and "HTTP 401" in output.splitlines()[-1]


def test_nothing_that_is_loaded_can_run_code_and_nothing_listens_to_the_world(tmp_path):
    """No pickle among the imports, no torch.load and numpy.load that would take one, no eval; a batch's file with an object in it
    is refused; and the address of an engine is loopback."""
    for path in glob.glob(os.path.join(harness.ROOT, "*.py")) + glob.glob(os.path.join(harness.ROOT, "sglang_ext", "*.py")):
        for node in ast.walk(ast.parse(open(path).read())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None)]
                assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & set(names), path
            if isinstance(node, ast.Call):
                called, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert called not in ("eval", "exec", "os.system"), path
                assert called != "torch.load" or given.get("weights_only") == "True", path
                assert called != "np.load" or given.get("allow_pickle") == "False", path
            assert not (isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::")), path
    np.savez(tmp_path / "bad.npz", groups=np.array([print], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_groups(str(tmp_path / "bad.npz"))
    argv, _ = server_command(types.SimpleNamespace(device="cpu", rollout_num_gpus_per_engine=1, bf16=False, seed=1, sglang_args=[],
                                                   colocate=False, rollout_health_check_timeout=30), "/model", 1)
    assert argv[argv.index("--host") + 1] == free_address()[0] == "127.0.0.1"


# ---- fingerprints -----------------------------------------------------------------------------------------
def test_the_fingerprints_see_a_swapped_pair_one_bit_and_a_version_behind():
    draw = torch.Generator().manual_seed(0)
    trained = {name: torch.randn(shape, generator=draw) for name, shape in (("q", (8, 6)), ("k", (8, 6)), ("norm", (6,)))}
    expected = {name: (tuple(t.shape), fingerprint(t)) for name, t in trained.items()}

    def held(**changes):
        return [{f"{name}|0:{8 if t.dim() == 2 else 1}|0:6": f"{fingerprint(t):016x}" for name, t in {**trained, **changes}.items()}]

    check_fingerprints(expected, held(), "e")
    one_bit, rows = trained["q"].clone(), trained["q"][[1, 0, *range(2, 8)]]
    one_bit.view(torch.int32)[5, 3] ^= 1
    for changes, wrong in ((dict(q=trained["k"], k=trained["q"]), "2 of 3"), (dict(q=one_bit), "1 of 3"), (dict(q=rows), "1 of 3"),
                           ({name: t * 0.999 for name, t in trained.items()}, "3 of 3")):
        with pytest.raises(RuntimeError, match=f"{wrong} "):
            check_fingerprints(expected, held(**changes), "e")


# ---- input ------------------------------------------------------------------------------------------------
ODD = ("", " ", "\u0000", "a\ud800".encode("utf-8", "replace").decode(), "\U0001f600" * 50, "x" * 20000, "'\"\\\n\r\u2028", "-1", "nan", "\u202eevil")
NESTED = (None, 0, 1.5, True, [], {}, [[1]], {"a": {"b": [1]}}, [{"role": "user", "content": "1+1="}], [{"role": 3}])


def test_fuzzed_rows_are_prompts_or_errors_of_one_line(model, tmp_path):
    """Random columns with odd text, nested and missing values: a row is a prompt, or a ValueError that names row and flag."""
    from transformers import AutoTokenizer
    tokenizer, draw, seen = AutoTokenizer.from_pretrained(model), random.Random(0), Counter()
    for number in range(30):
        path, kind = tmp_path / f"{number}.jsonl", draw.choice(("text", "odd", "nested", "mixed", "missing"))
        value = {"text": lambda: "1+1=", "odd": lambda: draw.choice(ODD), "nested": lambda: draw.choice(NESTED[:-2]),
                 "mixed": lambda: draw.choice((*ODD, *NESTED)), "missing": lambda: "1"}[kind]
        rows = [{"prompt": value(), "label": draw.choice(ODD), "metadata": {"n": number}} for _ in range(5)]
        gone = draw.choice(list(rows[0]))
        for row in rows if kind == "missing" else ():
            del row[gone]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        args = types.SimpleNamespace(input_key="prompt", label_key="label", metadata_key="metadata", custom_rm_path=None,
                                     apply_chat_template=False)
        try:
            found = PromptRows(str(path), args, tokenizer)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            seen["file refused"] += 1
            continue
        for i in range(len(found)):
            try:
                row = found[i]
                assert isinstance(row["prompt"], str) and all(isinstance(t, int) for t in row["prompt_tokens"])
                assert row["prompt"] == rows[i]["prompt"] and isinstance(row["metadata"], dict)
                seen["row"] += 1
            except ValueError as error:
                assert f"row {i}" in str(error) and "\n" not in str(error)
                seen["row refused"] += 1
    assert min(seen["file refused"], seen["row"], seen["row refused"]) > 2, seen


def test_fuzzed_flags_are_taken_or_refused_in_one_line(model, tmp_path, capsys):
    """Every flag that takes a number or a word, with values that nobody means. Never a trace, and a refused run leaves nothing."""
    flags, draw, refused = [], random.Random(1), 0
    with open(os.path.join(harness.ROOT, "args.py")) as f:
        flags = re.findall(r'g\.add_argument\("--([a-z0-9-]+)"', f.read())
    for number, flag in enumerate(draw.sample(flags, 60)):
        value = draw.choice(("nan", "-1", "0", "1e400", "9" * 30, "\u00bd", "", "a b", "../../etc", "1,2", "inf", "-inf"))
        name = f"fuzz{number}"
        try:
            parse_args([*harness.flags(model, tmp_path, name), f"--{flag}={value}"], "train_fully_async.py")
        except SystemExit as end:
            refused += 1
            said = capsys.readouterr().err.strip().splitlines()
            assert end.code == 2 and "error: " in said[-1] and len(said) <= 2, (flag, value, said)
            assert not os.path.exists(tmp_path / name), (flag, value)
    assert refused > 30


def test_a_folder_that_cannot_be_written_is_named(model, capsys):
    with pytest.raises(SystemExit):
        parse_args(harness.flags(model, "/proc/nowhere", "run"))
    assert "/proc/nowhere" in capsys.readouterr().err.strip().splitlines()[-1]


# ---- ranks that gather for a source --------------------------------------------------------------------------
def refuse(*_):
    raise EngineError("refused")


@pytest.fixture
def source(monkeypatch):
    """A source of a tensor parallel group; `gathered` counts the buckets for which the others must be there."""
    made = sync_weights.WeightSender.__new__(sync_weights.WeightSender)
    made.in_place, made.gathers, made.sends, made.gathered, made.barriers = False, True, True, 0, 0

    def fill():
        for i in range(3):
            made.gathered += 1
            yield i

    def barrier():
        made.barriers += 1
    made.fill = fill
    monkeypatch.setattr("sync_weights.mpu", types.SimpleNamespace(get_pipeline_model_parallel_world_size=lambda: 1,
                                                                  get_pipeline_model_parallel_rank=lambda: 0))
    monkeypatch.setattr("sync_weights.dist", types.SimpleNamespace(barrier=barrier))
    return made


@pytest.mark.drill
def test_a_source_whose_engine_fails_gathers_on_with_the_ranks_beside_it(source):
    """They are in an all_gather for each bucket that is left, and in none while a group is joined."""
    source.prepare()
    assert source.gathered == 1
    source.broadcast = refuse
    with pytest.raises(EngineError, match="refused"):
        source.send(None)
    assert source.gathered == 3
    with pytest.raises(EngineError, match="refused"):
        source.in_turn(refuse)
    assert (source.gathered, source.barriers) == (3, 1)
