"""--replay repeats a recorded run without engines, to the last bit, and says where it departs."""

import json
import os
import shutil
import signal
import threading

import pytest

import engines
import harness
import light
import scripted_engine
from buffer import Ledger

RUNS = int(os.environ.get("OFFBEAT_REPLAYS", 6))
MODES = [                                    # script, flags
    ("train_fully_async.py", dict(staleness_threshold=1.0, partial_rollout=True, max_lag=2)),
    ("train_fully_async.py", dict(staleness_threshold=1.0, partial_rollout=True, update_weights_interval=2, max_lag=3,
                                  custom_sampler_path="test_replay.youngest")),
    ("train_async.py", dict(over_sampling_batch_size=8, partial_rollout=True)),
    ("train_fully_async.py", dict(staleness_threshold=0.5, dynamic_sampling_filter_path="test_replay.most", max_lag=2,
                                  max_lag_policy="drop")),
    ("train_async.py", dict(over_sampling_batch_size=6)),
    ("train_fully_async.py", dict(staleness_threshold=0.5, require_batches=2, max_lag=1, max_lag_policy="mask")),
]
STEPS = 6


def youngest(args, groups, k):
    return groups[-k:]


def most(args, samples):
    return samples[0].group_id % 5 != 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def urls():
    """Two engines of different speed, so that who comes first is chance."""
    servers = [*scripted_engine.start(1, vocab_size=250, lengths="3:1,2:4,1:12", unit_seconds=0.01, budget=24),
               *scripted_engine.start(1, vocab_size=250, lengths="3:1,2:4,1:12", unit_seconds=0.03, budget=24)]
    yield [url for _, url in servers]
    scripted_engine.stop(servers)


def record(number, model, urls, out, **changes):
    """A recorded run. Returns (script, folder)."""
    script, flags = MODES[number % len(MODES)]
    flags = {**flags, "num_rollout": STEPS, "save_interval": STEPS, "rollout_max_response_len": 24, "seed": number, **changes}
    light.succeed(script, harness.flags(model, out, "recorded", urls, **flags))
    return script, os.path.join(out, "recorded")


def replay(script, folder, *words, name="replayed"):
    out = os.path.dirname(folder)
    return light.run(script, ["--replay", folder, "--output-dir", out, "--run-name", name, *words])


@pytest.mark.contract
@pytest.mark.parametrize("number", range(RUNS))
def test_a_replay_is_the_run_to_the_last_bit(number, model, urls, tmp_path):
    """Asynchronous runs on engines of different speed: the same decisions, the same batches, and in the end the same weights,
    optimizer and buffer."""
    script, folder = record(number, model, urls, str(tmp_path))
    status, output = replay(script, folder)
    assert status == 0, output[-3000:]
    assert harness.same_bits(harness.saved_state(tmp_path, "recorded", STEPS), harness.saved_state(tmp_path, "replayed", STEPS))
    want, got = (list(Ledger.read(str(tmp_path / name / "ledger.jsonl"))) for name in ("recorded", "replayed"))
    assert any(r["event"] == "put_back" for r in want) or "partial_rollout" not in MODES[number % len(MODES)][1]
    moves = [[(r["event"], r.get("group", r.get("groups"))) for r in records if r["event"] in
              ("draw", "finish", "put_back", "drop", "batch", "trained")] for records in (want, got)]
    assert moves[0][:len(moves[1])] == moves[1] and len(moves[1]) > STEPS * 4
    rows = [harness.metrics(tmp_path, name) for name in ("recorded", "replayed")]
    assert [[row[name] for row in rows[0]] for name in ("train/loss", "staleness/histogram", "rollout/reward")] == [
        [row[name] for row in rows[1]] for name in ("train/loss", "staleness/histogram", "rollout/reward")]
    assert len(rows[1]) == STEPS and os.path.exists(os.path.join(folder, "samples", f"step_{STEPS - 1:07d}.npz"))


@pytest.mark.contract
def test_a_replay_departs_by_name(model, urls, tmp_path):
    """Other flags, a changed decision, changed samples: each is found where it first matters."""
    script, folder = record(0, model, urls, str(tmp_path))

    def said(*words):
        shutil.rmtree(tmp_path / "replayed", ignore_errors=True)
        status, output = replay(script, folder, *words)
        assert status == 1
        return [line for line in output.splitlines() if "error: " in line][-1]

    assert "departs from the record in step 0: train/" in said("--lr", "0.02") or "in step 1: train/" in said("--lr", "0.02")
    assert "at record 2, {'event': 'draw', 'group': 0" in said("--seed", "7") and "the data give group 0, row" in said("--seed", "7")
    assert "the gate is closed" in said("--staleness-threshold", "0.25")

    ledger = os.path.join(folder, "ledger.jsonl")
    with open(ledger) as f:
        lines = f.readlines()
    at = next(i for i, line in enumerate(lines) if '"batch"' in line)
    changed = json.loads(lines[at])
    changed["groups"] = changed["groups"][::-1]
    with open(ledger, "w") as f:
        f.writelines([*lines[:at], json.dumps(changed) + "\n", *lines[at + 1:]])
    assert f"at record {changed['seq']}, {{'event': 'batch', 'step': 0" in said() and "the buffer picks [" in said()
    with open(ledger, "w") as f:
        f.writelines(lines)

    files = [os.path.join(folder, "samples", f"step_{step:07d}.npz") for step in (1, 2)]
    os.rename(files[1], files[1] + ".kept")
    assert "--replay: there is no" in said() and "step_0000002.npz" in said()
    shutil.copy(files[0], files[1])
    assert "group_id is" in said() and "{'event': 'batch', 'step': 2" in said()


@pytest.mark.contract
@pytest.mark.parametrize("number, killed", [(0, True), (0, False), (1, False), (2, True), (2, False)])
def test_a_record_that_was_interrupted_and_resumed_replays_as_one_run(number, killed, model, urls, tmp_path):
    """A run over 4 steps, resumed to 6: its record is one run of 6. Resumed from its end, it publishes version 4 before the batch
    of step 4 is generated, where a run without a stop does so behind it."""
    script, folder = record(number, model, urls, str(tmp_path), num_rollout=4, save_interval=2)
    if killed:                                                                # after step 2 was saved
        shutil.rmtree(os.path.join(folder, "checkpoints", "step_0000004"))
    flags = {**MODES[number][1], "num_rollout": STEPS, "save_interval": 2, "rollout_max_response_len": 24, "seed": number}
    light.succeed(script, harness.flags(model, tmp_path, "recorded", urls, load=folder, **flags))
    assert any(r["event"] == "resume" for r in Ledger.surviving(os.path.join(folder, "ledger.jsonl")))
    status, output = replay(script, folder)
    assert status == 0, output[-3000:]
    assert harness.same_bits(harness.saved_state(tmp_path, "recorded", STEPS), harness.saved_state(tmp_path, "replayed", STEPS))


@pytest.fixture
def one():
    """The only engine, started again when it is dead. An answer takes it a third of a second."""
    single = engines.Engines(1, vocab_size=250, lengths="1:5,1:6", unit_seconds=0.06, budget=8)
    yield single
    single.stop()


@pytest.mark.contract
@pytest.mark.parametrize("script, flags", [
    ("train_async.py", {}),
    ("train_async.py", dict(update_weights_interval=2, policy_old="recompute", over_sampling_batch_size=6, partial_rollout=True)),
    ("train_fully_async.py", dict(update_weights_interval=2, policy_old="recompute", staleness_threshold=0.5,
                                  partial_rollout=True)),
])
def test_a_run_whose_last_engine_died_and_came_back_replays(script, flags, model, one, tmp_path):
    """Killed as it generates for step 3, which lies between two syncs of a k of 2. What restarted there publishes version 3, and
    with --policy-old recompute its weights are the old policy from step 3 on: the first update finds no distance to it."""
    ledger, killed = tmp_path / "recorded" / "ledger.jsonl", threading.Event()

    def kill():     # step 2 has its batch, version 2 is out; the engine takes four groups at a time, so it is at step 3's
        while not killed.wait(0.002):
            events = [(r["event"], r.get("step", r.get("version"))) for r in harness.read_jsonl(ledger)]
            if {("batch", 2), ("sync", 2)} <= set(events) and ("submit", None) in events[events.index(("sync", 2)):]:
                one.signal(0, signal.SIGKILL)
                return

    threading.Thread(target=kill, daemon=True).start()
    light.succeed(script, harness.flags(model, tmp_path, "recorded", one.urls, num_rollout=7, save_interval=8,
                                        generate_timeout=15, sglang_server_concurrency=8, **flags))
    killed.set()
    records = list(Ledger.read(str(ledger)))
    at = next(i for i, r in enumerate(records) if r["event"] == "revive")
    after = [(r["event"], r.get("step", r.get("version"))) for r in records[at:] if r["event"] in ("revive", "sync", "batch")]
    assert after[:3] == [("revive", 3), ("sync", 3), ("batch", 3)]
    status, output = replay(script, str(tmp_path / "recorded"))
    assert status == 0, output[-3000:]
    assert harness.same_bits(harness.saved_state(tmp_path, "recorded", 7), harness.saved_state(tmp_path, "replayed", 7))
    rows = [harness.metrics(tmp_path, name) for name in ("recorded", "replayed")]
    for name in ("train/loss", "train/first_ppo_kl", "staleness/histogram", "rollout/reward"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]
    if flags:
        moved = [row["step"] for row in rows[0] if row["train/first_ppo_kl"] != 0.0]
        assert moved == [1, 5], "old log-probs are not those of the last published weights"


@pytest.mark.contract
def test_a_record_trains_on_under_other_flags_of_the_loss(model, urls, tmp_path):
    """--replay-data-only: the same batches, another clip; with the flags of the record the weights are those of the run."""
    script, folder = record(0, model, urls, str(tmp_path))
    for name, words in (("same", []), ("other", ["--loss-agg-mode", "seq-mean-token-mean", "--lr", "0.003"])):
        status, output = replay(script, folder, "--replay-data-only", *words, name=name)
        assert status == 0, output[-3000:]
    state = {name: harness.saved_state(tmp_path, name, STEPS) for name in ("recorded", "same", "other")}
    assert harness.same_bits(state["recorded"], state["same"])
    assert not harness.same_bits(*([row["weights"] for row in state[name]["parameters"]] for name in ("recorded", "other")))
    rewards = [[row["rollout/reward"] for row in harness.metrics(tmp_path, name)] for name in ("recorded", "other")]
    assert rewards[0] == rewards[1]


@pytest.mark.contract
def test_a_record_that_ends_with_a_batch_that_was_not_trained_replays_up_to_it(model, urls, tmp_path):
    """As a kill leaves it between the ledger's record of a batch and the file of its samples."""
    script, folder = record(0, model, urls, str(tmp_path), num_rollout=4)
    ledger, kept = os.path.join(folder, "ledger.jsonl"), []
    with open(ledger) as f:
        for line in f:
            kept.append(line)
            if json.loads(line)["event"] == "batch" and json.loads(line)["step"] == 3:
                break
    with open(ledger, "w") as f:
        f.writelines(kept)
    os.remove(os.path.join(folder, "samples", "step_0000003.npz"))
    status, output = replay(script, folder)
    assert status == 0 and "the record ends before step 3" in output
    assert [row["step"] for row in harness.metrics(tmp_path, "replayed")] == [0, 1, 2]


@pytest.mark.contract
def test_a_recorded_flag_of_the_loss_can_be_taken_back(model, urls, tmp_path):
    script, folder = record(4, model, urls, str(tmp_path), policy_old="recompute", rollout_is="token", rollout_is_threshold="2.0",
                            use_kl_loss=True, kl_loss_coef=0.1)
    status, output = replay(script, folder, "--replay-data-only", "--rollout-is", "none", "--no-use-kl-loss")
    assert status == 0, output[-3000:]
    rows = [harness.metrics(tmp_path, name) for name in ("recorded", "replayed")]
    assert "train/kl" in rows[0][0] and "train/kl" not in rows[1][0]
    with open(os.path.join(folder, "args.json")) as f:
        assert json.load(f)["flags"]["use_kl_loss"] is True                   # the record is as it was


def test_what_cannot_be_replayed_is_refused_at_the_start(model, urls, tmp_path):
    script, folder = record(4, model, urls, str(tmp_path), num_rollout=1, save_interval=None)
    for script, words, text in (
            ("train_sync.py", ["--replay", folder], "was recorded by train_async.py: replay it by that script"),
            ("train_async.py", ["--replay", str(tmp_path)], "give the folder of a recorded run"),
            ("train_async.py", ["--replay", folder, "--load", folder], "--replay repeats a run from its start: leave --load out"),
            ("train_async.py", ["--replay", folder, "--eval-prompt-data", "sums", os.path.join(model, "eval.jsonl")],
             "--replay starts no engine"),
            ("train_async.py", harness.flags(model, tmp_path, "x", replay_data_only=True), "--replay-data-only needs --replay RUN")):
        status, output = light.run(script, words)
        assert status == 2 and text in output.splitlines()[-1]
