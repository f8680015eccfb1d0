"""The modes of the loops on the real rollout manager, trainer and weight sync, in one process (light.py)."""

import json
import os

import pytest
import requests

import engines
import harness
import light


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine():
    server = engines.Engines(1, again=False, vocab_size=250, lengths="3:1,1:10", unit_seconds=0.004, budget=24)
    yield server.urls[0]
    server.stop()


@pytest.mark.contract
def test_mode_a_is_on_policy_on_every_token(model, engine, tmp_path):
    """50 steps of the stream with threshold 0: no token of another version than the one that is trained."""
    light.succeed("train_fully_async.py", harness.flags(model, tmp_path, "a", [engine], num_rollout=50, rollout_max_response_len=24))
    rows = harness.metrics(tmp_path, "a")
    assert len(rows) == 50 and all(list(row["staleness/histogram"]) == ["0"] for row in rows)
    for step in range(50):
        samples = [s for group in harness.read_groups(tmp_path / "a" / "samples" / f"step_{step:07d}.npz") for s in group["samples"]]
        assert {version for sample in samples for version, _ in sample["version_runs"]} == {step}


@pytest.mark.contract
def test_colocated_memory_changes_hands_in_order(model, engine, tmp_path):
    """train_sync.py --colocate: generate, flush, release, (train), weights back, buckets, cache back."""
    light.succeed("train_sync.py", harness.flags(model, tmp_path, "c", [engine], num_rollout=3, colocate=True, partial_rollout=True,
                                                 over_sampling_batch_size=8, rollout_max_response_len=24))
    said = requests.get(f"{engine}/script", timeout=10).json()["verbs"]
    verbs = [verb for verb in said if verb not in ("generate", "abort_request", "health", "script", "weights_checker")]
    sync = ["update_weights_from_distributed"]         # which flushes and names the version, too
    lend = ["flush_cache", "release_memory_occupation"]
    back = ["resume_memory_occupation", *sync, "resume_memory_occupation"]
    assert verbs == ["init_weights_update_group", *sync, *lend, *back, *lend, *back, *lend, "destroy_weights_update_group"]
    assert [row["step"] for row in harness.metrics(tmp_path, "c")] == [0, 1, 2]


def test_a_mismatch_of_engine_and_trainer_ends_the_run(model, engine, tmp_path):
    """The scripted engine's log-probs have nothing to do with the model: --parity-max stops the run and says by how much."""
    flags = dict(num_rollout=3, parity_interval=2)
    output = light.succeed("train_async.py", harness.flags(model, tmp_path, "warn", [engine], **flags))
    rows = harness.metrics(tmp_path, "warn")
    assert [row["step"] for row in rows if "parity/mismatch" in row] == [0, 2]
    assert "warning: step 0: engine and trainer differ by" in output and "more than --parity-warn 0.05" in output
    status, output = light.run("train_async.py", harness.flags(model, tmp_path, "stop", [engine], parity_max=0.01, **flags))
    assert status == 1 and "on the same weights (parity/mismatch): more than --parity-max 0.01" in output
    assert f"differ by {rows[0]['parity/mismatch']:.3g} per token" in output


@pytest.mark.contract
def test_the_speed_report_predicts_the_synchronous_step(model, engine, tmp_path):
    """What one-step-off would take without overlap, put together from its own clock, against train_sync.py with these flags."""
    server = engines.Engines(1, again=False, vocab_size=250, lengths="40", unit_seconds=0.01, budget=40)
    try:
        flags = dict(num_rollout=8, rollout_max_response_len=40, max_tokens_per_gpu=256)
        light.succeed("train_async.py", harness.flags(model, tmp_path, "async", server.urls, **flags))
        light.succeed("train_sync.py", harness.flags(model, tmp_path, "sync", server.urls, **flags))
    finally:
        server.stop()
    with open(tmp_path / "async" / "speed.json") as f:
        said = json.load(f)
    assert said["sync"] - said["async"] == pytest.approx(said["hidden generation"] + said["fewer syncs"])
    rows = harness.metrics(tmp_path, "sync")[1:]
    waits = sum(row["perf/wait_prev_gen"] for row in rows) / len(rows)
    lone = sum(row["perf/lone_generate_time"] for row in rows) / len(rows)
    assert 0.4 <= lone <= waits < lone + 0.2           # 40 tokens of 0.01 s; the rest is bookkeeping
    assert not os.path.exists(tmp_path / "sync" / "speed.json")
