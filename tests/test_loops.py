"""Whole runs of the entry scripts with real Megatron and the scripted engine in SGLang's place. What is not about processes,
signals or Ray runs without Ray (light.py), to the same bits."""

import fcntl
import functools
import os
import re
import signal
import socket
import sys
import time

import psutil
import pytest
import requests

import engines
import harness
import light
from buffer import Ledger


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine():
    """Starts scripted engines on demand and ends them after the test."""
    started = []

    def start(n=1, **options):
        started.append(engines.Engines(n, again=False, **{"vocab_size": 250, "lengths": "eos:4", **options}))
        return started[-1].urls

    yield start
    for each in started:
        each.stop()


def weights(out, name, step, optimizer=True):
    """With masters and moments, or alone."""
    rows = harness.saved_state(out, name, step)["parameters"]
    return rows if optimizer else [row["weights"] for row in rows]


@pytest.mark.contract
def test_lags_and_equivalence_of_the_scripts(model, engine, tmp_path):
    """train_sync.py: lag 0 everywhere. train_async.py: 0, then exactly 1. With --max-lag 0 it is train_sync.py, bitwise; so
    is train_fully_async.py with threshold 0, which must be on-policy to its last token. --update-weights-interval 2: lags 1..2
    after batch 0. All read from the samples' own versions."""
    urls = engine(2)
    saved = str(tmp_path / "{name}" / "{{step}}.npz")
    for script, name, changes in (("train_sync.py", "sync", {}), ("train_async.py", "async", {}),
                                  ("train_async.py", "lag0", {"max_lag": 0}),
                                  ("train_async.py", "k2", {"update_weights_interval": 2}),
                                  ("train_fully_async.py", "stream", {})):
        light.succeed(script, harness.flags(model, tmp_path, name, urls, save_interval=6, **changes,
                                            save_debug_rollout_data=saved.format(name=name)))
    lags = {}
    for name in ("sync", "async", "lag0", "k2", "stream"):
        lags[name] = []
        for step in range(6):
            groups = harness.read_groups(tmp_path / name / f"{step}.npz")
            versions = {run[0] for group in groups for sample in group["samples"] for run in sample["version_runs"]}
            lags[name].append(sorted(step - v for v in versions))
        rows = harness.metrics(tmp_path, name)
        assert [row["step"] for row in rows] == list(range(6))
        assert [[row["staleness/min"], row["staleness/max"]] for row in rows] == [[lag[0], lag[-1]] for lag in lags[name]]
    assert lags["sync"] == lags["lag0"] == lags["stream"] == [[0]] * 6
    assert lags["async"] == [[0]] + [[1]] * 5
    assert lags["k2"] == [[0], [1], [2], [1], [2], [1]]      # version 2 is published at step 2 and makes batches 3 and 4
    for name in ("lag0", "stream"):
        assert harness.same_bits(weights(tmp_path, "sync", 6), weights(tmp_path, name, 6)), name
    assert not harness.same_bits(*(weights(tmp_path, name, 6, optimizer=False) for name in ("sync", "async")))


def happens(out, name, event, **fields):
    """A condition: the run's ledger gets such a record from now on."""
    path = os.path.join(out, name, "ledger.jsonl")
    before = len(harness.read_jsonl(path))
    return lambda: any(r["event"] == event and all(r[k] == v for k, v in fields.items()) for r in harness.read_jsonl(path)[before:])


MOMENTS = {"trained 3": dict(event="trained", step=3), "trained 7": dict(event="trained", step=7),
           "saving 4": dict(event="save", step=4), "saving 6": dict(event="save", step=6),
           "generating 6": dict(event="draw", group=6 * 4 + 1), "generating 8": dict(event="draw", group=8 * 4 + 1)}


def cut(rig, script, words, hows, out):
    """Interrupts the run "cut" again and again, each time at a moment, by a signal; the caller resumes it. words(**flags)."""
    load = {}
    for moment, how in hows:
        condition = happens(out, "cut", **MOMENTS[moment])
        status, _ = rig.interrupt(rig.start(script, words(**load)), condition, how)
        assert status == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[how]
        load = {"load": str(out / "cut")}
    return load


@pytest.mark.drill
@pytest.mark.contract
@pytest.mark.parametrize("rig, script, like, hows", [
    (light, "train_async.py", "train_async.py", [("trained 3", signal.SIGKILL), ("saving 4", signal.SIGKILL),
                                                 ("saving 6", signal.SIGTERM), ("generating 8", signal.SIGKILL)]),
    (light, "train_sync.py", "train_sync.py", [("trained 3", signal.SIGKILL), ("saving 4", signal.SIGKILL),
                                               ("generating 6", signal.SIGKILL), ("generating 8", signal.SIGINT)]),
    (harness, "train_fully_async.py", "train_sync.py", [("generating 8", signal.SIGINT)]),
], ids=("async", "sync", "stream_ray"))
def test_kill_and_resume_is_exact(rig, script, like, hows, model, engine, tmp_path):
    """One run is interrupted and resumed again and again, another, of the script `like`, is not: the surviving line of the ledger
    has the same groups trained in the same steps, each once, and weights and optimizer end equal to the last bit, with Ray and
    without. (The last part of a run and the one that is not cut need no Ray; tests/test_stack.py kills Ray.)"""
    urls = engine(1, unit_seconds=0.03)
    words = lambda name="cut", **load: harness.flags(model, tmp_path, name, urls, num_rollout=9, save_interval=2, **load)
    light.succeed(like, words("whole"))
    light.succeed(script, words(**cut(rig, script, words, hows, tmp_path)))

    want, got = (Ledger.outcomes(str(tmp_path / name / "ledger.jsonl")) for name in ("whole", "cut"))
    assert got == want and len(want) == 36 and all(group["outcome"] == "trained" for group in want.values())
    assert sum(r["event"] == "resume" for r in Ledger.read(str(tmp_path / "cut" / "ledger.jsonl"))) == len(hows)
    assert harness.same_bits(weights(tmp_path, "whole", 9), weights(tmp_path, "cut", 9))
    rows = harness.metrics(tmp_path, "cut")
    assert [row["step"] for row in rows] == list(range(9))
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in harness.metrics(tmp_path, "whole")]


@pytest.mark.drill
@pytest.mark.contract
@pytest.mark.parametrize("rig, hows", [
    (light, [("trained 3", signal.SIGKILL), ("saving 4", signal.SIGKILL), ("trained 7", signal.SIGKILL)]),
    (harness, [("saving 6", signal.SIGTERM)]),
], ids=("light", "ray"))
def test_kill_and_resume_of_the_stream(rig, hows, model, engine, tmp_path):
    """Fully asynchronous with partial rollout, interrupted with groups in flight, once in a save: in the surviving line every
    prompt is trained once and none is left over, and no sample is older than --max-lag."""
    urls = engine(1, lengths="3:1,1:10", unit_seconds=0.05, budget=24)
    words = lambda **load: harness.flags(model, tmp_path, "cut", urls, num_rollout=10, save_interval=2, staleness_threshold=1.0,
                                         partial_rollout=True, max_lag=2, rollout_max_response_len=24, **load)
    light.succeed("train_fully_async.py", words(**cut(rig, "train_fully_async.py", words, hows, tmp_path)))
    outcomes = Ledger.outcomes(str(tmp_path / "cut" / "ledger.jsonl"))
    assert sorted(outcomes) == list(range(40)) and {group["outcome"] for group in outcomes.values()} == {"trained"}
    rows = harness.metrics(tmp_path, "cut")
    assert [row["step"] for row in rows] == list(range(10)) and max(row["staleness/max"] for row in rows) <= 2
    assert any(row["staleness/max"] > 0 for row in rows), "nothing ran ahead: the test shows nothing"


@pytest.mark.contract
def test_partial_rollout_continues_and_loses_nothing(model, engine, tmp_path):
    """Over-sampling with one long answer in three: continued samples carry mixed versions and equal columns, the engine is
    asked for what is left of the budget only, and every drawn group is trained, buffered or in flight."""
    urls = engine(1, lengths="2:1,1:12", unit_seconds=0.05, budget=24)
    light.succeed("train_async.py", harness.flags(
        model, tmp_path, "partial", urls, num_rollout=8, over_sampling_batch_size=8, partial_rollout=True, save_interval=8,
        rollout_max_response_len=24, save_debug_rollout_data=str(tmp_path / "data" / "{step}.npz")))
    mixed = 0
    for step in range(8):
        for group in harness.read_groups(tmp_path / "data" / f"{step}.npz"):
            for sample in group["samples"]:
                length = len(sample["response_tokens"])
                assert length == len(sample["loss_mask"]) == len(sample["rollout_logprobs"]) <= 24
                assert length == sum(count for _, count in sample["version_runs"])
                assert length == (12 if length > 1 else 1), "a continued answer has the length that it had at first"
                mixed += len(sample["version_runs"]) > 1
    assert mixed > 0, "no sample was continued under newer weights: the test shows nothing"
    outcomes = Ledger.outcomes(str(tmp_path / "partial" / "ledger.jsonl"))
    assert sum(group["outcome"] == "trained" for group in outcomes.values()) == 8 * 4
    assert {group["outcome"] for group in outcomes.values()} <= {"trained", "buffered"}
    assert sorted(outcomes) == list(range(len(outcomes)))


@pytest.mark.contract
def test_without_partial_rollout_aborted_groups_start_again(model, engine, tmp_path):
    """An aborted group is drawn again at its prompt and is not aborted a second time, so long answers do finish; no token of
    an older version is left in them."""
    urls = engine(1, lengths="2:1,1:12", unit_seconds=0.05, budget=24)
    light.succeed("train_sync.py", harness.flags(
        model, tmp_path, "reset", urls, num_rollout=8, over_sampling_batch_size=8, rollout_max_response_len=24,
        save_debug_rollout_data=str(tmp_path / "data" / "{step}.npz")))
    records = list(Ledger.read(str(tmp_path / "reset" / "ledger.jsonl")))
    back = [r["group"] for r in records if r["event"] == "put_back"]
    assert back and len(back) == len(set(back)), "aborted twice"
    groups = [g for step in range(8) for g in harness.read_groups(tmp_path / "data" / f"{step}.npz")]
    again = [g for g in groups if g["group_id"] in back]
    assert again and all(len(s["version_runs"]) == 1 for g in again for s in g["samples"])


def test_dynamic_sampling_gives_up_with_the_counts(model, engine, tmp_path):
    """Nothing but zero rewards: the run ends with what it counted, and does not sample for ever. More than 12 groups dropped
    are the limit; 4 may end at once, and 4 more be on their way."""
    status, output = light.run("train_sync.py", harness.flags(
        model, tmp_path, "hopeless", engine(1), custom_rm_path=None, dynamic_sampling_filter=True, max_filter_rounds=3))
    assert status == 1
    assert re.search(r"error: RuntimeError: (1[3-9]|20) groups drawn \(--max-filter-rounds 3 batches\) and only 0 of 4 accepted: "
                     r"0 were all right, \d+ all wrong", output), output[-2000:]


def test_data_that_ends_first_ends_the_run_cleanly(model, engine, tmp_path):
    """200 rows in batches of 64: three full steps in one epoch, and the final evaluation says which version it measured."""
    output = light.succeed("train_async.py", harness.flags(
        model, tmp_path, "epoch", engine(1), num_rollout=50, num_epoch=1, rollout_batch_size=64, n_samples_per_prompt=1,
        eval_prompt_data=["sums", os.path.join(model, "eval.jsonl")], eval_interval=2))
    assert len(harness.metrics(tmp_path, "epoch")) == 3
    evals = harness.read_jsonl(tmp_path / "epoch" / "eval.jsonl")
    assert [row["version"] for row in evals] == [0, 2, 3]
    assert re.fullmatch(r"eval_reward \d\.\d\d -> \d\.\d\d", output.strip().splitlines()[-1])


def test_evaluation_alone_leaves_the_run_as_it_was(model, engine, tmp_path):
    """--eval-only --load measures the saved weights and says their version; ledger and metrics are not touched."""
    urls, evals = engine(1), dict(eval_prompt_data=["sums", os.path.join(model, "eval.jsonl")])
    light.succeed("train_sync.py", harness.flags(model, tmp_path, "run", urls, num_rollout=3, save_interval=2, **evals))
    files = [tmp_path / "run" / name for name in ("ledger.jsonl", "metrics.jsonl")]
    before = [file.read_bytes() for file in files]
    output = light.succeed("train_sync.py", harness.flags(model, tmp_path, "run", urls, load=str(tmp_path / "run"),
                                                            num_rollout=None, eval_only=True, **evals))
    assert "evaluation of version 3" in output and [file.read_bytes() for file in files] == before


def test_the_two_halves_alone(model, engine, tmp_path):
    """--debug-rollout-only writes batches; --debug-train-only trains on them without an engine, to the same weights as the
    whole run that made them."""
    urls = engine(1)
    saved = str(tmp_path / "data" / "{step}.npz")
    light.succeed("train_sync.py", harness.flags(model, tmp_path, "whole", urls, num_rollout=3, save_interval=3,
                                                   save_debug_rollout_data=saved))
    light.succeed("train_sync.py", harness.flags(model, tmp_path, "train", num_rollout=3, save_interval=3, prompt_data=None,
                                                   debug_train_only=True, load_debug_rollout_data=saved))
    assert harness.same_bits(weights(tmp_path, "whole", 3), weights(tmp_path, "train", 3))
    light.succeed("train_sync.py", harness.flags(model, tmp_path, "roll", urls, num_rollout=3, debug_rollout_only=True,
                                                   save_debug_rollout_data=str(tmp_path / "roll_data" / "{step}.npz")))
    assert len(harness.read_groups(tmp_path / "roll_data" / "2.npz")) == 4
    assert not os.path.exists(tmp_path / "roll" / "ledger.jsonl")


@pytest.mark.contract
def test_an_engine_that_cannot_start_ends_the_run(model, tmp_path):
    """A port in use: the reason in the last line, status 1, no process left. (Other reasons: tests/test_engine.py.)"""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = harness.start("train_async.py", [*harness.flags(model, tmp_path, "run"), "--sglang-port", str(port)])
        family = {}
        while process.poll() is None:
            family.update({p.pid: p for p in psutil.Process(process.pid).children(recursive=True)})
            time.sleep(0.2)
    output, status = process.stdout.read(), process.returncode
    assert status == 1
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    assert said and said[0].startswith(f"error: engine 0: start: --sglang-port: 127.0.0.1:{port} is not free")
    _, alive = psutil.wait_procs(family.values(), timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.contract
@pytest.mark.drill
@pytest.mark.parametrize("alone", (False, True))
@pytest.mark.parametrize("order, text", [
    ({"refuse": 10, "status": 500, "verb": "update_weights_from_distributed"}, "update_weights_from_distributed: HTTP 500"),
    ({"stale": "tensors"}, "tensors are not the trainer's after a sync"),
    ({"stale": True}, "tensors are not the trainer's after a sync"),
])
def test_an_engine_that_fails_in_a_sync_is_named(alone, order, text, model, engine, tmp_path):
    """The other one goes on without it; where there is no other, that ends the run. What never worked is not started again."""
    good, bad = engine(2)
    requests.post(f"{bad}/script", json=order, timeout=10)
    status, output = light.run("train_sync.py", harness.flags(model, tmp_path, "run", [bad] if alone else [good, bad],
                                                              num_rollout=3, max_engine_restarts=0))
    said, records = output.splitlines(), harness.read_jsonl(tmp_path / "run" / "ledger.jsonl")
    assert any(f"engine {bad}" in line and text in line for line in said if "error: " in line or "warning: " in line)
    assert status == (1 if alone else 0) and ("error: no engine left: " in said[-1]) == alone
    assert [r["state"] for r in records if r["event"] == "engine"] == ["lost", "gone"]
    assert sum(r["event"] == "trained" for r in records) == (0 if alone else 3)


def test_two_runs_do_not_share_a_folder(model, tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, output = light.run("train_sync.py", harness.flags(model, tmp_path, "run"))
    assert status == 1 and "error: another process is writing to" in output


def test_a_resume_with_nothing_left_to_do_says_so(model, engine, tmp_path):
    light.succeed("train_sync.py", harness.flags(model, tmp_path, "run", engine(1), num_rollout=2, save_interval=1))
    status, output = light.run("train_sync.py", harness.flags(model, tmp_path, "run", load=str(tmp_path / "run"), num_rollout=2))
    assert status == 1 and "the checkpoint has 2 steps already, so --num-rollout 2 leaves nothing to do" in output


BROKEN = """
import sys

def helper(what):
    return what.no_such_thing

def keep(args, samples):
    return helper(samples)

def advantage(args, batch):
    return (
        helper(batch))

def loss(args, logp, columns):
    def inner():
        return columns["no_such_column"]                    # line 16
    return inner(), {}

def leave(args, sample):
    sys.exit(4)                                             # line 20

def unknown(args, sample):
    return float("nan")

async def a_generate(args, sample, agent):
    return helper(await agent.generate(sample))
"""


def see(folder):
    sys.path.append(folder)


MISSING = "object has no attribute 'no_such_thing'"


@pytest.mark.drill
@pytest.mark.parametrize("flag, function, said", [
    ("custom_generate_function_path", "a_generate", ":5, in helper: AttributeError: 'str' " + MISSING),
    ("dynamic_sampling_filter_path", "keep", ":5, in helper: AttributeError: 'list' " + MISSING),
    ("custom_advantage_path", "advantage", ":5, in helper: AttributeError: 'dict' " + MISSING),
    ("custom_loss_path", "loss", ":16, in inner: KeyError: 'no_such_column'"),
    ("custom_rm_path", "leave", ":20, in leave: RuntimeError: broken.leave called exit(4)"),
    ("custom_rm_path", "unknown", None)])                   # no line of the user's: the value is wrong, and named
def test_an_error_in_an_own_function_is_said_with_its_place(flag, function, said, model, engine, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    flags = harness.flags(model, tmp_path, "bad", engine(1), **{flag: f"broken.{function}"})
    status, output = light.run("train_async.py", flags, prepare=functools.partial(see, str(tmp_path)))
    last = output.strip().splitlines()[-1]
    assert status == 1, output[-2000:]
    if said is None:
        assert last.startswith("error: broken.unknown returned nan for sample"), last
    else:
        assert last.startswith(f"error: {tmp_path}/broken.py{said}   (trace: "), last


def test_lr_0_leaves_the_weights_alone(model, engine, tmp_path):
    light.succeed("train_async.py", harness.flags(model, tmp_path, "still", engine(1), lr=0, num_rollout=2, save_interval=1))
    assert harness.same_bits(*(weights(tmp_path, "still", step, optimizer=False) for step in (1, 2)))


REWARD = """
import harness

def leveled_reward(args, sample):
    # hands a value of the sample, and one for each of its tokens, on to the loss
    sample.columns = {"level": len(sample.prompt_tokens), "trust": [0.5] * len(sample.response_tokens)}
    if sample.group_id == 5 * 4:
        return 1 / 0                                        # line 8
    return harness.token_reward(args, sample)
"""


@pytest.mark.contract
def test_the_readme_functions_run_until_an_error_in_the_reward_ends_the_run(model, engine, tmp_path):
    """--custom-loss-path and --custom-advantage-path with the README's own text, from a file in the user's folder, with a
    correction over two steps of a version. The reward fails for the sixth batch: the last line names the place in the user's
    file, although the error is of a process of Ray's."""
    with open(os.path.join(harness.ROOT, "README.md")) as f:
        blocks = re.findall(r"```python\n(.*?)```", f.read(), re.S)
    (tmp_path / "my_losses.py").write_text("\n\n".join(block for block in blocks if "def sapo(" in block or "def opo(" in block))
    (tmp_path / "my_rewards.py").write_text(REWARD)
    words = harness.flags(model, tmp_path, "own", engine(1), num_rollout=6, update_weights_interval=2, policy_old="recompute",
                          custom_rm_path="my_rewards.leveled_reward", custom_loss_path="my_losses.sapo",
                          custom_advantage_path="my_losses.opo", rollout_is="sequence", rollout_is_batch_normalize=True,
                          rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="50,10", rs_denominator="original")
    process = harness.start("train_async.py", words, cwd=tmp_path)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 1
    place = f"{tmp_path}/my_rewards.py:8, in leveled_reward"
    assert f"error: {place}: ZeroDivisionError: division by zero" in output.strip().splitlines()[-1]
    assert "loss my_losses.sapo; --policy-old recompute" in output and "--rollout-is sequence 2.0; --rollout-rs token_k1" in output
    rows = harness.metrics(tmp_path, "own")[:4]
    assert [row["train/first_ppo_kl"] == 0.0 for row in rows] == [True, False, True, False]   # old: the version last published
    assert all(1 < row["train/gate"] < 3 and row["correction/masked_token_frac"] < 1 for row in rows)  # the gate is 2 at ratio 1
