"""What a run says of itself: warnings from hand-made rows, the timeline against the ledger and the metrics that it
is made from."""

import importlib.machinery
import json
import os
import re
import signal
import sys
import time
import types
from types import SimpleNamespace

import numpy as np
import pytest

import harness
import light
import tracking
import watchdog
from args import parse_args
from buffer import Ledger
from engines import Engines
from tracking import (RECENT, advice, all_rewards_equal, free, long_prompts, parts, read_spans, step_line, truncated_responses,
                      waiting_for_generation, write_timeline)

ROW = {"step": 7, "rollout/reward": 0.25, "rollout/reward_min": 0.0, "rollout/reward_max": 1.0, "rollout/zero_spread": 0.5,
       "rollout/truncated": 0.25, "rollout/response_len": 100.0, "rollout/response_len_max": 180, "rollout/tokens": 4000,
       "staleness/min": 0, "staleness/max": 2, "perf/step_time": 10.0, "perf/wait_prev_gen": 1.0, "sync/time": 0.5,
       "sync/pause_time": 0.25, "perf/train_time": 7.0, "perf/save_time": 0.75, "perf/generate_time": 8.0,
       "perf/tokens_per_second": 400.0}
ARGS = SimpleNamespace(script="train_async.py", n_samples_per_prompt=8, rollout_max_response_len=180, partial_rollout=False,
                       fully_async=False, staleness_threshold=0.0, over_sampling_batch_size=16, rollout_batch_size=16,
                       without_engines=False)


def rows(count=RECENT + 1, **changes):
    return [{**ROW, **{name.replace("__", "/"): value for name, value in changes.items()}}] * count


def args(**changes):
    return SimpleNamespace(**{**vars(ARGS), **changes})


# ---- the terminal -----------------------------------------------------------------------------------------
def test_the_line_of_a_step():
    assert parts(ROW) == {"wait": 1.0, "sync": 0.5, "train": 7.0, "save": 0.75, "other": 0.75}
    assert step_line(ROW) == ("step 7  reward 0.250  len 100.0 (max 180)  lag 0..2  10.00 s = wait 1.00 + sync 0.50 + train 7.00 "
                              "+ save 0.75 + other 0.75; generate 8.00  400 tokens/s")


def test_rewards_that_teach_nothing():
    assert all_rewards_equal(ARGS, rows()) is None
    assert "all rewards of the batch are 0.5: there is nothing" in all_rewards_equal(
        ARGS, rows(rollout__reward_min=0.5, rollout__reward_max=0.5, rollout__zero_spread=1.0))
    assert "--n-samples-per-prompt" in all_rewards_equal(ARGS, rows(rollout__zero_spread=1.0))
    assert all_rewards_equal(args(n_samples_per_prompt=1), rows(rollout__zero_spread=1.0)) is None     # no baseline of a group
    assert all_rewards_equal(ARGS, rows(rollout__zero_spread=1.0) + rows(1)) is None                   # over


def test_prompts_that_are_too_long():
    said = lambda dropped: long_prompts(args(rollout_max_prompt_len=16),
                                        rows(rollout__drawn=20, rollout__dropped_prompt_too_long=dropped))
    assert said(2) is None and long_prompts(ARGS, rows(rollout__drawn=20)) is None
    assert said(5) == "25% of the prompts have more than --rollout-max-prompt-len 16 tokens and are dropped: raise it"


def test_truncation_counts_over_the_last_steps():
    assert truncated_responses(ARGS, rows(rollout__truncated=0.5)) is None
    text = truncated_responses(ARGS, rows(2, rollout__truncated=0.4) + rows(1, rollout__truncated=0.85))       # mean 0.55
    assert "55% of the answers are cut off at --rollout-max-response-len 180" in text


@pytest.mark.parametrize("changes, flags, said", [
    ({"perf__wait_prev_gen": 0.0, "sync__pause_time": 0.1}, {}, "training never waits for generation (1% of the step): fewer"),
    ({"perf__wait_prev_gen": 2.0}, {}, None),                                              # 22.5 %
    ({"perf__wait_prev_gen": 4.0}, {}, "waits for generation (wait_prev_gen: 42% of the step), and the longest answers have "
     "1.8 x the mean length, so lengths are even: more rollout GPUs (--rollout-num-gpus) would help"),
    ({"perf__wait_prev_gen": 9.0}, {}, "training always waits for generation (wait_prev_gen: 92%"),
    ({"perf__wait_prev_gen": 4.0, "rollout__response_len": 20.0}, {},
     "9.0 x the mean length: more rollout GPUs will not help, --over-sampling-batch-size above 16 with --partial-rollout would"),
    ({"perf__wait_prev_gen": 4.0, "rollout__response_len": 20.0}, {"over_sampling_batch_size": 24},
     "help, --partial-rollout would"),
    ({"perf__wait_prev_gen": 4.0, "rollout__response_len": 20.0}, {"fully_async": True},
     "help, --staleness-threshold 0.5 with --partial-rollout would"),
    ({"perf__wait_prev_gen": 4.0, "rollout__response_len": 20.0}, {"fully_async": True, "staleness_threshold": 0.5},
     "help, --partial-rollout would"),
    ({"perf__wait_prev_gen": 4.0, "rollout__response_len": 20.0}, {"partial_rollout": True}, "and --partial-rollout is on"),
    ({"perf__wait_prev_gen": 9.0}, {"script": "train_sync.py"}, None),                     # it always waits: that is what it is
    ({"perf__wait_prev_gen": 0.0}, {"without_engines": True}, None)])
def test_waiting_says_what_to_change(changes, flags, said):
    got = waiting_for_generation(args(**flags), rows(**changes))
    assert (got is None) if said is None else said in got
    assert waiting_for_generation(args(**flags), rows(RECENT, **changes)) is None          # too early to say


def test_the_first_of_the_rows_is_not_counted():
    assert waiting_for_generation(ARGS, rows(1, perf__wait_prev_gen=1000.0) + rows(RECENT)) is None
    assert advice(ARGS, rows(1, perf__wait_prev_gen=1000.0) + rows(RECENT)) == "wait_prev_gen is moderate."
    tail = rows(perf__wait_prev_gen=5.0, rollout__response_len=9.0)
    assert "more rollout GPUs do not help, --over-sampling" in advice(ARGS, tail)


# ---- the timeline -----------------------------------------------------------------------------------------
def test_free_merges_and_cuts():
    taken = [(2.0, 3.0, {}), (5.0, 6.0, {})]
    assert free([(0, 1, {}), (0.5, 1.5, {})], taken) == [(0, 1.5, {})]
    assert free([(1, 7, {"a": 1})], taken) == [(1, 2.0, {"a": 1}), (3.0, 5.0, {"a": 1}), (6.0, 7, {"a": 1})]
    assert free([(2.2, 2.8, {}), (2.5, 5.5, {}), (5.5, 6.5, {})], taken) == [(3.0, 5.0, {}), (6.0, 6.5, {})]


def test_a_timeline_by_hand(tmp_path):
    """Two engines; group 0 is rewarded for 2 s after its last answer, half of it hidden by group 1; group 2 is aborted, and runs
    when the process is killed."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for time, event, fields in ((100, "sync", {"version": 0}), (100, "draw", {"group": 0, "row": 0, "epoch": 0}),
                                (101, "submit", {"group": 0, "engine": 0}), (102, "submit", {"group": 1, "engine": 0}),
                                (102.5, "submit", {"group": 2, "engine": 1}),
                                (106, "finish", {"group": 1, "tokens": [], "seconds": [], "generated": 105}),
                                (106, "finish", {"group": 0, "tokens": [], "seconds": [], "generated": 104}),
                                (107, "put_back", {"group": 2, "tokens": []}), (110, "submit", {"group": 2, "engine": 0}),
                                (111, "drop", {"group": 3, "reason": "prompt_empty", "tokens": [], "seconds": []})):
        ledger.write(event, **fields, time=time)
    row = {"step": 0, "sync/pause_time": 0.5, "sync/version": 1,
           "spans": {"wait": [[100, 106]], "sync": [[107, 109]], "save": [[106, 106.5]], "train": [[109, 112], [109, 113]]}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + '{"step": 1, "torn')
    (tmp_path / "eval.jsonl").write_text(json.dumps({"version": 1, "started": 109.5, "seconds": 1.0}) + "\n")
    spans, groups = read_spans(tmp_path)
    step, version = {"step": 0}, {"version": 1}
    assert [span for span in spans if span[0] == "rank" and span[1] == 1] == [
        ("rank", 1, "wait", 100, 106, step), ("rank", 1, "sync", 107, 109, step), ("rank", 1, "save", 106, 106.5, step),
        ("rank", 1, "train", 109, 113, step)]
    assert [span for span in spans if span[0] == "engine"] == [
        ("engine", 0, "generate", 101, 105, {}), ("engine", 0, "generate", 110, 111, {}),
        ("engine", 0, "sync", 107.5, 109, version), ("engine", 0, "reward", 105, 106, {}),
        ("engine", 0, "evaluate", 109.5, 110, version),
        ("engine", 1, "generate", 102.5, 107, {}), ("engine", 1, "sync", 107.5, 109, version),
        ("engine", 1, "evaluate", 109.5, 110.5, version)]
    assert groups == [(0, 1, 102, 105, 106, "finish"), (0, 0, 101, 104, 106, "finish"), (1, 2, 102.5, 107, 107, "put_back"),
                      (0, 2, 110, 111, 111, "in flight")]
    write_timeline(str(tmp_path))
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert {"name": "train", "ph": "X", "pid": 2, "tid": 200_001, "ts": 9_000_000, "dur": 4_000_000, "args": step} in events
    assert {"name": "thread_name", "ph": "M", "pid": 1, "tid": 100_001, "args": {"name": "engine 1"}} in events


def test_a_lost_engine_in_the_timeline(tmp_path):
    """Engine 0 is lost at 103 and serves again at 108; its group goes on at engine 1. It is lost again at the end."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for time, event, fields in ((100, "submit", {"group": 0, "engine": 0}), (101, "submit", {"group": 1, "engine": 1}),
                                (103, "engine", {"engine": 0, "state": "lost", "why": "it died"}),
                                (103, "submit", {"group": 0, "engine": 1}), (106, "engine", {"engine": 0, "state": "ready"}),
                                (108, "engine", {"engine": 0, "state": "up"}),
                                (109, "finish", {"group": 0, "tokens": [], "seconds": [], "generated": 109}),
                                (110, "engine", {"engine": 0, "state": "lost"}), (111, "put_back", {"group": 1, "tokens": []})):
        ledger.write(event, **fields, time=time)
    for name in ("metrics.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text("")
    spans, groups = read_spans(tmp_path)
    assert spans == [("engine", 0, "generate", 100, 103, {}), ("engine", 0, "lost", 103, 108, {}),
                     ("engine", 0, "lost", 110, 111, {}), ("engine", 1, "generate", 101, 111, {})]
    assert groups == [(0, 0, 100, 103, 103, "moved"), (1, 0, 103, 109, 109, "finish"), (1, 1, 101, 111, 111, "put_back")]


def check_timeline(run_dir):
    """RUN/timeline.json: each number against the ledger and the metrics."""
    with open(os.path.join(run_dir, "timeline.json")) as f:
        events = json.load(f)
    records = Ledger.surviving(os.path.join(run_dir, "ledger.jsonl"))
    metrics = harness.read_jsonl(os.path.join(run_dir, "metrics.jsonl"))
    seconds = lambda pid, tid, name: sum(e["dur"] for e in events if (e.get("pid"), e.get("tid"), e["name"], e["ph"]) ==
                                         (pid, 100_000 * pid + tid, name, "X")) / 1e6
    engines = {record["engine"] for record in records if record["event"] == "submit"}
    rows = {(e["pid"], e["tid"]): [] for e in events if e["ph"] == "X"}
    assert rows.keys() == {(1, 100_000 + engine) for engine in engines} | {(2, 200_000)}       # Perfetto: unique, and not 0
    for name, metric in (("wait", "perf/wait_prev_gen"), ("sync", "sync/time"), ("save", "perf/save_time"),
                         ("train", "perf/train_time")):
        assert seconds(2, 0, name) == pytest.approx(sum(row.get(metric, 0.0) for row in metrics), abs=1e-5 * len(metrics)), name
    for engine in engines:         # seconds in which at least one group is being generated, counted up and down
        where = {record["group"]: record["engine"] for record in records if record["event"] == "submit"}
        turns = [(record["time"], 1) for record in records if record["event"] == "submit" and record["engine"] == engine]
        turns += [(record.get("generated", record["time"]), -1) for record in records
                  if record["event"] in ("finish", "put_back") and where[record["group"]] == engine]
        busy, running, since = 0.0, 0, None
        for time, turn in sorted(turns, key=lambda t: (t[0], -t[1])):
            since = time if running == 0 else since
            running += turn
            busy += time - since if running == 0 else 0.0
        assert running == 0 and seconds(1, engine, "generate") == pytest.approx(busy, abs=1e-3)
    submitted = sum(record["event"] == "submit" for record in records)
    assert sum(e["ph"] == "b" for e in events) == sum(e["ph"] == "e" for e in events) == submitted
    for key in rows:
        slices = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == key)
        assert all(end <= start for (_, end), (start, _) in zip(slices, slices[1:])), f"{key}: slices overlap"
    return seconds, metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engines():
    servers = Engines(2, again=False, vocab_size=250, lengths="3:1,1:10", unit_seconds=0.01, budget=24)
    yield servers.urls
    servers.stop()


def slow_reward(args, samples):
    time.sleep(0.05)
    return [sum(sample.response_tokens) % 7 for sample in samples]


def test_the_timeline_of_a_run(model, engines, tmp_path):
    """One-step-off with a reward of 50 ms for each group. The trainer's log-probs lie beside each batch: their mean distance from
    the engine's is the metric that the loss computed."""
    flags = harness.flags(model, tmp_path, "run", engines, num_rollout=5, save_interval=2, rollout_max_response_len=24,
                          group_rm=True, custom_rm_path="test_tracking.slow_reward")
    output = light.succeed("train_async.py", flags)
    seconds, metrics = check_timeline(tmp_path / "run")
    assert seconds(1, 0, "reward") > 0.05 and seconds(1, 0, "generate") + seconds(1, 1, "generate") >= 2 * sum(
        row["perf/engine_busy_time"] for row in metrics) - 0.01     # a request lies within its group's time with the engine
    for row in metrics:
        assert f"step {row['step']}  reward {row['rollout/reward']:.3f}  len" in output
        file = tmp_path / "run" / "samples" / f"step_{row['step']:07d}.npz"
        trained = np.load(str(file).replace(".npz", ".trainer.npy"))
        engine = [logprob for group in harness.read_groups(file) for s in group["samples"] for logprob in s["rollout_logprobs"]]
        assert len(engine) == row["rollout/tokens"] and trained.dtype == np.float32
        assert np.abs(trained - np.array(engine)).mean() == pytest.approx(row["train/logprob_abs_diff"], rel=1e-5)


def test_the_timeline_of_a_killed_and_resumed_stream(model, engines, tmp_path):
    """After kill -9 the timeline is made from what is there; after the resume it is that of the surviving line."""
    flags = harness.flags(model, tmp_path, "run", engines, num_rollout=8, save_interval=3, rollout_max_response_len=24,
                          staleness_threshold=1.0, partial_rollout=True)
    run = str(tmp_path / "run")

    def midway():                          # with groups in flight: at a sync there are none for a moment
        return (len(harness.metrics(tmp_path, "run")) >= 5
                and harness.read_jsonl(os.path.join(run, "ledger.jsonl"))[-1]["event"] == "submit")

    light.interrupt(light.start("train_fully_async.py", flags), midway, signal.SIGKILL)
    write_timeline(run)
    events = json.load(open(os.path.join(run, "timeline.json")))
    ended = [e["args"]["ended"] for e in events if e["ph"] == "b"]
    assert ended.count("in flight") > 0 and ended.count("put_back") > 0
    light.succeed("train_fully_async.py", [*flags, "--load", run])
    metrics = harness.metrics(tmp_path, "run")
    events = json.load(open(os.path.join(run, "timeline.json")))
    assert [e["args"]["step"] for e in events if e["name"] == "train"] == [row["step"] for row in metrics] == list(range(8))
    assert all(e["args"]["ended"] in ("finish", "put_back", "in flight") for e in events if e["ph"] == "b")


# ---- a step that takes long -------------------------------------------------------------------------------
def test_the_bar_says_what_goes_on(tmp_path, monkeypatch):
    """The loop waits; its bar says so with what the rollout manager answers, and stops to ask when it is closed."""
    asked = []
    progress = SimpleNamespace(remote=lambda: asked.append(1) or f"{len(asked)} of 16 groups finished")
    monkeypatch.setattr(tracking, "ray", light.RAY)
    flags = SimpleNamespace(run_dir=str(tmp_path), eval_only=False, num_rollout=3, replay=None, use_wandb=False,
                            use_tensorboard=False, world_size=1)
    tracker = tracking.Tracker(flags, 0)
    with tracker.timer("perf/wait_prev_gen"):
        tracker.watch(SimpleNamespace(progress=progress))
        deadline = time.time() + 10
        while tracker.bar.postfix != "waits for generation; 2 of 16 groups finished" and time.time() < deadline:
            time.sleep(0.05)
    assert tracker.bar.postfix == "waits for generation; 2 of 16 groups finished" and tracker.phase == "syncs or trains"
    tracker.bar.close()
    time.sleep(1.2)
    count = len(asked)
    time.sleep(1.5)
    assert len(asked) == count


def test_the_bar_shows_what_a_busy_rank_counts(tmp_path):
    """The rank's thread writes its count with the next sign of life; what is counted behind it costs no file. A checkpoint's size
    while it is written; nothing of a rank that signed long ago."""
    args = SimpleNamespace(run_dir=str(tmp_path), watchdog_timeout=60)
    logs, dog = str(tmp_path / "logs"), watchdog.Watchdog("training rank 1", args, tick=0.05)
    dog.start()
    with dog.at("the training of step 5"):
        dog.begin("micro-batch", 16)
        for _ in range(3):
            dog.count()
        wait_until(lambda: watchdog.doing(logs, "training rank 1") == "the training of step 5: micro-batch 3 of 16")
    wait_until(lambda: watchdog.doing(logs, "training rank 1") == "")
    dog.ended, dog.part, dog.jobs = True, None, ["the saving of a checkpoint"]
    time.sleep(0.2)
    dog.sign()
    assert watchdog.doing(logs, "training rank 1") == "the saving of a checkpoint" and watchdog.doing(logs, "training rank 0") == ""
    os.utime(os.path.join(logs, "training rank 1.alive"), (time.time() - 60,) * 2)
    assert watchdog.doing(logs, "training rank 1") == ""
    for name, size in (("step_0000004", 9), ("step_0000005.tmp", 1000), ("step_0000005.tmp/more", 500)):
        path = tmp_path / "a [run]" / name if "more" in name else tmp_path / "a [run]" / name / "rank_00000.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    assert tracking.written(str(tmp_path / "a [run]")) == 1500


def wait_until(condition):
    deadline = time.time() + 10
    while not condition():
        assert time.time() < deadline
        time.sleep(0.01)


def in_a_terminal():
    """In the forked run: a terminal; the rank signs every 2 ms, and each training step takes its time."""
    from trainer import TrainWorker
    sys.stderr.isatty = lambda: True
    head, start = TrainWorker.head, watchdog.Watchdog.start

    def slow_head(self, *arguments, **options):
        time.sleep(0.2)
        return head(self, *arguments, **options)

    def quick_start(self):
        self.tick = 0.002
        start(self)

    TrainWorker.head, watchdog.Watchdog.start = slow_head, quick_start
    set_postfix = tracking.tqdm.set_postfix_str
    tracking.tqdm.set_postfix_str = lambda self, text: print(f"bar: {text}", flush=True) or set_postfix(self, text)
    tracking.time = SimpleNamespace(sleep=lambda _: time.sleep(0.02), time=time.time)


def test_a_run_in_a_terminal_counts_micro_batches_and_evaluated_answers(model, engines, tmp_path):
    """8 answers a step, two to a micro-batch: old log-probs and then training count to 4. 8 rows are evaluated."""
    flags = harness.flags(model, tmp_path, "run", engines, num_rollout=2, use_dynamic_batch_size=None, max_tokens_per_gpu=None,
                          micro_batch_size=2, policy_old="recompute", eval_interval=2, save_interval=1,
                          eval_prompt_data=["sums", os.path.join(model, "eval.jsonl")])
    output = light.succeed("train_sync.py", flags, prepare=in_a_terminal)
    said = set(re.findall(r"bar: (.*?)(?:; |$)", output, re.MULTILINE))
    for step in (0, 1):
        for part in ("log-probs, micro-batch", "micro-batch"):
            counts = {line.rsplit(": ", 1)[1] for line in said if line.startswith(f"the training of step {step}: {part} ")}
            assert counts <= {f"{part} {i} of 4" for i in range(5)} and f"{part} 3 of 4" in counts, (step, counts)
    assert re.search(r"evaluation: \d of 8 answers", output)


# ---- said once, and elsewhere -----------------------------------------------------------------------------
def fake_wandb():
    """In the forked run: a wandb that writes down what it is told."""
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)

    def init(dir, **options):
        log = open(os.path.join(dir, "wandb.jsonl"), "w", buffering=1)
        say = lambda what: log.write(json.dumps(what) + "\n")
        say({"mode": options["mode"], "id": options["id"], "lr": options["config"]["lr"]})
        return SimpleNamespace(log=say, finish=lambda: say({"finished": True}), define_metric=lambda *_, **__: None)

    wandb.init = init
    sys.modules["wandb"] = wandb


def test_a_warning_is_said_once_and_wandb_gets_the_scalars(model, engines, tmp_path):
    flags = dict(num_rollout=4, custom_rm_path=None, rm_type="exact", use_wandb=True, wandb_mode="offline", eval_interval=2,
                 eval_prompt_data=["sums", os.path.join(model, "eval.jsonl")])
    output = light.succeed("train_async.py", harness.flags(model, tmp_path, "run 1", engines, **flags), prepare=fake_wandb)
    assert output.count("warning: step 0: all rewards of the batch are 0") == output.count("warning: ") - output.count(
        "of the answers are cut off") == 1
    first, *logged, last = harness.read_jsonl(tmp_path / "run 1" / "wandb.jsonl")
    assert first == {"mode": "offline", "id": "run_1", "lr": 0.01} and last == {"finished": True}
    metrics = harness.metrics(tmp_path, "run 1")
    for row in metrics:
        assert {name: value for name, value in row.items() if not isinstance(value, dict)} in logged
    assert [row["step"] for row in logged if "eval/sums/reward" in row] == [0, 2, 4]


def test_wandb_that_is_not_installed(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for flags, said in (({"use_wandb": True}, "--use-wandb: the package is not installed here: pip install wandb"),
                        ({"wandb_group": "g"}, "--wandb-group needs --use-wandb")):
        with pytest.raises(SystemExit):
            parse_args(harness.flags(model, tmp_path, "x", **flags))
        assert said in capsys.readouterr().err
