"""What a run says of itself: a progress bar, a line for each step, warnings, metrics.jsonl, eval.jsonl, TensorBoard, Weights &
Biases, a summary, and timeline.json."""

import contextlib
import glob
import json
import math
import os
import re
import statistics
import threading
import time
from collections import deque

import numpy as np
import ray
from tqdm import tqdm

from buffer import Ledger
from watchdog import doing

SPANS = {"perf/wait_prev_gen": "wait", "perf/save_time": "save"}     # timers of the loop that are shown in the timeline
PHASES = {"perf/wait_prev_gen": "waits for generation", "perf/save_time": "saves"}
RECENT, QUIET = 10, 100            # steps that a warning looks at; steps until the same one is said again


class Tracker:
    """Lives in the driver. `start_step` > 0 after a resume: rows that are about to be written again are cut off first."""

    def __init__(self, args, start_step):
        self.args, self.pending, self.step_started, self.evaluation = args, {}, time.time(), None
        cut = math.inf if args.eval_only else start_step
        self.rows = Table(os.path.join(args.run_dir, "metrics.jsonl"), "step", cut)
        self.evals = Table(os.path.join(args.run_dir, "eval.jsonl"), "version", cut)
        self.bar = tqdm(total=args.num_rollout, initial=start_step, unit="step", dynamic_ncols=True, mininterval=1)
        self.version, self.board, self.wandb = None, None, None
        self.spans = {}                   # of this step: name -> [[start, end], ...], unix seconds
        self.recent, self.said = deque(maxlen=RECENT + 1), {}     # rows of this process; warning -> step that it was said in
        self.phase = "starts"             # what the loop does now, for `watch`
        self.recorded = {}                # step -> row of the run that is replayed; on GPUs sums have no fixed order
        if args.replay and not args.replay_data_only and args.device == "cpu" == args.recorded["device"]:
            self.recorded = {row["step"]: row for row in read_rows(os.path.join(args.replay, "metrics.jsonl"))}
        if args.use_tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(os.path.join(args.run_dir, "tensorboard"))
        if args.use_wandb:
            import wandb
            self.wandb = wandb.init(project=args.wandb_project, group=args.wandb_group, name=args.run_name, dir=args.run_dir,
                                    id=re.sub(r"[^\w-]", "_", args.run_name), resume="allow", mode=args.wandb_mode,
                                    config=args.flags)
            self.wandb.define_metric("*", step_metric="step")         # an evaluation is late: its step is the version

    @contextlib.contextmanager
    def timer(self, name):
        """Adds the seconds of the block to `name` in this step's row."""
        started, self.phase = time.time(), PHASES.get(name, name)
        try:
            yield
        finally:
            ended, self.phase = time.time(), "syncs or trains"
            self.pending[name] = self.pending.get(name, 0.0) + ended - started
            if name in SPANS:
                self.spans.setdefault(SPANS[name], []).append([started, ended])

    def watch(self, rollout):
        """Beside the bar, each second, what goes on within a step that takes long: for a terminal with a reader. A rank that
        trains answers no call, so what it does is read from its sign of life."""
        args = self.args

        def look():
            while not self.bar.disable:            # until it is closed
                with contextlib.suppress(Exception):      # of the run itself, which says its errors better
                    trainer = doing(os.path.join(args.run_dir, "logs"), f"training rank {args.world_size - 1}")
                    trainer += f": {written(args.save) / 1e9:.2f} GB" if "saving" in trainer else ""
                    generation = ray.get(rollout.progress.remote(), timeout=10)
                    self.bar.set_postfix_str("; ".join(filter(None, [trainer or self.phase, generation])))
                time.sleep(1)

        threading.Thread(target=look, daemon=True).start()

    def note(self, metrics):
        """Values for this step's row: those of a sync that has just ended."""
        self.pending.update(metrics)
        now = time.time()
        self.spans.setdefault("sync", []).append([now - metrics["sync/time"], now])
        self.version = metrics.get("sync/version", self.version)

    def log_step(self, step, rollout_metrics, train_metrics):
        """One row of metrics.jsonl and one line in the terminal. train_metrics: one dict for each rank; rank 0's is whole."""
        now = time.time()
        seconds, self.step_started = now - self.step_started, now
        self.spans["train"] = [[m["started"], m["started"] + m["perf/train_time"]] for m in train_metrics if "started" in m]
        row = {"step": step, "version": self.version, **rollout_metrics, **(train_metrics or [{}])[0], **self.pending,
               "perf/step_time": seconds, "perf/tokens_per_second": rollout_metrics["rollout/tokens"] / seconds}
        row.pop("started", None)
        self.save_logprobs(step, row.pop("logprobs", None))
        row["spans"], self.spans = self.spans, {}
        row["perf/train_idle_share"] = max(0.0, 1 - row.get("perf/train_time", 0.0) / seconds)
        row["perf/rollout_idle_share"] = max(0.0, 1 - row["perf/engine_busy_time"] / seconds)
        self.pending = {}
        if self.recorded:
            compare(self.args.replay, row, self.recorded)
        self.rows.add(row)
        self.write_board(step, row)
        self.bar.update(1)
        self.say(step_line(row))
        self.recent.append(row)
        for warning in WARNINGS:
            if text := warning(self.args, list(self.recent)):
                self.warn(warning.__name__, step, text)
        self.collect_evaluation(timeout=0)     # last: if it failed, the step is written down
        self.check_parity(step, row)

    def warn(self, name, step, text):
        """Says it, unless it was said in the last QUIET steps."""
        if step - self.said.get(name, -QUIET) >= QUIET:
            self.said[name] = step
            self.say(f"warning: step {step}: {text}")

    def save_logprobs(self, step, logprobs):
        """The trainer's log-probs of the batch, float32 end to end in the order of its file, beside that file."""
        if logprobs is not None:
            os.makedirs(os.path.dirname(self.args.record_path), exist_ok=True)
            np.save(self.args.record_path.format(step=step).replace(".npz", ".trainer.npy"), np.asarray(logprobs))

    def check_parity(self, step, row):
        mismatch, args = row.get("parity/mismatch", 0.0), self.args
        text = f"engine and trainer differ by {mismatch:.3g} per token in their log-probs on the same weights (parity/mismatch)"
        if args.parity_max is not None and mismatch > args.parity_max:
            raise RuntimeError(f"step {step}: {text}: more than --parity-max {args.parity_max:g}. Sampling flags, "
                               f"dtypes or kernels differ")
        if mismatch > args.parity_warn:
            self.warn("parity", step, f"{text}: more than --parity-warn {args.parity_warn:g}")

    # ---- evaluation ---------------------------------------------------------------------------------------
    def evaluate_if_due(self, rollout, version):
        """Starts the evaluation of the version just published. It runs beside generation and training; the next sync waits for
        its end, and the first log_step behind that end collects it."""
        args = self.args
        self.collect_evaluation()                 # over, since there was a sync
        if version == 0 and args.skip_eval_before_train:
            return
        if args.eval_interval and version % args.eval_interval == 0:
            self.evaluation = rollout.evaluate.remote()

    def evaluate(self, rollout):
        """Evaluates now, unless this version has been."""
        if self.args.eval_only or not any(row["version"] == self.version for row in self.evals.read()):
            self.evaluation = rollout.evaluate.remote()
            self.collect_evaluation()

    def collect_evaluation(self, timeout=None):
        """Writes down the evaluation that was started, if it ends within so many seconds (None: at any time)."""
        if self.evaluation is None or not ray.wait([self.evaluation], num_returns=1, timeout=timeout)[0]:
            return
        results, self.evaluation = ray.get(self.evaluation), None
        self.evals.add(results)
        self.write_board(results["version"], {f"eval/{name}": value for name, value in results.items() if "/" in name})
        rewards = "  ".join(f"{name} {value:.3f}" for name, value in results.items() if name.endswith("/reward"))
        self.say(f"evaluation of version {results['version']}: {rewards}")

    def lose_evaluation(self):
        """The engines that it ran on are gone."""
        if self.evaluation is not None:
            self.evaluation = None
            self.say(f"warning: the evaluation of version {self.version} is lost with the engines")

    # ---- output -------------------------------------------------------------------------------------------
    def say_speed(self, rows):
        """The speed report of an asynchronous run; also RUN/speed.json."""
        if self.args.script == "train_sync.py":
            return
        s = speed(self.args, rows)
        with open(os.path.join(self.args.run_dir, "speed.json"), "w") as f:
            json.dump(s, f, indent=1)
        print(f"speed: {s['sync'] / s['async']:.2f} x train_sync.py with these flags, which would take {s['sync']:.2f} s a step: "
              f"{s['hidden generation']:+.2f} s by hidden generation, {s['fewer syncs']:+.2f} by fewer syncs. Against other "
              f"loops: {s['no log-prob pass']:+.2f} where they recompute old log-probs, {s['fewer training GPUs']:+.2f} where they "
              f"train on all GPUs")

    def write_board(self, step, values):
        scalars = {name: value for name, value in values.items() if not isinstance(value, dict)}    # others: histogram, spans
        for name, value in scalars.items() if self.board else ():
            self.board.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log({**scalars, "step": step})

    def say(self, text):
        with self.bar.external_write_mode():
            print(text, flush=True)

    def summary(self):
        """The run in a few lines; the last is the evaluation before and after."""
        self.bar.close()
        if self.board:
            self.board.close()
        if self.wandb:
            self.wandb.finish()
        rows = self.rows.read()
        if rows:
            if os.path.exists(os.path.join(self.args.run_dir, "ledger.jsonl")):      # not where it trained on recorded batches
                write_timeline(self.args.run_dir)
            tenth = max(1, len(rows) // 10)
            reward = lambda part: statistics.fmean(row["rollout/reward"] for row in part)
            mean = lambda name: statistics.fmean(row.get(name, 0.0) for row in rows[1:] or rows)   # the first step warms up
            print(f"\n{len(rows)} steps in {self.args.run_dir}")
            print(f"reward of the first {tenth} and the last {tenth} steps: {reward(rows[:tenth]):.3f} -> "
                  f"{reward(rows[-tenth:]):.3f}")
            print(f"seconds per step: {mean('perf/step_time'):.2f} = waiting for generation {mean('perf/wait_prev_gen'):.2f} "
                  f"+ sync {mean('sync/time'):.2f} + training {mean('perf/train_time'):.2f} + other; generation "
                  f"{mean('perf/generate_time'):.2f}")
            if self.recorded:              # a difference would have ended the run
                losses = "; losses and gradient norms, too" if self.args.device == "cpu" else ""
                print(f"every decision and batch was the record's in all {len(rows)} steps{losses}")
            if not self.args.without_engines:
                print(f"idle: trainer {mean('perf/train_idle_share'):.0%}, engines {mean('perf/rollout_idle_share'):.0%}. "
                      f"{advice(self.args, rows)}")
                self.say_speed(rows)
        evals = self.evals.read()
        if evals:
            name = self.args.eval_sets[0][0] if self.args.eval_sets else None
            values = [row[f"{name}/reward"] for row in evals if f"{name}/reward" in row]
            if values:
                print(f"eval_reward {values[0]:.2f} -> {values[-1]:.2f}", flush=True)


def speed(args, rows):
    """Seconds per step that this run gains over `train_sync.py` with its flags, and what from. Means over all steps but the
    first, which warms up.

    The synchronous step is put together from what was measured here: a batch's samples alone on the engines
    (perf/lone_generate_time), training, a sync that waits for nothing, and the same rest.
    {"sync": seconds of that step, "async": of this run's, "hidden generation": s, "fewer syncs": s,
     "no log-prob pass": further seconds against a loop that recomputes old log-probs (their forward pass is about a third of
     the update), "fewer training GPUs": seconds lost against a loop that trains on all GPUs, if that scales perfectly}
    The first two parts add up to sync - async.
    """
    rows = rows[1:] or rows
    mean = lambda name: statistics.fmean(row.get(name, 0.0) for row in rows)
    step = mean("perf/step_time")
    waited = statistics.fmean(map(seconds_waited, rows))
    syncing = mean("sync/time") - mean("sync/pause_time")             # of each step, on average
    alone = statistics.fmean([row["sync/time"] - row["sync/pause_time"] for row in rows if "sync/time" in row] or [0.0])
    generation, update = mean("perf/lone_generate_time"), mean("perf/train_time") - mean("perf/log_probs_time")
    share = args.rollout_num_gpus / (args.rollout_num_gpus + args.world_size)
    return {"sync": step - waited - syncing + generation + alone, "async": step, "hidden generation": generation - waited,
            "fewer syncs": alone - syncing,
            "no log-prob pass": update / 3 if args.policy_old == "rollout" else 0.0,
            "fewer training GPUs": -mean("perf/train_time") * share}


# ---- the line of a step, and what is off ------------------------------------------------------------------
def parts(row):
    """Where the seconds of a step went, as the training side sees them: {name: seconds}, which add up to perf/step_time."""
    found = {"wait": row["perf/wait_prev_gen"], "sync": row.get("sync/time", 0.0), "train": row.get("perf/train_time", 0.0),
             "save": row.get("perf/save_time", 0.0)}
    return {**found, "other": max(0.0, row["perf/step_time"] - sum(found.values()))}


def step_line(row):
    seconds = " + ".join(f"{name} {value:.2f}" for name, value in parts(row).items())
    return (f"step {row['step']}  reward {row['rollout/reward']:.3f}  len {row['rollout/response_len']:.1f} "
            f"(max {row['rollout/response_len_max']})  lag {row['staleness/min']}..{row['staleness/max']}  "
            f"{row['perf/step_time']:.2f} s = {seconds}; generate {row['perf/generate_time']:.2f}  "
            f"{row['perf/tokens_per_second']:.0f} tokens/s")


def all_rewards_equal(args, rows):
    row = rows[-1]
    if row["rollout/reward_min"] == row["rollout/reward_max"]:
        return (f"all rewards of the batch are {row['rollout/reward_min']:g}: there is nothing to learn from. Look at samples "
                f"(scripts/report.py) and at the reward function; take easier or harder prompts")
    if row["rollout/zero_spread"] == 1 and args.n_samples_per_prompt > 1:
        return ("in every group all rewards are equal: a group's baseline leaves nothing to learn from. Take more samples for "
                "each prompt (--n-samples-per-prompt), or prompts of middling difficulty")
    return None


def truncated_responses(args, rows):
    share = statistics.fmean(row["rollout/truncated"] for row in rows)
    if share > 0.5:
        return (f"{share:.0%} of the answers are cut off at --rollout-max-response-len {args.rollout_max_response_len}: raise "
                "it, or look at samples (scripts/report.py) for answers that never end")
    return None


def long_prompts(args, rows):
    dropped, drawn = (sum(row.get(f"rollout/{name}", 0) for row in rows) for name in ("dropped_prompt_too_long", "drawn"))
    if dropped > 0.1 * drawn:
        return (f"{dropped / drawn:.0%} of the prompts have more than --rollout-max-prompt-len {args.rollout_max_prompt_len} "
                f"tokens and are dropped: raise it")
    return None


def waiting_for_generation(args, rows):
    """High or near 0: what to do about it. Not for train_sync.py, whose training always waits."""
    if len(rows) <= RECENT or args.script == "train_sync.py" or args.without_engines:
        return None
    rows = rows[1:]                                # the first may be that of the run, which warms up
    share, tail = wait_share(rows), length_tail(rows)
    if share < 0.02:
        return (f"training never waits for generation ({share:.0%} of the step): fewer rollout GPUs would do, and more training "
                f"GPUs make it faster")
    if share < 0.25:
        return None
    often = "always waits" if share > 0.75 else "waits"
    start = f"training {often} for generation (wait_prev_gen: {share:.0%} of the step), and the longest answers have "
    if tail < 4:
        return f"{start}{tail:.1f} x the mean length, so lengths are even: more rollout GPUs (--rollout-num-gpus) would help"
    return f"{start}{tail:.1f} x the mean length: more rollout GPUs will not help, {long_tail_flags(args)}"


def long_tail_flags(args):
    """The flags that keep the longest answers from holding up the rest, which are not set yet."""
    if args.partial_rollout:
        return "and --partial-rollout is on: raise --max-lag where it is set, or lower --rollout-max-response-len"
    if args.fully_async:
        above = "" if args.staleness_threshold else "--staleness-threshold 0.5 with "
        return f"{above}--partial-rollout would"
    size = args.over_sampling_batch_size
    over = f"--over-sampling-batch-size above {size}" if size <= args.rollout_batch_size else "--partial-rollout"
    return f"{over}{' with --partial-rollout' if size <= args.rollout_batch_size else ''} would"


WARNINGS = (all_rewards_equal, truncated_responses, long_prompts, waiting_for_generation)     # (args, last rows) -> text or None


def seconds_waited(row):
    """That training waited for generation. A stream without partial rollout waits for what runs at the sync, not at the batch;
    there an evaluation is waited for as well, which does not count."""
    wait = lambda name: row.get(name, 0.0)
    return wait("perf/wait_prev_gen") + wait("sync/pause_time") - wait("sync/eval_wait_time")


def wait_share(rows):
    return sum(map(seconds_waited, rows)) / sum(row["perf/step_time"] for row in rows)


def length_tail(rows):
    """The longest answer of a batch, in mean lengths."""
    return (statistics.fmean(row["rollout/response_len_max"] for row in rows)
            / max(statistics.fmean(row["rollout/response_len"] for row in rows), 1e-9))


def advice(args, rows):
    """What `wait_prev_gen` says about the split of GPUs, over a whole run."""
    rows = rows[1:] or rows
    share = wait_share(rows)
    if share < 0.05:
        return "wait_prev_gen is near 0: " + ("fewer rollout GPUs would do." if args.num_engines > 1 else
                                              "training is what takes the time.")
    if share < 0.25:
        return "wait_prev_gen is moderate."
    if length_tail(rows) > 4:
        return f"wait_prev_gen is high and lengths have a long tail: more rollout GPUs do not help, {long_tail_flags(args)}."
    return "wait_prev_gen is high with even lengths: more rollout GPUs would help."


# ---- timeline ---------------------------------------------------------------------------------------------
def write_timeline(run_dir):
    """RUN/timeline.json for https://ui.perfetto.dev. Made from the ledger, the metrics and the evaluations, when a run ends and
    by scripts/report.py: these survive a kill, so nothing has to be written twice."""
    events = chrome_events(*read_spans(run_dir))
    path = os.path.join(run_dir, "timeline.json")
    with open(path + ".tmp", "w") as f:
        f.write("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    os.replace(path + ".tmp", path)


def read_spans(run_dir):
    """(spans, groups) of a run, in unix seconds.

    spans: [(side, number, name, start, end, {"step" or "version": ...})], side "engine" or "rank"; those of one engine or rank do
    not overlap. An engine has generate (at least one group's answers are being made), lost, reward (groups wait for nothing
    else), sync (from the end of the pause on: until then it may finish what runs) and evaluate (it does nothing else); a training
    rank wait, sync, save and train.
    groups: [(engine, group, start, when its last answer came, end, how it ended)]: each time that a group was with an engine.
    """
    rows = read_rows(os.path.join(run_dir, "metrics.jsonl"))
    records = Ledger.surviving(os.path.join(run_dir, "ledger.jsonl"))
    groups = group_spans(records)
    evals = [(row["started"], row["started"] + row["seconds"], {"version": row["version"]})
             for row in read_rows(os.path.join(run_dir, "eval.jsonl")) if "started" in row]
    ranks, syncs = [], []
    for row in (row for row in rows if "spans" in row):
        step = {"step": row["step"]}
        for name in ("wait", "sync", "save"):
            ranks += [("rank", rank, name, *span, step) for span in row["spans"].get(name, ())
                      for rank in range(max(1, len(row["spans"]["train"])))]
        ranks += [("rank", rank, "train", *span, step) for rank, span in enumerate(row["spans"]["train"])]
        syncs += [(start + row["sync/pause_time"], end, {"version": row["sync/version"]})
                  for start, end in row["spans"].get("sync", ())]
    engines = []
    for engine in sorted({group[0] for group in groups}):
        taken = []
        for name, found in (("generate", [(start, generated, {}) for e, _, start, generated, _, _ in groups if e == engine]),
                            ("lost", lost_spans(records, engine)), ("sync", syncs),
                            ("reward", [(generated, end, {}) for e, _, _, generated, end, _ in groups if e == engine]),
                            ("evaluate", evals)):
            new = free(found, taken)
            engines += [("engine", engine, name, *span) for span in new]
            taken = sorted(taken + new, key=lambda span: span[0])
    return engines + ranks, groups


def group_spans(records):
    """Ledger -> [(engine, group, start, generated, end, event)]. What was in flight when a run was killed ends with its last
    record."""
    found, running = [], {}
    for record in records:
        if record["event"] == "submit":
            if record["group"] in running:         # its engine was lost
                engine, start = running[record["group"]]
                found.append((engine, record["group"], start, record["time"], record["time"], "moved"))
            running[record["group"]] = record["engine"], record["time"]
        elif record["event"] in ("finish", "drop", "put_back") and record["group"] in running:
            (engine, start), end = running.pop(record["group"]), record["time"]
            generated = record.get("generated", end)
            found.append((engine, record["group"], start, generated if start <= generated <= end else end, end, record["event"]))
        elif record["event"] == "resume":
            running.clear()                        # their answers never came, and nobody knows when the engine stopped
    return found + [(engine, group, start, records[-1]["time"], records[-1]["time"], "in flight")
                    for group, (engine, start) in running.items()]


def lost_spans(records, engine):
    """[(start, end, {})] in which an engine did not serve."""
    found, since = [], None
    for record in records:
        if record["event"] == "engine" and record["engine"] == engine:
            if record["state"] == "up" and since is not None:
                found.append((since, record["time"], {}))
            since = None if record["state"] == "up" else since or record["time"]
    return found if since is None else found + [(since, records[-1]["time"], {})]


def free(spans, taken):
    """Merges spans [(start, end, details)] that overlap and cuts away what `taken`, sorted and without overlaps, covers."""
    merged = []
    for start, end, details in sorted(spans, key=lambda span: span[:2]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), merged[-1][2])
        else:
            merged.append((start, end, details))
    left, at = [], 0
    for start, end, details in merged:
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        place = at
        while place < len(taken) and taken[place][0] < end:
            if start < taken[place][0]:
                left.append((start, taken[place][0], details))
            start, place = max(start, taken[place][1]), place + 1
        if start < end:
            left.append((start, end, details))
    return left


def chrome_events(spans, groups):
    """Events of Chromium's "Trace Event Format", in microseconds since the first: one thread for each engine and training rank,
    and beside them the groups in flight as asynchronous events, which may overlap. Perfetto wants thread numbers that are unique
    over all processes, and not 0: else it drops events."""
    pids, thread = {"engine": 1, "rank": 2}, lambda side, number: {"pid": pids[side], "tid": 100_000 * pids[side] + number}
    events = [{"name": what, "ph": "M", "pid": pid, "args": args}
              for pid, name in ((1, "engines"), (2, "training ranks"), (3, "groups in flight"))
              for what, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": pid}))]
    for side, number in sorted({span[:2] for span in spans}):
        events.append({"name": "thread_name", "ph": "M", **thread(side, number), "args": {"name": f"{side} {number}"}})
    first = min([span[3] for span in spans] + [group[2] for group in groups], default=0.0)
    micros = lambda seconds: round((seconds - first) * 1e6)
    for side, number, name, start, end, details in sorted(spans, key=lambda span: span[3]):
        events.append({"name": name, "ph": "X", **thread(side, number), "ts": micros(start), "dur": micros(end) - micros(start),
                       "args": details})
    for i, (engine, group, start, _, end, how) in enumerate(groups):
        common = {"name": f"engine {engine}", "cat": "group", "id2": {"local": i}, "pid": 3, "tid": 300_000 + engine}
        events.append({**common, "ph": "b", "ts": micros(start), "args": {"group": group, "ended": how}})
        events.append({**common, "ph": "e", "ts": micros(end)})
    return events


def written(folder):
    """Bytes of the checkpoint that is being written there."""
    return sum(map(os.path.getsize, glob.glob(os.path.join(glob.escape(folder), "step_*.tmp", "*"))))


class Table:
    """A JSONL file with one row for each value of `key`; rows from `start` on are cut off, to be written again."""

    def __init__(self, path, key, start):
        self.path = path
        kept = [row for row in self.read() if row[key] < start] if os.path.exists(path) else []
        with open(path + ".tmp", "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in kept)
        os.replace(path + ".tmp", path)

    def add(self, row):
        with open(self.path, "a") as f:
            f.write(json.dumps(row) + "\n")

    def read(self):
        return read_rows(self.path)


def read_rows(path):
    """All whole rows; the last line may be torn by a kill."""
    with open(path) as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


def compare(run, row, recorded):
    """A replayed step must say of its training what the record says, to the last bit. ValueError at the first difference."""
    before = recorded.get(row["step"])
    for name, value in row.items() if before else ():
        if name.startswith(("train/", "rollout/reward", "staleness/")) and before.get(name) != value:
            raise ValueError(f"--replay {run}: the replay departs from the record in step {row['step']}: {name} was "
                             f"{before.get(name)!r}, is {value!r}")
