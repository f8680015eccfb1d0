"""A run under a virtual clock: the real scheduler, and of engines and trainers only the time that they take.

buffer.Buffer, Gate and Stream are driven in the order of the entry scripts and of the rollout manager. A request occupies
one of the engines' slots for latency + tokens / rate seconds, whatever runs beside it; a training step takes a fixed time
and one per token. Rewards take none, and all engines share one queue.
"""

import heapq
import math
import random
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

from buffer import Buffer, Gate, Sample, Stream

ROWS = [{"prompt": "", "prompt_tokens": [], "label": "", "metadata": {}}] * 4096     # epochs go on for ever


# ---- engines and clock ------------------------------------------------------------------------------------
@dataclass
class Events:
    """Stands where the ledger stands: numbers the events and shows them to watch(event, fields)."""
    watch: object
    seq: int = 0

    def write(self, event, **fields):
        self.seq += 1
        self.watch(event, fields)


@dataclass
class Job:
    """A sample and how far it is."""
    sample: Sample
    length: float                  # tokens in all
    done: float = 0.0              # tokens generated before `started`
    started: float = 0.0


@dataclass
class World:
    """Engines and clock. `heap` holds the running jobs by the time of their end, so its size is the slots in use."""
    o: SimpleNamespace             # the arguments of simulate()
    buffer: Buffer
    stream: Stream | None          # None: a batch at a time
    random: random.Random
    rows: list                     # of each step: see Result.steps
    now: float = 0.0
    order: int = 0
    held: bool = True
    version: int = 0
    heap: list = field(default_factory=list)         # (time of the end, order of the start, job)
    queue: deque = field(default_factory=deque)
    jobs: dict = field(default_factory=dict)         # group id -> its jobs, until it is trained or filtered out
    left: dict = field(default_factory=dict)         # group id -> samples that are still to end
    doomed: set = field(default_factory=set)         # groups that the filter will reject
    put_back: int = 0
    slot_seconds: float = 0.0
    busy_seconds: float = 0.0      # with at least one slot in use

    # ---- engines ----------------------------------------------------------------------------------------------
    def start(self, groups):
        for group in groups:
            if group.group_id not in self.jobs:
                first = group.group_id * len(group.samples)
                self.jobs[group.group_id] = [Job(sample, self.o.lengths(first + sample.index, self.random))
                                             for sample in group.samples]
                if self.random.random() < self.o.drop_share:
                    self.doomed.add(group.group_id)
            waiting = [job for job in self.jobs[group.group_id] if job.sample.status == "pending"]
            self.left[group.group_id] = len(waiting)
            self.queue.extend(waiting)
        self.dispatch()

    def dispatch(self):
        while self.queue and len(self.heap) < self.o.slots:
            job = self.queue.popleft()
            job.started = self.now
            self.order += 1
            end = self.now + self.o.latency + (job.length - job.done) / self.o.rate
            heapq.heappush(self.heap, (end, self.order, job))

    def advance(self, until=math.inf):
        """Lets the clock run to the next end of a sample, or to `until`; all that ends at that time has then ended."""
        when = min(self.heap[0][0] if self.heap else math.inf, until)
        if when == math.inf:
            raise RuntimeError(f"at {self.now:g} s nothing runs and nothing is due: {self.buffer.finished_count} of "
                               f"{self.o.rollout_batch_size} groups are finished")
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
        self.record(job, job.length)
        job.sample.status, job.sample.reward = "completed", 1.0
        group_id = job.sample.group_id
        self.left[group_id] -= 1
        if self.left[group_id] == 0:
            self.land(self.buffer.in_flight[group_id])

    def record(self, job, tokens):
        """The job has so many tokens now; the new ones are of the published version, and `unit` of them are kept as one."""
        job.done = tokens
        whole = max(1, round(tokens / self.o.unit)) if tokens == job.length else int(tokens / self.o.unit)
        new = whole - len(job.sample.response_tokens)
        if new > 0:
            job.sample.append([0] * new, [0.0] * new, self.version)

    def land(self, group):
        if group.group_id in self.doomed:
            self.buffer.drop(group, "filter")
            del self.jobs[group.group_id]
        else:
            self.buffer.finish(group)
        if self.stream:
            self.stream.landed(group)
        self.fill()

    # ---- as in rollout.RolloutManager -------------------------------------------------------------------------
    def fill(self):
        if self.held:
            return
        room = self.o.over_sampling_batch_size - self.buffer.finished_count - len(self.buffer.in_flight)
        self.start(self.stream.draw() if self.stream else self.buffer.draw(room))

    def wait_for_batch(self, step):
        started = self.now
        if self.stream:
            while not self.stream.ready(step):
                self.fill()                          # a drop by lag has opened the gate
                seen = self.buffer.ledger.seq
                while self.buffer.ledger.seq == seen:        # until a group has landed
                    self.advance()
            self.stream.take(step)
        else:
            while self.buffer.finished_count < self.o.rollout_batch_size:
                self.advance()
            self.abort()                             # what over-sampling has started too much
            self.buffer.take(step, self.o.rollout_batch_size)
        self.rows[step]["wait"] = self.now - started

    def launch(self):
        self.held = False
        self.fill()

    def sync(self, version):
        """Pause, send, publish, resume. The time until aborted samples are back is part of sync_time."""
        started = self.now
        if self.stream and self.o.partial_rollout:
            self.abort()
        self.drain()
        self.sleep(self.o.sync_time)
        self.version = version
        if self.stream:
            self.stream.publish(version)
            self.launch()
        self.rows[version]["sync"] = self.now - started

    def drain(self):
        self.held = True
        while self.buffer.in_flight:
            self.advance()

    def abort(self):
        """All that runs goes back into the buffer, but for groups that went back to their prompt before: these are waited
        for, or long answers never end. Tokens are whole: the one in the making is lost."""
        groups = {group_id: group for group_id, group in self.buffer.in_flight.items() if not group.keep}
        stopped = [job for _, _, job in self.heap if job.sample.group_id in groups]
        self.heap = [entry for entry in self.heap if entry[2].sample.group_id not in groups]
        self.queue = deque(job for job in self.queue if job.sample.group_id not in groups)
        heapq.heapify(self.heap)
        for job in stopped:
            seconds = max(0.0, self.now - job.started - self.o.latency)
            self.record(job, job.done + math.floor(seconds * self.o.rate + 1e-9))
        for group_id, group in groups.items():
            self.buffer.put_back(group)
            self.put_back += 1
            if self.stream:
                self.stream.landed(group)
            for job in () if self.o.partial_rollout else self.jobs[group_id]:
                job.done = 0.0
        self.drain()

    def train(self, step):
        batch, row = self.buffer.waiting(step), self.rows[step]
        row["groups"] = [group.group_id for group in batch]
        tokens = sum(job.length for group_id in row["groups"] for job in self.jobs.pop(group_id))
        row["train"] = self.o.train_time + self.o.train_token_time * tokens
        for sample in [sample for group in batch for sample in group.samples]:
            for version, count in sample.version_runs:
                row["lags"][step - version] += count
        self.sleep(row["train"])
        (self.stream or self.buffer).trained(step)
        if self.stream:
            self.fill()
        self.sleep(self.o.overhead)
        row.update(end=self.now, busy=self.busy_seconds, slots=self.slot_seconds)


# ---- one run ----------------------------------------------------------------------------------------------
@dataclass
class Result:
    means: dict                    # "step", "wait", "sync": seconds, ...: over all steps but the first, which warms up
    lags: dict                     # lag -> share of the trained tokens
    masked_share: float            # tokens beyond --max-lag under the policy mask
    length_bias: dict              # Buffer.length_bias()
    drawn: int
    dropped: dict                  # reason -> groups
    put_back: int
    steps: list                    # of each {"time", "end", "wait", "sync", "train", "lags": tokens by lag, "groups", ...}


def simulate(mode, *, slots, steps, lengths, rate=1.0, latency=0.0, train_time=0.0, train_token_time=0.0, sync_time=0.0,
             overhead=0.0, drop_share=0.0, rollout_batch_size=8, n_samples_per_prompt=8, over_sampling_batch_size=None,
             staleness_threshold=0.0, update_weights_interval=1, max_lag=None, max_lag_policy="wait", partial_rollout=False,
             unit=1.0, seed=0, watch=None):
    """One run under the virtual clock. Depends on nothing but its arguments. Returns a Result; RuntimeError when the trainer
    starves.

    mode: "sync" | "one_step_off" | "fully_async". lengths: (number of the sample, random.Random) -> tokens, or a list
    that is gone through again and again. A request takes latency + tokens / rate seconds, a training step train_time +
    train_token_time x tokens, the rest of a step overhead. unit: so many tokens are kept as one, for speed. watch: called as
    watch(world, event, fields) after every event of a group.
    """
    o = SimpleNamespace(**locals())
    o.lengths = lengths if callable(lengths) else lambda number, _: lengths[number % len(lengths)]
    o.over_sampling_batch_size = over_sampling_batch_size or rollout_batch_size
    o.max_lag = 0 if mode == "sync" else 1 if max_lag is None else max_lag
    events = Events(lambda event, fields: watch and watch(world, event, fields))
    buffer = Buffer(ROWS, n_samples_per_prompt, seed, events, shuffle=False, partial_rollout=partial_rollout)
    stream = None
    if mode == "fully_async":
        gate = Gate(rollout_batch_size, staleness_threshold, update_weights_interval, max_lag, steps)
        stream = Stream(buffer, gate, max_lag_policy)
    rows = [{"wait": 0.0, "sync": 0.0, "lags": Counter()} for _ in range(steps)]
    world = World(o, buffer, stream, random.Random(seed), rows)
    (stream_loop if stream else batch_loop)(world, steps)
    return summary(world, max_lag if max_lag_policy == "mask" else None)


def batch_loop(world, steps):
    """train_async.py; with a largest lag of 0 it is train_sync.py."""
    for step in range(steps):
        if step == 0 or world.o.max_lag == 0:
            world.sync(step)
            world.launch()
        world.wait_for_batch(step)
        if world.o.max_lag == 1:
            if step > 0 and step % world.o.update_weights_interval == 0:
                world.sync(step)
            if step + 1 < steps:
                world.launch()
        world.train(step)


def stream_loop(world, steps):
    """train_fully_async.py"""
    for step in range(steps):
        if step % world.o.update_weights_interval == 0:
            world.sync(step)
        world.wait_for_batch(step)
        world.train(step)


def summary(world, masked_beyond):
    rows, buffer = world.rows, world.buffer
    for row, before in zip(rows, [{"end": 0.0}, *rows]):
        row["time"] = row["end"] - before["end"]
    counted, first = (rows[1:], rows[0]) if len(rows) > 1 else (rows, {"end": 0.0, "busy": 0.0, "slots": 0.0})
    mean = lambda name: statistics.fmean(row[name] for row in counted)
    part = lambda name: (rows[-1][name] - first[name]) / (rows[-1]["end"] - first["end"])
    lags = sum((row["lags"] for row in rows), Counter())
    share = {lag: lags[lag] / lags.total() for lag in sorted(lags)}
    means = {"step": mean("time"), "wait": mean("wait"), "sync": mean("sync"), "train idle": 1 - mean("train") / mean("time"),
             "engines idle": 1 - part("busy"), "slots idle": 1 - part("slots") / world.o.slots,
             "mean lag": sum(lag * share[lag] for lag in share), "max lag": max(lags),
             "length bias": buffer.length_bias()["trained"]}
    masked = 0.0 if masked_beyond is None else sum(share[lag] for lag in share if lag > masked_beyond)
    dropped = {fate: samples // buffer.n_samples_per_prompt for fate, (samples, _) in buffer.lengths.items() if fate != "trained"}
    return Result(means, share, masked, buffer.length_bias(), buffer.next_id, dropped, world.put_back, rows)
