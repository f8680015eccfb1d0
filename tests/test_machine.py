"""Random sequences of everything that can happen to the groups of a stream, against a model of a few lines: where each group is,
which tokens it has, how many may be out, and how old a sample may be when it is trained. `hypothesis` draws them and shortens those
that fail.
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
from test_buffer import generate, make_rows, permutation

FATES = st.sampled_from(("group", "token", "nothing", "sample"))
SEED, END = 7, "end"


def youngest(groups, k):
    """A sampler that likes least what has waited longest."""
    return groups[-k:]


class Life(RuleBasedStateMachine):
    """model: {group id: "flying" | "unfinished" | "finished" | "hand" | "trained" | "dropped"}; tokens: {group id: for each sample
    the versions of its tokens, END behind those of one that is done}; restarted: ids of those that began again at their prompt;
    the rest is the run's position. Saving copies it, a kill goes back to the copy."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.path = os.path.join(self.folder, "ledger.jsonl")

    @initialize(required=st.integers(1, 3), k=st.sampled_from((1, 1, 1, 2, 3)), quarters=st.sampled_from((12, 0, 2, 4, 12)),
                slack=st.sampled_from((2, 3, 1, 0, None)), policy=st.sampled_from(("wait", "wait", "wait", "drop", "mask")),
                partial=st.sampled_from((True, True, False)), n=st.integers(1, 2), rows=st.integers(3, 7),
                epochs=st.sampled_from((None, None, 2)), last=st.sampled_from((None, None, None, 3)),
                sampler=st.sampled_from((None, youngest)))
    def begin(self, required, k, quarters, slack, policy, partial, n, rows, epochs, last, sampler):
        self.required, self.k, self.partial = required, k, partial
        self.max_lag = None if slack is None else k - 1 + slack
        self.policy, self.last, self.sampler = policy, last, sampler
        # floor(required x (1 + threshold) x k) in integers
        self.credits = required * (4 + quarters) * k // 4
        self.rows, self.n, self.epochs, self.quarters = make_rows(rows), n, epochs, quarters
        self.model, self.tokens, self.restarted = {}, {}, set()
        self.steps, self.published, self.engines = 0, 0, True
        self.saved = None
        self.start()
        self.fill()

    def start(self):
        self.ledger = Ledger(self.path)
        self.buffer = Buffer(self.rows, self.n, SEED, self.ledger, num_epoch=self.epochs, partial_rollout=self.partial)
        gate = Gate(self.required, self.quarters / 4, self.k, self.max_lag, self.last)
        self.stream = Stream(self.buffer, gate, self.policy, self.steps, self.sampler)

    # ---- the model ----------------------------------------------------------------------------------------
    def at(self, *places):
        return sorted(group for group, place in self.model.items() if place in places)

    def oldest(self, number):
        """Version of its oldest token, or None."""
        return min((version for tokens in self.tokens[number] for version in tokens if version != END), default=None)

    @property
    def over(self):
        return self.last is not None and self.steps >= self.last

    @property
    def bound(self):
        """By the formula of the gate: groups that may be trained or out while this version is published."""
        bounds = [self.published * self.required + self.credits]
        if self.last is not None:
            bounds.append(self.last * self.required)
        if self.waits_for_lag:
            bounds.append((self.max_lag + self.published + 1) * self.required)
        return min(bounds)

    @property
    def due(self):
        """The loop publishes before the next batch."""
        return self.steps % self.k == 0 and self.published < self.steps

    @property
    def waits_for_lag(self):
        return self.max_lag is not None and self.policy == "wait"

    def too_many(self, finished=()):
        """Of what is under way, and of these, the most that are due before the steps after this one have room for them. What has no
        token yet will have one of the version that is published."""
        if not self.waits_for_lag:
            return 0
        ages = [self.oldest(number) for number in (*self.at("unfinished"), *finished)]
        ages = [age for age in ages if age is not None]
        ages += [self.published if self.oldest(number) is None else self.oldest(number) for number in self.at("flying")]
        return max((sum(age <= v for age in ages) - self.required * max(0, v + self.max_lag - self.steps) for v in ages), default=0)

    def fill(self):
        """As the rollout manager does it: all that may start."""
        before, groups = self.at("unfinished"), self.stream.draw()
        for place, group in enumerate(groups):
            if place < len(before):
                assert group.group_id == before[place]             # first what was begun, the lowest first
            else:
                epoch, at = divmod(group.group_id, len(self.rows))
                assert group.group_id == len(self.model) and group.epoch == epoch
                assert {sample.row for sample in group.samples} == {permutation(len(self.rows), SEED, epoch)[at]}
                self.tokens[group.group_id] = [[] for _ in range(self.n)]
            self.model[group.group_id] = "flying"
        assert not self.at("unfinished")
        assert len(self.model) - len(self.at("dropped")) == self.bound or len(self.model) == (self.epochs or 0) * len(self.rows)

    def group(self, number, place="flying"):
        return (self.buffer.in_flight if place == "flying" else self.buffer.finished)[number]

    def pending(self, number):
        return [i for i, tokens in enumerate(self.tokens[number]) if END not in tokens]

    def token(self, number, i, end):
        """The next one of its i-th sample; end: the last."""
        generate(self.group(number).samples[i], 1, self.published, "completed" if end else "pending")
        self.tokens[number][i] += [self.published, END] if end else [self.published]

    def finish(self, number):
        for i in self.pending(number):
            self.token(number, i, end=True)
        group = self.group(number)
        self.buffer.finish(group)
        self.stream.landed(group)
        self.model[number] = "finished"

    def put_back(self, number):
        if not self.pending(number):
            return self.finish(number)
        group = self.group(number)
        self.buffer.put_back(group)
        self.stream.landed(group)
        self.model[number] = "unfinished"
        if not self.partial:
            self.at_its_prompt(number)
            self.restarted.add(number)

    def at_its_prompt(self, number):
        self.tokens[number] = [[] for _ in range(self.n)]

    # ---- what can happen ----------------------------------------------------------------------------------
    @precondition(lambda self: self.engines)
    @rule(ticks=st.lists(st.tuples(st.lists(FATES, min_size=1, max_size=5), st.booleans()), min_size=1, max_size=6))
    def runs(self, ticks):
        """The usual: for each running group, the oldest first, nothing comes, or a token of a sample, or the rest of it, or the
        rest of the group; what may start does; and the loop asks for a batch, or is still training."""
        for fates, step in ticks:
            for number, fate in zip(self.at("flying"), fates):
                pending = self.pending(number)
                if fate == "group":
                    self.finish(number)
                elif pending and fate != "nothing":
                    self.token(number, pending[0], end=fate == "sample")
            self.fill()
            if step and not self.at("hand") and not self.over:
                self.a_step(train=True)

    @precondition(lambda self: self.engines)
    @rule(count=st.integers(1, 3), steps=st.integers(1, 3), lost=st.sampled_from((False, False, True)))
    def the_oldest_are_long(self, count, steps, lost):
        """The last sample of so many runs on, a token at a time, and all others finish at once; until the engines are lost."""
        for _ in range(steps):
            flying = self.at("flying")
            for number in flying[:count]:
                if pending := self.pending(number):
                    self.token(number, pending[0], end=len(pending) > 1)
            for number in flying[count:]:
                self.finish(number)
            self.fill()
            if not self.at("hand") and not self.over:
                self.a_step(train=True)
        if lost:
            self.engines_are_lost(step=True)

    @precondition(lambda self: self.at("flying", "finished"))
    @rule(data=st.data())
    def is_dropped(self, data):
        number = data.draw(st.sampled_from(self.at("flying", "finished")))
        group = self.group(number, self.model[number])
        self.buffer.drop(group, "filter: test")
        if self.model[number] == "flying":
            self.stream.landed(group)
        self.model[number] = "dropped"

    @rule()
    def what_cannot_be_is_refused(self):
        """And leaves no record and no trace."""
        group = next((self.group(number) for number in self.at("flying") if self.pending(number)), None)
        wrong = [lambda: self.buffer.take(self.steps, 1 + len(self.at("finished"))), lambda: self.buffer.trained(self.steps + 1)]
        if group:
            wrong.append(lambda: self.buffer.finish(group))
        for number in self.at("finished"):
            done = self.group(number, "finished")
            wrong += [lambda: self.buffer.finish(done), lambda: self.buffer.put_back(done)]
        if self.at("hand"):
            done = self.buffer.in_hand[self.steps][0]
            wrong += [lambda: self.buffer.take(self.steps, 1), lambda: self.buffer.drop(done, "filter: test")]
        records = self.ledger.seq
        for call in wrong:
            with pytest.raises(ValueError):
                call()
        assert self.ledger.seq == records

    @precondition(lambda self: self.engines)
    @rule(step=st.booleans())
    def engines_are_lost(self, step):
        """All of them. The loop may ask for a batch all the same: the groups that are finished may be enough."""
        self.engines = False
        for number in self.at("flying"):
            self.put_back(number)
        if step and not self.at("hand") and not self.over and not self.due:
            self.a_step(train=True)

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

    @precondition(lambda self: not self.at("hand") and not self.over and (self.engines or not self.due))
    @rule(train=st.booleans())
    def a_step(self, train):
        """The loop: a sync, if one is due; the batch, if it is ready; and its training, if nothing happens before."""
        if self.due:
            self.publish()
        ready = self.stream.ready(self.steps)
        if self.policy == "drop" and self.max_lag is not None:      # of what is finished, all that is too old
            for number in self.at("finished"):
                if self.oldest(number) < self.steps - self.max_lag:
                    self.model[number] = "dropped"
        finished = sorted(self.at("finished"), key=lambda number: (self.oldest(number), number))
        assert ready == (len(finished) >= self.required and self.too_many() <= 0)
        if not ready:
            return
        must = self.required if self.sampler is None else max(0, self.too_many(finished))      # cannot wait for a later step
        batch = [group.group_id for group in self.stream.take(self.steps)]
        assert batch == finished[:must] + finished[must:][len(finished) - self.required:]
        for number in batch:
            self.model[number] = "hand"
        if train:
            self.is_trained()

    @precondition(lambda self: self.at("hand"))
    @rule()
    def is_trained(self):
        for number in self.at("hand"):
            lag = self.steps - self.oldest(number)
            assert self.max_lag is None or self.policy == "mask" or lag <= self.max_lag, "too old"
            self.model[number] = "trained"
        self.stream.trained(self.steps)
        self.steps += 1

    @precondition(lambda self: self.engines and not self.at("hand") and not self.over)
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
        state, again = json.dumps(self.buffer.state()), dict.fromkeys(self.at("flying"), "unfinished")
        tokens = self.tokens | {number: [[] for _ in range(self.n)] for number in again}
        self.saved = state, json.dumps([[*pair] for pair in tokens.items()]), self.model | again, set(self.restarted), self.steps

    @precondition(lambda self: self.saved)
    @rule()
    def is_killed_and_resumed(self):
        state, tokens, model, restarted, self.steps = self.saved
        self.model, self.tokens, self.restarted = dict(model), dict(json.loads(tokens)), set(restarted)
        self.engines = True
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
        for group in [*b.in_flight.values(), *b.finished.values(), *(group for _, group in b.unfinished), *sum(b.in_hand.values(), [])]:
            held = [[version for version, count in sample.version_runs for _ in range(count)] + [END] * (sample.status != "pending")
                    for sample in group.samples]
            assert held == self.tokens[group.group_id] and group.keep == (group.group_id in self.restarted)

    @invariant()
    def no_more_are_out_than_the_gate_allows(self):
        if hasattr(self, "buffer"):
            assert len(self.at("trained", "flying", "finished", "unfinished", "hand")) <= self.bound

    @invariant()
    def all_can_be_trained_in_time(self):
        """Of the groups with tokens up to version v, no more than the batches up to step v + max_lag have places."""
        if not hasattr(self, "buffer") or not self.waits_for_lag:
            return
        ages = [self.oldest(number) for number in self.at("flying", "finished", "unfinished") if self.oldest(number) is not None]
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
TestLife.settings = settings(max_examples=500, stateful_step_count=25, derandomize=True, deadline=None, database=None,
                             suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
