"""Random sequences of everything that can happen to the groups of a stream, against a model of a few lines: where each group is,
how many may be out, and how old a sample may be when it is trained. `hypothesis` draws them and shortens those that fail.
"""

import json
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buffer import Buffer, Gate, Ledger, Stream
from test_buffer import generate, make_rows

FATES = st.sampled_from(("group", "token", "nothing", "sample"))


class Life(RuleBasedStateMachine):
    """model: {group id: "flying" | "unfinished" | "finished" | "hand" | "trained" | "dropped"}; tokens: {group id: version of its
    oldest token, or None}; the rest is the run's position. Saving copies it, a kill goes back to the copy."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.path = os.path.join(self.folder, "ledger.jsonl")

    @initialize(required=st.integers(1, 3), k=st.sampled_from((1, 1, 2, 3)), quarters=st.sampled_from((0, 2, 4, 10)),
                slack=st.sampled_from((1, 0, 2, None)), policy=st.sampled_from(("wait", "wait", "drop")),
                partial=st.sampled_from((True, True, False)), n=st.integers(1, 2), rows=st.integers(3, 7),
                epochs=st.sampled_from((None, None, 4)))
    def begin(self, required, k, quarters, slack, policy, partial, n, rows, epochs):
        self.required, self.k, self.partial = required, k, partial
        self.max_lag = None if slack is None else k - 1 + slack
        self.policy = policy
        # floor(required x (1 + threshold) x k) in integers
        self.credits = required * (4 + quarters) * k // 4
        self.rows, self.n, self.epochs, self.quarters = make_rows(rows), n, epochs, quarters
        self.model, self.oldest, self.steps, self.published, self.engines = {}, {}, 0, 0, True
        self.saved = None
        self.start()
        self.fill()

    def start(self):
        self.ledger = Ledger(self.path)
        self.buffer = Buffer(self.rows, self.n, 7, self.ledger, num_epoch=self.epochs, partial_rollout=self.partial)
        gate = Gate(self.required, self.quarters / 4, self.k, self.max_lag)
        self.stream = Stream(self.buffer, gate, self.policy, self.steps)

    # ---- the model ----------------------------------------------------------------------------------------
    def at(self, *places):
        return sorted(group for group, place in self.model.items() if place in places)

    @property
    def bound(self):
        """By the formula of the gate: groups that may be trained or out while this version is published."""
        bounds = [self.published * self.required + self.credits]
        if self.max_lag is not None and self.policy == "wait":
            bounds.append((self.max_lag + self.published + 1) * self.required)
        return min(bounds)

    @property
    def due(self):
        """The loop publishes before the next batch."""
        return self.steps % self.k == 0 and self.published < self.steps

    def fill(self):
        """As the rollout manager does it: all that may start."""
        before, groups = self.at("unfinished"), self.stream.draw()
        for place, group in enumerate(groups):
            if place < len(before):
                assert group.group_id == before[place]             # first what was begun, the lowest first
            else:
                assert group.group_id == len(self.model) and all(not s.response_tokens for s in group.samples)
            self.model[group.group_id] = "flying"
            self.oldest.setdefault(group.group_id)

    def group(self, number, place="flying"):
        return (self.buffer.in_flight if place == "flying" else self.buffer.finished)[number]

    def finish(self, number):
        group = self.group(number)
        for sample in group.samples:
            if sample.status == "pending":
                generate(sample, 1, self.published, "completed")
                self.mark(number)
        self.buffer.finish(group)
        self.stream.landed(group)
        self.model[number] = "finished"

    def mark(self, number):
        self.oldest[number] = self.published if self.oldest[number] is None else self.oldest[number]

    def put_back(self, number):
        group = self.group(number)
        if all(sample.status != "pending" for sample in group.samples):
            return self.finish(number)
        self.buffer.put_back(group)
        self.stream.landed(group)
        self.model[number] = "unfinished"
        self.oldest[number] = self.oldest[number] if self.partial else None

    # ---- what can happen ----------------------------------------------------------------------------------
    @precondition(lambda self: self.engines)
    @rule(ticks=st.lists(st.tuples(st.lists(FATES, min_size=1, max_size=5), st.booleans()), min_size=1, max_size=6))
    def runs(self, ticks):
        """The usual: for each running group, the oldest first, nothing comes, or a token of a sample, or the rest of it, or the
        rest of the group; what may start does; and the loop asks for a batch, or is still training."""
        for fates, step in ticks:
            for number, fate in zip(self.at("flying"), fates):
                sample = next((s for s in self.group(number).samples if s.status == "pending"), None)
                if fate == "group":
                    self.finish(number)
                elif sample and fate != "nothing":
                    generate(sample, 1, self.published, "completed" if fate == "sample" else "pending")
                    self.mark(number)
            self.fill()
            if step and not self.at("hand"):
                self.a_step(train=True)

    @precondition(lambda self: self.at("flying", "finished"))
    @rule(data=st.data())
    def is_dropped(self, data):
        number = data.draw(st.sampled_from(self.at("flying", "finished")))
        group = self.group(number, self.model[number])
        self.buffer.drop(group, "filter: test")
        if self.model[number] == "flying":
            self.stream.landed(group)
        self.model[number] = "dropped"

    @precondition(lambda self: self.engines)
    @rule()
    def engines_are_lost(self):
        self.engines = False
        for number in self.at("flying"):
            self.put_back(number)

    @precondition(lambda self: not self.engines)
    @rule()
    def engines_come_back(self):
        """The loop begins anew at its step: with a sync."""
        self.engines = True
        self.publish()

    def publish(self):
        """What runs is aborted and continued, or waited for."""
        for number in self.at("flying"):
            self.put_back(number) if self.partial else self.finish(number)
        self.stream.publish(self.steps)
        self.published = self.steps
        self.fill()

    @precondition(lambda self: not self.at("hand") and (self.engines or not self.due))
    @rule(train=st.booleans())
    def a_step(self, train):
        """The loop: a sync, if one is due; the batch, if it is ready; and its training, if nothing happens before."""
        if self.due:
            self.publish()
        ready = self.stream.ready(self.steps)
        if self.policy == "drop" and self.max_lag is not None:      # of what is finished, all that is too old
            for number in self.at("finished"):
                if self.oldest[number] < self.steps - self.max_lag:
                    self.model[number] = "dropped"
        if not ready:
            return
        finished = sorted(self.at("finished"), key=lambda number: (self.oldest[number], number))
        batch = [group.group_id for group in self.stream.take(self.steps)]
        assert batch == finished[:self.required]
        for number in batch:
            self.model[number] = "hand"
        if train:
            self.is_trained()

    @precondition(lambda self: self.at("hand"))
    @rule()
    def is_trained(self):
        for number in self.at("hand"):
            assert self.max_lag is None or self.steps - self.oldest[number] <= self.max_lag, "too old"
            self.model[number] = "trained"
        self.stream.trained(self.steps)
        self.steps += 1

    @precondition(lambda self: self.engines and not self.at("hand"))
    @rule()
    def all_that_may_run_runs_to_its_end(self):
        """Then a batch is there, unless the data have ended: nobody waits for ever."""
        if self.due:
            self.publish()
        while True:
            self.fill()
            if not self.at("flying"):
                break
            for number in self.at("flying"):
                self.finish(number)
        self.a_step(train=False)
        if self.policy == "drop" and self.stream.room:
            return                                 # what was dropped opened the gate
        assert self.at("hand") or self.buffer.exhausted, "nothing runs, and no batch is there"

    @rule()
    def is_saved(self):
        """What flies is saved at its prompt, to be drawn again."""
        self.ledger.write("save", step=self.steps)
        again = {number: "unfinished" for number in self.at("flying")}
        self.saved = json.dumps(self.buffer.state()), self.model | again, self.oldest | dict.fromkeys(again), self.steps

    @precondition(lambda self: self.saved)
    @rule()
    def is_killed_and_resumed(self):
        state, model, oldest, self.steps = self.saved
        self.model, self.oldest, self.engines = dict(model), dict(oldest), True
        self.start()
        state = json.loads(state)
        self.buffer.load_state(state)
        self.ledger.resume(self.steps, state["ledger_seq"])
        self.publish()

    # ---- what holds at every moment -----------------------------------------------------------------------
    @invariant()
    def every_group_is_in_one_place(self):
        if not hasattr(self, "buffer"):
            return
        b = self.buffer
        places = {"flying": list(b.in_flight), "finished": list(b.finished), "unfinished": [number for number, _ in b.unfinished],
                  "hand": [group.group_id for batch in b.in_hand.values() for group in batch]}
        assert {place: sorted(numbers) for place, numbers in places.items()} == {place: self.at(place) for place in places}
        assert sorted(self.model) == list(range(b.next_id))
        assert sum(self.stream.running.values()) == len(b.in_flight)

    @invariant()
    def no_more_are_out_than_the_gate_allows(self):
        if hasattr(self, "buffer"):
            assert len(self.at("trained", "flying", "finished", "unfinished", "hand")) <= self.bound

    @invariant()
    def all_can_be_trained_in_time(self):
        """Of the groups with tokens up to version v, no more than the batches up to step v + max_lag have places."""
        if not hasattr(self, "buffer") or self.max_lag is None or self.policy == "drop":
            return
        ages = [self.oldest[number] for number in self.at("flying", "finished", "unfinished") if self.oldest[number] is not None]
        first = self.steps + bool(self.at("hand"))
        for version in ages:
            assert sum(age <= version for age in ages) <= self.required * max(0, version + self.max_lag - first + 1), "too late"

    def teardown(self):
        """The ledger's surviving line tells the same."""
        try:
            if hasattr(self, "buffer"):
                said = {number: group["outcome"] for number, group in Ledger.outcomes(self.path).items()}
                names = {"flying": "in_flight", "unfinished": "buffered", "finished": "buffered", "hand": "buffered"}
                assert said == {number: names.get(place, place) for number, place in self.model.items()}
        finally:
            shutil.rmtree(self.folder)


TestLife = pytest.mark.contract(Life.TestCase)
TestLife.settings = settings(max_examples=600, stateful_step_count=25, derandomize=True, deadline=None, database=None,
                             suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
