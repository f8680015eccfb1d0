"""What a run says of itself: a progress bar, a line for each step, metrics.jsonl, eval.jsonl, TensorBoard, a summary."""

import contextlib
import json
import math
import os
import statistics
import time

import ray
from tqdm import tqdm


class Tracker:
    """Lives in the driver. `start_step` > 0 after a resume: rows that are about to be written again are cut off first."""

    def __init__(self, args, start_step):
        self.args, self.pending, self.step_started, self.evaluation = args, {}, time.time(), None
        cut = math.inf if args.eval_only else start_step
        self.rows = Table(os.path.join(args.run_dir, "metrics.jsonl"), "step", cut)
        self.evals = Table(os.path.join(args.run_dir, "eval.jsonl"), "version", cut)
        self.bar = tqdm(total=args.num_rollout, initial=start_step, unit="step", dynamic_ncols=True, mininterval=1)
        self.version, self.board = None, None
        self.recorded = {}                # step -> row of the run that is replayed; on GPUs sums have no fixed order
        if args.replay and not args.replay_data_only and args.device == "cpu" == args.recorded["device"]:
            self.recorded = {row["step"]: row for row in read_rows(os.path.join(args.replay, "metrics.jsonl"))}
        if args.use_tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(os.path.join(args.run_dir, "tensorboard"))

    @contextlib.contextmanager
    def timer(self, name):
        """Adds the seconds of the block to `name` in this step's row."""
        started = time.time()
        try:
            yield
        finally:
            self.pending[name] = self.pending.get(name, 0.0) + time.time() - started

    def note(self, metrics):
        """Values for this step's row."""
        self.pending.update(metrics)
        self.version = metrics.get("sync/version", self.version)

    def log_step(self, step, rollout_metrics, train_metrics):
        """One row of metrics.jsonl and one line in the terminal. train_metrics: one dict for each rank; rank 0's is whole."""
        self.collect_evaluation(timeout=0)
        now = time.time()
        seconds, self.step_started = now - self.step_started, now
        row = {"step": step, "version": self.version, **rollout_metrics, **(train_metrics or [{}])[0], **self.pending,
               "perf/step_time": seconds}
        row["perf/train_idle_share"] = max(0.0, 1 - row.get("perf/train_time", 0.0) / seconds)
        row["perf/rollout_idle_share"] = max(0.0, 1 - row["perf/engine_busy_time"] / seconds)
        self.pending = {}
        if self.recorded:
            compare(self.args.replay, row, self.recorded)
        self.rows.add(row)
        self.write_board(step, row)
        self.bar.update(1)
        self.say(f"step {step}  reward {row['rollout/reward']:.3f}  len {row['rollout/response_len']:.1f}  "
                 f"lag {row['staleness/min']}..{row['staleness/max']}  {seconds:.2f} s = wait {row['perf/wait_prev_gen']:.2f} "
                 f"+ sync {row.get('sync/time', 0):.2f} + train {row.get('perf/train_time', 0):.2f} + other; "
                 f"generate {row['perf/generate_time']:.2f}")

        self.check_parity(step, row)

    def check_parity(self, step, row):
        mismatch, args = row.get("parity/mismatch", 0.0), self.args
        text = (f"step {step}: engine and trainer differ by {mismatch:.3g} per token in their log-probs on the "
                f"same weights (parity/mismatch)")
        if args.parity_max is not None and mismatch > args.parity_max:
            raise RuntimeError(f"{text}: more than --parity-max {args.parity_max:g}. Sampling flags, dtypes or kernels differ")
        if mismatch > args.parity_warn:
            self.say(f"warning: {text}: more than --parity-warn {args.parity_warn:g}")

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
        self.write_board(results["version"], {f"eval/{name}": value for name, value in results.items()})
        rewards = "  ".join(f"{name} {value:.3f}" for name, value in results.items() if name.endswith("/reward"))
        self.say(f"evaluation of version {results['version']}: {rewards}")

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
        for name, value in values.items() if self.board else ():
            if not isinstance(value, dict):        # a histogram
                self.board.add_scalar(name, value, step)

    def say(self, text):
        with self.bar.external_write_mode():
            print(text, flush=True)

    def summary(self):
        """The run in a few lines; the last is the evaluation before and after."""
        self.bar.close()
        if self.board:
            self.board.close()
        rows = self.rows.read()
        if rows:
            tenth = max(1, len(rows) // 10)
            reward = lambda part: statistics.fmean(row["rollout/reward"] for row in part)
            mean = lambda name: statistics.fmean(row.get(name, 0.0) for row in rows[1:] or rows)   # the first step warms up
            print(f"\n{len(rows)} steps in {self.args.run_dir}")
            print(f"reward of the first {tenth} and the last {tenth} steps: {reward(rows[:tenth]):.3f} -> "
                  f"{reward(rows[-tenth:]):.3f}")
            print(f"seconds per step: {mean('perf/step_time'):.2f} = waiting for generation {mean('perf/wait_prev_gen'):.2f} "
                  f"+ sync {mean('sync/time'):.2f} + training {mean('perf/train_time'):.2f} + other; generation "
                  f"{mean('perf/generate_time'):.2f}")
            if not self.args.without_engines:
                print(f"idle: trainer {mean('perf/train_idle_share'):.0%}, engines {mean('perf/rollout_idle_share'):.0%}. "
                      f"{advice(rows)}")
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
    step, waited = mean("perf/step_time"), mean("perf/wait_prev_gen") + mean("sync/pause_time")
    syncing = mean("sync/time") - mean("sync/pause_time")             # of each step, on average
    alone = statistics.fmean([row["sync/time"] - row["sync/pause_time"] for row in rows if "sync/time" in row] or [0.0])
    generation, update = mean("perf/lone_generate_time"), mean("perf/train_time") - mean("perf/log_probs_time")
    share = args.rollout_num_gpus / (args.rollout_num_gpus + args.world_size)
    return {"sync": step - waited - syncing + generation + alone, "async": step, "hidden generation": generation - waited,
            "fewer syncs": alone - syncing,
            "no log-prob pass": update / 3 if args.policy_old == "rollout" else 0.0,
            "fewer training GPUs": -mean("perf/train_time") * share}


def advice(rows):
    """What `wait_prev_gen` says about the split of GPUs."""
    rows = rows[1:] or rows
    # a stream without partial rollout waits for what runs at the sync, not at the batch
    wait = statistics.fmean(row["perf/wait_prev_gen"] + row.get("sync/pause_time", 0.0) for row in rows)
    step = statistics.fmean(row["perf/step_time"] for row in rows)
    longest = statistics.fmean(row["rollout/response_len_max"] for row in rows)
    length = statistics.fmean(row["rollout/response_len"] for row in rows)
    if wait < 0.05 * step:
        return "wait_prev_gen is near 0: fewer rollout GPUs would do."
    if wait < 0.25 * step:
        return "wait_prev_gen is moderate."
    if longest > 4 * length:
        return ("wait_prev_gen is high and lengths have a long tail: over-sampling or partial rollout helps, more rollout GPUs "
                "do not.")
    return "wait_prev_gen is high with even lengths: more rollout GPUs would help."


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
