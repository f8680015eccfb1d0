"""Predicts step time, waiting, idle shares and lag of a run, and the best split of GPUs, before any GPU is rented.

    python scripts/simulate.py --mode fully_async --gpus 64 --staleness-threshold 0.5 --partial-rollout
    python scripts/simulate.py --mode one_step_off --gpus 64 --split 16/48 --lengths runs/my_run
    python scripts/simulate.py --mode fully_async --gpus 4096 --split 2048/2048 --sweep threshold --plot threshold.png

The scheduler is the real one: buffer.Buffer, Gate and Stream, driven under a virtual clock in the order of the entry
scripts and of the rollout manager. What is modelled is only what takes time: a sample occupies one of the engines'
slots for length / rate seconds, whatever runs beside it; a training step takes a fixed time, or one per token over the
training GPUs. Rewards take none, and all engines share one queue.
"""

import argparse
import heapq
import json
import math
import os
import random
import statistics
import sys
from collections import Counter, deque
from dataclasses import dataclass, field

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from buffer import Buffer, Gate, Sample, Stream

ROWS = [{"prompt": "", "prompt_tokens": [], "label": "", "metadata": {}}] * 4096     # epochs go on for ever
SEARCH_STEPS = 20              # of each run of a search


# ---- what the simulator keeps -----------------------------------------------------------------------------
@dataclass
class Tally:
    """Stands where the ledger stands and counts its events: a second account of where every group is."""
    watch: object = None           # called as watch(event, fields) after each event
    seq: int = 0
    drawn: int = 0                 # distinct groups
    trained: int = 0
    dropped: dict = field(default_factory=dict)      # group id -> reason
    put_back: int = 0

    def write(self, event, **fields):
        self.seq += 1
        if event == "draw":
            self.drawn = max(self.drawn, fields["group"] + 1)
        elif event == "trained":
            self.trained += len(fields["groups"])
        elif event == "drop":
            self.dropped[fields["group"]] = fields["reason"]
        elif event == "put_back":
            self.put_back += 1
        if self.watch:
            self.watch(event, fields)


@dataclass
class Job:
    """A sample and the time that it still needs."""
    sample: Sample
    length: float                  # tokens in all
    done: float = 0.0              # tokens generated before `started`
    started: float = 0.0


@dataclass
class World:
    """Engines and clock. `heap` holds the running jobs by the time of their end, so its size is the slots in use."""
    buffer: Buffer
    stream: Stream | None          # None: a batch at a time
    tally: Tally
    lengths: object                # (number of the sample, random generator) -> tokens
    slots: int
    rate: float                    # tokens per second of one slot
    unit: float                    # so many tokens are recorded as one: the samples' columns stay short
    drop_share: float
    wanted: int                    # groups of a batch
    times: dict                    # "train", "train_token", "sync", "abort": seconds
    random: random.Random
    rows: list                     # of each step: see Result.steps
    now: float = 0.0
    order: int = 0
    held: bool = True
    version: int = 0
    heap: list = field(default_factory=list)         # (time of the end, order of the start, job)
    queue: deque = field(default_factory=deque)
    jobs: dict = field(default_factory=dict)         # group id -> its jobs, until it is trained or dropped
    left: dict = field(default_factory=dict)         # group id -> samples that are still to end
    doomed: set = field(default_factory=set)         # groups that the filter will reject
    slot_seconds: float = 0.0
    busy_seconds: float = 0.0      # with at least one slot in use
    length_drawn: Counter = field(default_factory=Counter)     # "drawn", "trained" or why dropped -> tokens
    samples_drawn: Counter = field(default_factory=Counter)    # the same -> samples

    # ---- engines ----------------------------------------------------------------------------------------------
    def start(self, groups):
        for group in groups:
            if group.group_id not in self.jobs:
                n = len(group.samples)
                self.jobs[group.group_id] = [Job(sample, self.lengths(group.group_id * n + sample.index, self.random))
                                             for sample in group.samples]
                self.account("drawn", group.group_id)
                if self.random.random() < self.drop_share:
                    self.doomed.add(group.group_id)
            waiting = [job for job in self.jobs[group.group_id] if job.sample.status == "pending"]
            self.left[group.group_id] = len(waiting)
            self.queue.extend(waiting)
        self.dispatch()

    def dispatch(self):
        while self.queue and len(self.heap) < self.slots:
            job = self.queue.popleft()
            job.started = self.now
            self.order += 1
            heapq.heappush(self.heap, (self.now + (job.length - job.done) / self.rate, self.order, job))

    def advance(self, until=math.inf):
        """Lets the clock run to the next end of a sample, or to `until`; all that ends at that time has then ended."""
        when = min(self.heap[0][0] if self.heap else math.inf, until)
        if when == math.inf:
            raise RuntimeError(f"at {self.now:g} s nothing runs and nothing is due: {self.buffer.finished_count} of "
                               f"{self.wanted} groups are finished")
        self.slot_seconds += len(self.heap) * (when - self.now)
        self.busy_seconds += (when - self.now) if self.heap else 0.0
        self.now = when
        while self.heap and self.heap[0][0] <= when:
            self.complete(heapq.heappop(self.heap)[2])
        self.dispatch()

    def sleep(self, seconds):
        until = self.now + seconds
        while self.now < until:
            self.advance(until)

    def complete(self, job):
        job.done = job.length
        self.record(job, max(1, math.ceil(job.length / self.unit - 1e-9)))
        job.sample.status, job.sample.reward = "completed", 1.0
        group_id = job.sample.group_id
        self.left[group_id] -= 1
        if self.left[group_id] == 0:
            self.land(self.buffer.in_flight[group_id])

    def record(self, job, tokens):
        """Brings the sample to so many tokens; the new ones are of the published version."""
        new = tokens - len(job.sample.response_tokens)
        if new > 0:
            job.sample.append([0] * new, [0.0] * new, self.version)

    def land(self, group):
        if group.group_id in self.doomed:
            self.buffer.drop(group, "filter")
            self.account("filter", group.group_id)
            del self.jobs[group.group_id]
        else:
            self.buffer.finish(group)
        if self.stream:
            self.stream.landed(group)
        self.fill()

    def account(self, what, group_id):
        self.length_drawn[what] += sum(job.length for job in self.jobs[group_id])
        self.samples_drawn[what] += len(self.jobs[group_id])

    # ---- as in rollout.RolloutManager -------------------------------------------------------------------------
    def fill(self):
        if self.held:
            return
        if self.stream:
            self.start(self.stream.draw())
        else:
            self.start(self.buffer.draw(self.wanted - self.buffer.finished_count - len(self.buffer.in_flight)))

    def wait_for_batch(self, step):
        started = self.now
        if self.stream:
            while not self.stream.ready(step):
                self.fill()                          # a drop by lag has opened the gate
                seen = self.tally.seq
                while self.tally.seq == seen:        # until a group has landed
                    self.advance()
            self.stream.take(step)
        else:
            while self.buffer.finished_count < self.wanted:
                self.advance()
            self.held = True                         # the next batch is launched, it does not start by itself
            self.buffer.take(step, self.wanted)
        self.rows[step]["wait"] = self.now - started

    def launch(self):
        self.held = False
        self.fill()

    def sync(self, version):
        """Pause, send, publish, resume."""
        self.held, started = True, self.now
        if self.stream and self.buffer.partial_rollout:
            self.abort()
            self.sleep(self.times["abort"])
        while self.buffer.in_flight:
            self.advance()
        self.sleep(self.times["sync"])
        self.version = version
        if self.stream:
            self.stream.publish(version)
            self.launch()
        self.rows[version]["sync"] = self.now - started

    def abort(self):
        for _, _, job in self.heap:
            job.done += (self.now - job.started) * self.rate
            self.record(job, int(job.done / self.unit + 1e-9))
        self.heap, self.queue = [], deque()
        for group in list(self.buffer.in_flight.values()):
            self.buffer.put_back(group)
            self.stream.landed(group)

    def train(self, step):
        batch, row = self.buffer.waiting(step), self.rows[step]
        tokens = sum(job.length for group in batch for job in self.jobs[group.group_id])
        row["train"] = self.times["train"] + self.times["train_token"] * tokens
        row["groups"] = [group.group_id for group in batch]
        for sample in [sample for group in batch for sample in group.samples]:
            for version, count in sample.version_runs:
                row["lags"][step - version] += count
        self.sleep(row["train"])
        for group_id in row["groups"]:
            self.account("trained", group_id)
            del self.jobs[group_id]
        (self.stream or self.buffer).trained(step)
        row["end"] = self.now
        if self.stream:
            self.fill()


# ---- one run ----------------------------------------------------------------------------------------------
@dataclass
class Result:
    """Times in seconds, means over all steps but the first, which warms up."""
    step_time: float
    wait_prev_gen: float
    sync_time: float               # with the time that a sync waits for what runs
    train_idle_share: float
    rollout_idle_share: float      # time without a request, as in metrics.jsonl
    slots_idle_share: float
    lags: dict                     # lag -> share of the trained tokens
    masked_share: float            # tokens beyond --max-lag under the policy mask
    length_bias: float             # mean length of trained / of drawn samples
    dropped_length: dict           # reason -> mean length of its samples / of drawn ones
    drawn: int
    trained: int
    dropped: dict                  # reason -> groups
    put_back: int
    seconds: float                 # of the whole run
    steps: list                    # of each {"time", "end", "wait", "sync", "train", "lags": tokens by lag, "groups"}


def simulate(mode, *, slots, steps, lengths, train_time=0.0, train_token_time=0.0, rollout_batch_size=8,
             n_samples_per_prompt=8, staleness_threshold=0.0, update_weights_interval=1, max_lag=None,
             max_lag_policy="wait", partial_rollout=False, rate=1.0, sync_time=0.0, abort_time=0.0, drop_share=0.0,
             unit=1.0, seed=0, watch=None):
    """One run under the virtual clock. Depends on nothing but its arguments.

    mode: "sync" | "one_step_off" | "fully_async". lengths: (number of the sample, random.Random) -> tokens, or a list
    that is gone through again and again. A training step takes train_time + train_token_time x tokens seconds. watch:
    called as watch(world, event, fields) after every event of a group. Returns a Result; RuntimeError when the trainer
    starves.
    """
    draw = lengths if callable(lengths) else lambda number, _: lengths[number % len(lengths)]
    tally = Tally()
    buffer = Buffer(ROWS, n_samples_per_prompt, seed, tally, shuffle=False, partial_rollout=partial_rollout)
    stream = None
    if mode == "fully_async":
        gate = Gate(rollout_batch_size, staleness_threshold, update_weights_interval, max_lag, steps)
        stream = Stream(buffer, gate, max_lag_policy)
    times = {"train": train_time, "train_token": train_token_time, "sync": sync_time, "abort": abort_time}
    rows = [{"wait": 0.0, "sync": 0.0, "lags": Counter()} for _ in range(steps)]
    world = World(buffer, stream, tally, draw, slots, rate, unit, drop_share, rollout_batch_size, times,
                  random.Random(seed), rows)
    if watch:
        tally.watch = lambda event, fields: watch(world, event, fields)
    LOOPS[mode](world, steps, update_weights_interval, 1 if max_lag is None else max_lag)
    return summary(world, max_lag if max_lag_policy == "mask" else None)


def sync_loop(world, steps, k, max_lag):
    for step in range(steps):
        world.sync(step)
        world.launch()
        world.wait_for_batch(step)
        world.train(step)


def one_step_off_loop(world, steps, k, max_lag):
    for step in range(steps):
        if step == 0 or max_lag == 0:
            world.sync(step)
            world.launch()
        world.wait_for_batch(step)
        if max_lag == 1:
            if step > 0 and step % k == 0:
                world.sync(step)
            if step + 1 < steps:
                world.launch()
        world.train(step)


def fully_async_loop(world, steps, k, max_lag):
    for step in range(steps):
        if step % k == 0:
            world.sync(step)
        world.wait_for_batch(step)
        world.train(step)


LOOPS = {"sync": sync_loop, "one_step_off": one_step_off_loop, "fully_async": fully_async_loop}


def summary(world, masked_beyond):
    rows = world.rows
    ends = [0.0] + [row["end"] for row in rows]
    for row, start in zip(rows, ends):
        row["time"] = row["end"] - start
    counted = rows[1:] or rows
    mean = lambda name: statistics.fmean(row[name] for row in counted)
    lags = sum((row["lags"] for row in rows), Counter())
    tokens = sum(lags.values())
    masked = 0 if masked_beyond is None else sum(count for lag, count in lags.items() if lag > masked_beyond)
    for group_id, reason in world.tally.dropped.items():
        if group_id in world.jobs:                   # by lag, inside the stream
            world.account(reason, group_id)
    lengths = {what: world.length_drawn[what] / world.samples_drawn[what] for what in world.samples_drawn}
    return Result(step_time=mean("time"), wait_prev_gen=mean("wait"), sync_time=mean("sync"),
                  train_idle_share=1 - mean("train") / mean("time"),
                  rollout_idle_share=1 - world.busy_seconds / world.now,
                  slots_idle_share=1 - world.slot_seconds / (world.slots * world.now),
                  lags={lag: lags[lag] / tokens for lag in sorted(lags)}, masked_share=masked / tokens,
                  length_bias=lengths["trained"] / lengths["drawn"],
                  dropped_length={what: length / lengths["drawn"] for what, length in lengths.items()
                                  if what not in ("drawn", "trained")},
                  drawn=world.tally.drawn, trained=world.tally.trained,
                  dropped=dict(Counter(world.tally.dropped.values())), put_back=world.tally.put_back,
                  seconds=world.now, steps=rows)


# ---- lengths ----------------------------------------------------------------------------------------------
def parse_lengths(text):
    """--lengths -> (a function for simulate(), the mean length)."""
    try:
        if text.startswith("lognormal:"):
            median, sigma, cap = map(float, text.split(":")[1:])
            draw = lambda number, numbers: min(cap, max(1.0, median * math.exp(numbers.gauss(0.0, sigma))))
            return draw, statistics.fmean(draw(0, random.Random(i)) for i in range(2000))
        shares, values = zip(*(map(float, part.split(":")) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"--lengths {text}: give SHARE:LENGTH,..., lognormal:MEDIAN:SIGMA:CAP or the folder of a "
                         f"run") from None
    if min(values) <= 0 or min(shares) < 0 or sum(shares) <= 0:
        raise ValueError(f"--lengths {text}: lengths must be above 0, and shares not below")
    draw = lambda number, numbers: numbers.choices(values, shares)[0]
    return draw, sum(share * value for share, value in zip(shares, values)) / sum(shares)


def fit(folder, samples_per_step):
    """What the metrics.jsonl of a run of train_sync.py or train_async.py says of lengths and times.

    A lognormal has mean m and an expected longest of S samples M for sigma = z - sqrt(z^2 - 2 ln(M / m)), z the
    quantile of 1 - 1 / S. The rate of a slot is M / generate_time: a batch takes as long as its longest sample.
    """
    path = os.path.join(folder, "metrics.jsonl")
    if not os.path.exists(path):
        raise ValueError(f"--lengths {folder}: there is no metrics.jsonl")
    with open(path) as f:
        rows = [json.loads(line) for line in f if line.endswith("\n")]
    rows = rows[1:] or rows                          # the first step warms up
    if not rows:
        raise ValueError(f"--lengths {folder}: metrics.jsonl holds no step")
    names = ("rollout/response_len", "rollout/response_len_max", "rollout/tokens", "perf/generate_time",
             "perf/train_time", "perf/wait_prev_gen", "perf/step_time")
    mean = {name: statistics.fmean(row.get(name, 0.0) for row in rows) for name in names}
    mean["sync/time"] = statistics.fmean([row["sync/time"] for row in rows if "sync/time" in row] or [0.0])
    average, longest = mean["rollout/response_len"], mean["rollout/response_len_max"]
    z = statistics.NormalDist().inv_cdf(1 - 1 / max(samples_per_step, 2))
    sigma = z - math.sqrt(max(0.0, z * z - 2 * math.log(longest / average)))
    cap = max(row["rollout/response_len_max"] for row in rows)
    median = average / math.exp(sigma * sigma / 2)
    return f"lognormal:{median:.6g}:{sigma:.4g}:{cap:g}", longest / mean["perf/generate_time"], mean


# ---- splits of the GPUs -----------------------------------------------------------------------------------
def run(options, training, rollout, **changes):
    """One simulation with so many training and rollout GPUs; train_sync.py may use one number for both."""
    values = dict(slots=rollout * options.slots_per_gpu, steps=options.steps, lengths=options.draw, unit=options.unit,
                  train_time=options.train_time, train_token_time=options.train_token_time / training,
                  rollout_batch_size=options.rollout_batch_size, n_samples_per_prompt=options.n_samples_per_prompt,
                  staleness_threshold=options.staleness_threshold, max_lag=options.max_lag, rate=options.rate,
                  update_weights_interval=options.update_weights_interval, max_lag_policy=options.max_lag_policy,
                  partial_rollout=options.partial_rollout, sync_time=options.sync_time, abort_time=options.abort_time,
                  drop_share=options.drop_share, seed=options.seed)
    return simulate(options.mode, **{**values, **changes})


def best_split(options, points=12):
    """-> ({(training, rollout): Result} over splits of --gpus, the fastest of them): an even grid, and a finer one
    around its best. The runs have few steps and the same lengths, so that they compare."""
    results, low, high = {}, 1, options.gpus - 1
    for _ in range(2):
        for i in range(points):
            rollout = round(low + (high - low) * i / (points - 1))
            split = (options.gpus - rollout, rollout)
            if split not in results:
                results[split] = run(options, *split, steps=min(options.steps, SEARCH_STEPS))
        tried = sorted(results, key=lambda split: split[1])
        best = min(tried, key=lambda split: results[split].step_time)
        place = tried.index(best)
        low, high = tried[max(place - 1, 0)][1], tried[min(place + 1, len(tried) - 1)][1]
    return {split: results[split] for split in tried}, best


def knee(step_time, most):
    """The fewest rollout GPUs whose step time is within 1 % of that with `most`. step_time: rollout GPUs -> seconds,
    taken to fall."""
    low, high, limit = 1, most, 1.01 * step_time(most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if step_time(middle) <= limit else (middle + 1, high)
    return low


def table(head, results):
    print(f"{head:>12} {'step':>9} {'wait':>9} {'sync':>9}  idle: {'train':>5} {'engines':>7} {'slots':>5}  "
          f"lag: {'mean':>5} {'max':>3}  {'length bias':>11}")
    for name, r in results.items():
        lag = sum(lag * share for lag, share in r.lags.items())
        print(f"{label(name):>12} {r.step_time:9.3f} {r.wait_prev_gen:9.3f} {r.sync_time:9.3f}  "
              f"{r.train_idle_share:11.0%} {r.rollout_idle_share:7.0%} {r.slots_idle_share:5.0%}  {lag:10.2f} "
              f"{max(r.lags):3d}  {r.length_bias:11.3f}")


def label(name):
    """A threshold, or a split as --split takes it."""
    return "/".join(map(str, name)) if isinstance(name, tuple) else str(name)


def plot(path, head, results):
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    names = [label(name) for name in results]
    figure, axes = pyplot.subplots(figsize=(max(6, len(names) * 0.5), 4))
    axes.plot(names, [r.step_time for r in results.values()], "o-", label="step time (s)")
    axes.plot(names, [r.wait_prev_gen for r in results.values()], "o-", label="wait_prev_gen (s)")
    axes.plot(names, [r.sync_time for r in results.values()], "o-", label="sync, with its drain (s)")
    axes.set_xlabel(head)
    axes.set_ylim(bottom=0)
    axes.tick_params(axis="x", rotation=60)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"plot: {path}")


# ---- command line -----------------------------------------------------------------------------------------
def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    p.add_argument("--mode", choices=tuple(LOOPS), default="fully_async", help="which entry script")
    p.add_argument("--gpus", type=int, default=8, help="training and rollout GPUs together")
    p.add_argument("--split", help="TRAINING/ROLLOUT GPUs; without it the best split of --gpus is searched")
    p.add_argument("--slots-per-gpu", type=int, default=64, help="samples that one rollout GPU generates at a time")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--rollout-batch-size", type=int, default=128, help="groups of a step")
    p.add_argument("--n-samples-per-prompt", type=int, default=8)
    p.add_argument("--staleness-threshold", type=float, default=0.0)
    p.add_argument("--update-weights-interval", type=int, default=1)
    p.add_argument("--max-lag", type=int)
    p.add_argument("--max-lag-policy", choices=("wait", "drop", "mask"), default="wait")
    p.add_argument("--partial-rollout", action="store_true")
    p.add_argument("--lengths", default="lognormal:512:1.2:8192",
                   help="tokens of a sample: SHARE:LENGTH,... | lognormal:MEDIAN:SIGMA:CAP | folder of a run to fit")
    p.add_argument("--rate", type=float, help="tokens per second of one slot (default 50, or fitted)")
    p.add_argument("--train-time", type=float, help="fixed seconds of a training step (default 0)")
    p.add_argument("--train-token-time", type=float, help="GPU-seconds of training per token (default 3e-4, or fitted)")
    p.add_argument("--sync-time", type=float, help="seconds of a weight sync (default 0, or fitted)")
    p.add_argument("--abort-time", type=float, default=0.0, help="seconds until aborted samples are back")
    p.add_argument("--drop-share", type=float, default=0.0, help="share of the groups that the filter rejects")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--sweep", choices=("split", "threshold"), help="prints a table over splits or staleness thresholds")
    p.add_argument("--plot", help="PNG file for the sweep; needs matplotlib")
    options = p.parse_args(argv)
    check(options)
    return options


def check(options):
    for name in ("slots_per_gpu", "steps", "rollout_batch_size", "n_samples_per_prompt", "update_weights_interval"):
        if vars(options)[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, is {vars(options)[name]}")
    k, fully_async = options.update_weights_interval, options.mode == "fully_async"
    if options.mode == "one_step_off" and options.max_lag not in (None, 0, 1):
        raise ValueError(f"--max-lag {options.max_lag}: --mode one_step_off knows 0 and 1")
    if options.mode == "sync" and (options.max_lag or k > 1):
        raise ValueError("--mode sync is on-policy: leave --max-lag and --update-weights-interval out")
    if not fully_async and (options.staleness_threshold or options.partial_rollout or options.max_lag_policy != "wait"):
        raise ValueError("--staleness-threshold, --partial-rollout and --max-lag-policy need --mode fully_async")
    if options.max_lag is not None and options.mode != "sync" and options.max_lag < k - 1:
        raise ValueError(f"--max-lag {options.max_lag} is below --update-weights-interval - 1 = {k - 1}")
    if options.staleness_threshold < 0 or not 0 <= options.drop_share < 1:
        raise ValueError("--staleness-threshold must not be negative, and --drop-share in [0, 1)")
    if options.partial_rollout and not options.staleness_threshold and options.sweep != "threshold":
        raise ValueError("--partial-rollout needs --staleness-threshold above 0: at 0 nothing is in flight at a sync")
    if options.sweep == "threshold" and not fully_async:
        raise ValueError("--sweep threshold needs --mode fully_async")
    if options.plot and not options.sweep:
        raise ValueError("--plot needs --sweep")


def fill_in(options):
    """Lengths and times from the flags or, where these are silent, from a recorded run. Returns that run's means."""
    measured, rate, token_time, sync_time = None, 50.0, 3e-4, 0.0
    if os.path.isdir(options.lengths):
        if options.split is None:
            raise ValueError("--split: say on how many GPUs the recorded run trained and generated: TRAINING/ROLLOUT")
        samples = options.rollout_batch_size * options.n_samples_per_prompt
        options.lengths, rate, measured = fit(options.lengths, samples)
        sync_time = measured["sync/time"]
        token_time = measured["perf/train_time"] * options.training / measured["rollout/tokens"]
    options.rate = rate if options.rate is None else options.rate
    options.sync_time = sync_time if options.sync_time is None else options.sync_time
    if options.train_token_time is None:
        options.train_token_time = token_time if options.train_time is None else 0.0
    options.train_time = options.train_time or 0.0
    options.draw, mean = parse_lengths(options.lengths)
    options.unit = max(1.0, mean / 8)                # about eight recorded tokens for each sample
    return measured


def read_split(options):
    if options.split is None:
        if options.gpus < 2:
            raise ValueError(f"--gpus {options.gpus}: training and rollout need one each")
        return
    try:
        options.training, options.rollout = map(int, options.split.split("/"))
    except ValueError:
        raise ValueError(f"--split {options.split}: give TRAINING/ROLLOUT, as in 2/6") from None
    if min(options.training, options.rollout) < 1:
        raise ValueError(f"--split {options.split}: training and rollout need one GPU each")
    options.gpus = options.training + options.rollout


def report(options, measured):
    if options.split is None:
        _, (options.training, options.rollout) = best_split(options)
        print(f"best split of {options.gpus} GPUs: {options.training} training, {options.rollout} rollout")
    result = run(options, options.training, options.rollout)
    table("split", {(options.training, options.rollout): result})
    print("tokens by lag: " + ", ".join(f"{lag}: {share:.1%}" for lag, share in result.lags.items()))
    print(f"groups: drawn {result.drawn}, trained {result.trained}, dropped {result.dropped or 0}, aborted "
          f"{result.put_back} times")
    if result.masked_share:
        print(f"tokens without loss: {result.masked_share:.1%}")
    for reason, length in result.dropped_length.items():
        print(f"mean length of dropped ({reason}) / drawn: {length:.3f}")
    if measured:
        print(f"step time: predicted {result.step_time:.3f}, measured {measured['perf/step_time']:.3f}; wait_prev_gen: "
              f"predicted {result.wait_prev_gen:.3f}, measured {measured['perf/wait_prev_gen']:.3f}")
    steps = min(options.steps, SEARCH_STEPS)
    gpus = knee(lambda rollout: run(options, options.training, rollout, steps=steps).step_time, 2 * options.gpus)
    print(f"with {options.training} training GPUs, more than {gpus} rollout GPUs improve the step time by less than "
          f"1 %")


def main():
    options = parse()
    read_split(options)
    measured = fill_in(options)
    if options.sweep is None:
        return report(options, measured)
    if options.sweep == "split":
        results, best = best_split(options)
    else:
        if options.split is None:
            options.training, options.rollout = options.gpus // 2, options.gpus - options.gpus // 2
        results = {threshold: run(options, options.training, options.rollout, staleness_threshold=threshold)
                   for threshold in (0, 0.1, 0.25, 0.5, 1, 2, 4) if threshold or not options.partial_rollout}
        best = min(results, key=lambda name: results[name].step_time)
    table(options.sweep, results)
    print(f"best {options.sweep}: {label(best)}")
    if options.plot:
        plot(options.plot, "training/rollout GPUs" if options.sweep == "split" else "--staleness-threshold", results)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
