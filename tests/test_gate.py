"""The gate and the stream of train_fully_async.py, under the virtual clock of scripts/virtual_clock.py: no engine, no Ray.

Modes: a. on-policy stream; b. stream off-policy; c. stale samples; d. partial rollout. In the timelines by hand a group
is one sample, so that g3 is the fourth sample; "g3 v2" was started by version 2.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from buffer import Buffer, Gate, Group, Ledger, Stream
from scripts import simulate as simulator
from virtual_clock import ROWS, simulate

MODES = {"a": {}, "b": {"update_weights_interval": 3}, "c": {"staleness_threshold": 1.0},
         "d": {"staleness_threshold": 1.0, "partial_rollout": True}}
TAIL = simulator.parse_lengths("90:1,10:10")
HEAVY = simulator.parse_lengths("lognormal:4:1.2:60")


def run(mode, **flags):
    """A small run of the fully asynchronous script. Every event is checked for conservation."""
    values = {"slots": 8, "steps": 20, "lengths": TAIL, "train_time": 4.0, "rollout_batch_size": 4,
              "n_samples_per_prompt": 2}
    return simulate("fully_async", **{**values, **MODES[mode], "watch": Account(), **flags})


def trained(result):
    return sum(len(step["groups"]) for step in result.steps)


@dataclass
class Account:
    """Counts events: a second account of where every group is, compared with the buffer's after each."""
    drawn: set = field(default_factory=set)
    trained: int = 0
    dropped: int = 0

    def __call__(self, world, event, fields):
        if event == "draw":
            self.drawn.add(fields["group"])
        self.trained += len(fields["groups"]) if event == "trained" else 0
        self.dropped += event == "drop"
        assert self.trained + self.dropped + world.buffer.outstanding == len(self.drawn) == world.buffer.next_id, event


# ---- the gate ---------------------------------------------------------------------------------------------
def test_the_bound_by_hand():
    """Gate(required, threshold, k, L, steps).bound(published version)."""
    assert Gate(100, 0.15, 1).bound(0) == 115                  # in floats 100 x 1.15 is 114.99999999999999
    assert Gate(100, 0.15, 1).bound(7) == 700 + 115
    assert Gate(10, 0.0, 1).bound(3) == 30 + 10                # on-policy: one batch
    assert Gate(10, 0.5, 4).bound(8) == 80 + 60                # 10 x 1.5 x 4
    assert Gate(3, 0.5, 1).bound(0) == 4                       # floor(4.5)
    assert Gate(10, 1.0, 1, max_lag=0).bound(3) == 40          # (0 + 3 + 1) x 10 is less than 30 + 20
    assert Gate(10, 1.0, 1, max_lag=2).bound(3) == 50          # (2 + 3 + 1) x 10 is more than 30 + 20
    assert Gate(10, 1.0, 4, max_lag=5).bound(4) == 100         # (5 + 4 + 1) x 10 is less than 40 + 80
    assert Gate(10, 1.0, 1, num_rollout=5).bound(3) == 50
    assert Gate(10, 1.0, 1, num_rollout=5).bound(4) == 50      # 5 steps take 50 groups, not 60


def test_a_dropped_group_gives_its_place_back():
    stream = Stream(Buffer(ROWS, 1, 0, Ledger(None)), Gate(4, 0.5, 1))
    groups = stream.draw()
    assert len(groups) == 6 and stream.draw() == []
    for group in groups[:2]:
        stream.buffer.drop(group, "filter")
        stream.landed(group)
    assert [group.group_id for group in stream.draw()] == [6, 7]
    assert stream.draw() == []


def test_training_opens_nothing_and_a_new_version_does():
    stream = Stream(Buffer(ROWS, 1, 0, Ledger(None)), Gate(2, 0.0, 1))
    for group in stream.draw():
        group.samples[0].append([0], [0.0], 0)
        group.samples[0].status, group.samples[0].reward = "completed", 1.0
        stream.buffer.finish(group)
        stream.landed(group)
    assert stream.ready(0) and len(stream.take(0)) == 2
    stream.trained(0)
    assert stream.draw() == []
    stream.publish(1)
    assert len(stream.draw()) == 2


def finish(stream, group, version):
    sample = group.samples[0]
    sample.append([0], [0.0], version)
    sample.status, sample.reward = "completed", 1.0
    stream.buffer.finish(group)
    stream.landed(group)


def interrupted_stream(sampler=None):
    """Batches of 4, --max-lag 2: 12 groups start with version 0, 4 are trained in step 0, the other 8 are interrupted by the sync
    of version 1 and go on beside 4 new ones. Returns (stream, the 8 old groups, the 4 new ones)."""
    stream = Stream(Buffer(ROWS, 1, 0, Ledger(None), partial_rollout=True), Gate(4, 2.0, 1, max_lag=2), sampler=sampler)
    groups = stream.draw()
    assert len(groups) == 12
    for group in groups[:4]:
        finish(stream, group, 0)
    assert [group.group_id for group in stream.take(0)] == [0, 1, 2, 3]
    stream.trained(0)
    for group in groups[4:]:
        group.samples[0].append([0], [0.0], 0)
        stream.buffer.put_back(group)
        stream.landed(group)
    stream.publish(1)
    again = stream.draw()
    assert [group.group_id for group in again] == list(range(4, 16))
    return stream, again[:8], again[8:]


def test_a_step_waits_when_later_steps_could_not_train_all_that_runs_in_time():
    """8 groups of version 0 are due by step 2, and step 2 trains 4: so step 1 must hold 4 of them, though 4 groups of version 1
    are finished before."""
    stream, old, new = interrupted_stream()
    for group in new:
        finish(stream, group, 1)
    assert not stream.ready(1)
    for group in old[:3]:
        finish(stream, group, 1)
    assert not stream.ready(1)
    finish(stream, old[3], 1)
    assert stream.ready(1) and [group.group_id for group in stream.take(1)] == [4, 5, 6, 7]


def test_what_waits_for_an_engine_has_a_deadline_too():
    """L = 1, one group a step. g0 is trained at step 0; g1, with a token of version 0, must be trained at step 1, but its engine is
    lost and it lies in the buffer, while g2 of version 1 is finished: taken now, it would leave g1 to step 2."""
    stream = Stream(Buffer(ROWS, 1, 0, Ledger(None), partial_rollout=True), Gate(1, 1.0, 1, max_lag=1))
    g0, g1 = stream.draw()
    finish(stream, g0, 0)
    assert stream.take(0) == [g0]
    stream.trained(0)
    g1.samples[0].append([0], [0.0], 0)
    stream.publish(1)
    g2, = stream.draw()
    finish(stream, g2, 1)
    stream.buffer.put_back(g1)
    stream.landed(g1)
    assert not stream.ready(1)
    assert stream.draw() == [g1]
    finish(stream, g1, 1)
    assert stream.ready(1) and stream.take(1) == [g1]


def test_a_sampler_chooses_among_what_can_wait():
    """All 12 are finished: 4 of the 8 old ones cannot wait, so step 1 has no choice; in step 2 all old ones are due; then the
    sampler, which likes the youngest, chooses."""
    asked = []

    def youngest(groups, k):
        asked.append(([group.group_id for group in groups], k))
        return groups[-k:]

    stream, old, new = interrupted_stream(youngest)
    for group in [*new, *old]:
        finish(stream, group, 1)
    assert [group.group_id for group in stream.take(1)] == [4, 5, 6, 7]
    stream.trained(1)
    stream.publish(2)
    for group in stream.draw():
        finish(stream, group, 2)
    assert [group.group_id for group in stream.take(2)] == [8, 9, 10, 11]
    assert asked == []                             # there was nothing to choose
    stream.trained(2)
    assert [group.group_id for group in stream.take(3)] == [12, 13, 14, 15]     # of version 1, due now
    stream = Stream(Buffer(ROWS, 1, 0, Ledger(None)), Gate(2, 2.0, 1), sampler=youngest)
    for group in stream.draw():
        finish(stream, group, 0)
    assert [group.group_id for group in stream.take(0)] == [4, 5] and asked == [([0, 1, 2, 3, 4, 5], 2)]


@pytest.mark.parametrize("answer", [lambda groups, k: groups[:1], lambda groups, k: groups[:1] * k,
                                    lambda groups, k: [Group(99, 0, 0, [])] * k])
def test_a_sampler_that_answers_wrongly_is_named(answer):
    stream = Stream(Buffer(ROWS, 1, 0, Ledger(None)), Gate(2, 1.0, 1), sampler=answer)
    for group in stream.draw():
        finish(stream, group, 0)
    with pytest.raises(ValueError, match="--custom-sampler-path: step 0 asked for 2 different groups out of 4"):
        stream.take(0)
    assert stream.buffer.finished_count == 4       # nothing is lost


def test_length_bias_by_hand():
    """Trained answers of 1 and 3 tokens, one of 10 dropped: the mean of all is 14 / 3."""
    buffer = Buffer(ROWS, 1, 0, Ledger(None))
    for group, length in zip(buffer.draw(3), (1, 3, 10)):
        group.samples[0].append([0] * length, [0.0] * length, 0)
        group.samples[0].status, group.samples[0].reward = "completed", 1.0
        buffer.finish(group)
    buffer.drop(buffer.finished[2], "lag")
    buffer.take(0, 2)
    buffer.trained(0)
    assert buffer.length_bias() == {"lag": 10 / (14 / 3), "trained": 2 / (14 / 3)}
    again = Buffer(ROWS, 1, 0, Ledger(None))
    again.load_state(json.loads(json.dumps(buffer.state())))
    assert again.length_bias() == buffer.length_bias()


# ---- timelines by hand ------------------------------------------------------------------------------------
# One group of one sample is a step; a step trains for 2; there are 2 slots, which is always enough; 4 steps.
# What ends together ends before the trainer looks. The pattern of lengths is gone through again and again.
BY_HAND = {  # (mode, pattern): (lag -> tokens, seconds, aborts)
    # b, k = 2: g0, g1 start under v0, g2, g3 under v2; of each two the one that is trained second has lag 1.
    ("b", (2,)): ({0: 4, 1: 4}, 12.0, 0),
    #   0 g0 g1 v0 | 2 both end, train g0 | 4 train g1 | 6 sync 2: g2 g3 v2 | 8 both end, train g2 | 10 train g3 | 12
    ("b", (3, 1)): ({0: 2, 1: 6}, 10.0, 0),
    #   0 g0 g1 v0 | 1 g1 ends, train g1 | 3 g0 ends, train g0 (lag 1) | 5 sync 2: g2 g3 v2 | 6 train g3 | 8 train g2
    #   | 10
    ("b", (1, 6)): ({0: 2, 1: 12}, 16.0, 0),
    #   0 g0 g1 v0 | 1 train g0 | 3 wait | 6 g1 ends, train g1 | 8 sync 2: g2 g3 v2 | 9 train g2 | 11 wait
    #   | 14 g3 ends, train g3 | 16

    # c, k = 1, threshold 1: two groups are outstanding after each sync, which waits for what runs.
    ("c", (2,)): ({0: 2, 1: 6}, 10.0, 0),
    #   0 g0 g1 v0 | 2 both end, train g0 | 4 sync 1: g2 v1; train g1 (lag 1) | 6 g2 ends, sync 2: g3 v2; train g2
    #   (lag 1) | 8 g3 ends, sync 3; train g3 (lag 1) | 10
    ("c", (1, 6)): ({0: 1, 1: 13}, 16.0, 0),
    #   0 g0 g1 v0 | 1 train g0 | 3 drain | 6 g1 ends, sync 1: g2 v1; train g1 (lag 1) | 8 sync 2: g3 v2; train g2
    #   (lag 1) | 10 drain | 14 g3 ends, sync 3; train g3 (lag 1) | 16
    ("c", (3, 1)): ({0: 1, 1: 7}, 10.0, 0),
    #   0 g0 g1 v0 | 1 g1 ends, train g1 | 3 g0 ends, sync 1: g2 v1; train g0 (lag 1) | 5 drain | 6 g2 ends, sync 2:
    #   g3 v2; train g2 (lag 1) | 8 sync 3; train g3 (lag 1) | 10

    # d, k = 1, threshold 1: as c, but a sync aborts, and the tokens before it keep their version.
    ("d", (3,)): ({0: 4, 1: 8}, 12.0, 1),
    #   0 g0 g1 v0 | 3 both end, train g0 (3 of lag 0) | 5 sync 1: g2 v1; train g1 (3 of lag 1) | 7 sync 2 aborts g2
    #   after 2; g2 goes on, g3 v2 | 8 g2 ends = 2 of v1 + 1 of v2; train g2 (2 of lag 1, 1 of lag 0) | 10 g3 ends,
    #   sync 3; train g3 (3 of lag 1) | 12
    ("d", (1, 6)): ({0: 6, 1: 5, 2: 3}, 14.0, 2),
    #   0 g0 g1 v0 | 1 train g0 (1 of lag 0) | 3 sync 1 aborts g1 after 3; g1 goes on, g2 v1 | 4 g2 ends, train g2
    #   (1 of lag 0) | 6 g1 ends = 3 of v0 + 3 of v1; sync 2: g3 v2; train g1 (3 of lag 2, 3 of lag 1) | 8 sync 3
    #   aborts g3 after 2 | 12 g3 ends = 2 of v2 + 4 of v3; train g3 (2 of lag 1, 4 of lag 0) | 14
    ("d", (5, 1)): ({0: 4, 1: 8}, 12.0, 2),
    #   0 g0 g1 v0 | 1 g1 ends, train g1 (1 of lag 0) | 3 sync 1 aborts g0 after 3; g0 goes on, g2 v1 | 5 g0 ends =
    #   3 of v0 + 2 of v1, train g0 (3 of lag 1, 2 of lag 0) | 7 sync 2 aborts g2 after 4; g2 goes on, g3 v2 | 8 both
    #   end; train g2, the older (4 of lag 1, 1 of lag 0) | 10 sync 3; train g3 (1 of lag 1) | 12
}


@pytest.mark.contract
@pytest.mark.parametrize("mode, lengths", BY_HAND)
def test_lags_and_times_equal_the_timelines_by_hand(mode, lengths):
    flags = {"update_weights_interval": 2} if mode == "b" else {}
    result = run(mode, slots=2, steps=4, lengths=list(lengths), train_time=2.0, rollout_batch_size=1,
                 n_samples_per_prompt=1, **flags)
    lags, seconds, aborted = BY_HAND[mode, lengths]
    assert sum((step["lags"] for step in result.steps), Counter()) == lags
    assert (result.steps[-1]["end"], result.put_back) == (seconds, aborted)


@pytest.mark.contract
@pytest.mark.parametrize("lengths", (TAIL, HEAVY, [3.0]))
def test_mode_a_is_on_policy_and_equals_the_synchronous_loop(lengths):
    result = run("a", steps=50, lengths=lengths, drop_share=0.1)
    assert result.lags == {0: 1.0}
    synchronous = simulate("sync", slots=8, steps=50, lengths=lengths, train_time=4.0, rollout_batch_size=4,
                           n_samples_per_prompt=2, drop_share=0.1)
    assert result.steps == synchronous.steps           # times, lags and the groups of every batch


# ---- what the modes promise -------------------------------------------------------------------------------
@pytest.mark.contract
def test_mode_c_never_aborts_and_mode_d_never_waits_for_the_longest():
    """g0 takes 1000 in a run of 30 steps. The last step of all needs every group, and is not counted."""
    lengths = [1000.0] + [1.0] * 10_000
    waits = {}
    for mode in "cd":
        result = run(mode, slots=16, steps=30, lengths=lengths)
        waits[mode] = max(step["time"] for step in result.steps[:-1]) - 4.0
        assert bool(result.put_back) == (mode == "d")
    assert waits["c"] > 900                            # the drain of the first sync
    assert waits["d"] == 1.0                           # each step waits for samples of length 1 at most
    result = run("d", slots=16, steps=30, lengths=lengths, sync_time=0.75)
    assert max(step["time"] for step in result.steps[:-1]) == 4.0 + 1.0 + 0.75


@pytest.mark.contract
@pytest.mark.parametrize("mode", "abcd")
@pytest.mark.parametrize("drop_share", (0.0, 0.1, 0.5))
def test_no_deadlock_and_no_starved_trainer(mode, drop_share):
    """At each batch all places are taken: a dropped group gave its own back. simulate() raises when none can come."""
    for seed in range(20):
        account = Account()

        def full(world, event, fields):
            account(world, event, fields)
            if event == "batch":
                assert len(account.drawn) - account.dropped == world.stream.gate.bound(world.stream.published)

        result = run(mode, drop_share=drop_share, seed=seed, watch=full)
        assert trained(result) == 20 * 4 and len(result.steps) == 20
        assert bool(result.dropped) == (drop_share > 0)
        assert result.drawn == trained(result) + sum(result.dropped.values())      # nothing past the last step


@pytest.mark.parametrize("mode", ("sync", "one_step_off"))
def test_the_other_scripts_fill_up_after_drops_too(mode):
    for max_lag in (0, 1) if mode == "one_step_off" else (None,):
        result = simulate(mode, slots=8, steps=20, lengths=TAIL, train_time=4.0, rollout_batch_size=4, max_lag=max_lag,
                          n_samples_per_prompt=2, drop_share=0.5, watch=Account())
        assert trained(result) == 80 and result.drawn == 80 + sum(result.dropped.values())
        assert [max(step["lags"]) for step in result.steps] == [0] + [max_lag or 0] * 19


LAGS = [(k, lag) for k in (1, 3) for lag in sorted({k - 1, k, 2 * k})]


@pytest.mark.contract
@pytest.mark.parametrize("policy", ("wait", "drop", "mask"))
@pytest.mark.parametrize("k, max_lag", LAGS)
@pytest.mark.parametrize("partial", (False, True))
def test_max_lag_holds_and_all_make_progress(policy, k, max_lag, partial):
    """A threshold far beyond --max-lag, and a tail of fifteen times the median."""
    for seed, drop_share in ((0, 0.0), (1, 0.0), (2, 0.2)):
        with_loss, without, account = Counter(), Counter(), Account()

        def masks(world, event, fields):
            account(world, event, fields)
            batch = world.buffer.waiting(fields["step"]) if event == "batch" else []
            for version, count in [run for group in batch for sample in group.samples for run in sample.version_runs]:
                lag = fields["step"] - version                    # the rule of batch.loss_mask, run by run
                (without if policy == "mask" and lag > max_lag else with_loss)[lag] += count

        result = run("c", steps=24, lengths=HEAVY, staleness_threshold=3.0, update_weights_interval=k, max_lag=max_lag,
                     max_lag_policy=policy, partial_rollout=partial, drop_share=drop_share, seed=seed, train_time=2.0,
                     watch=masks)
        assert trained(result) == 24 * 4 and max(with_loss) <= max_lag
        if policy == "mask":
            assert bool(without) == (result.masked_share > 0)
        else:
            assert max(result.lags) <= max_lag
        if policy == "wait":
            assert "lag" not in result.dropped and result.masked_share == 0
        assert result.drawn == trained(result) + sum(result.dropped.values())


@pytest.mark.contract
def test_each_policy_does_something_where_the_lag_would_be_too_large():
    flags = {"steps": 24, "lengths": HEAVY, "staleness_threshold": 3.0, "train_time": 2.0}
    assert max(run("d", **flags).lags) > 2
    for policy in ("wait", "drop", "mask"):
        result = run("d", **flags, max_lag=1, max_lag_policy=policy)
        assert (max(result.lags) > 1, result.masked_share > 0, "lag" in result.dropped) == (
            policy == "mask", policy == "mask", policy == "drop")
        if policy == "drop":
            assert result.length_bias["trained"] < 0.9 and result.length_bias["lag"] > 1     # long answers are starved


def test_the_mask_of_the_rollout_manager_is_the_rule_of_the_simulator():
    import batch
    args = SimpleNamespace(fully_async=True, max_lag_policy="mask", max_lag=1, mask_offpolicy_in_partial_rollout=False)
    sample = SimpleNamespace(loss_mask=[1] * 6, version_runs=[[2, 3], [3, 1], [4, 2]])
    assert batch.loss_mask(args, 4, sample).tolist() == [0, 0, 0, 1, 1, 1]


# ---- how fast the modes are -------------------------------------------------------------------------------
@pytest.mark.contract
@pytest.mark.parametrize("groups, n", ((8, 8), (4, 8), (16, 8)))
def test_speed_on_a_long_tail(groups, n):
    """90 % of the answers take 1, 10 % take 10; there are as many slots as a batch has samples, and a step trains for
    4. The synchronous loop takes 10 + 4; the trainer alone 4, or 0.286 of that."""
    flags = {"slots": groups * n, "steps": 80, "lengths": TAIL, "train_time": 4.0, "rollout_batch_size": groups,
             "n_samples_per_prompt": n}
    c, d = {"staleness_threshold": 1.0}, {"staleness_threshold": 1.0, "partial_rollout": True}
    synchronous = simulate("sync", **flags).means["step"]
    assert simulate("one_step_off", **flags).means["step"] / synchronous <= 0.78
    assert simulate("fully_async", **flags, **c).means["step"] / synchronous <= 0.78
    assert simulate("fully_async", **flags, **d).means["step"] / synchronous <= 0.52
    assert simulate("fully_async", **flags, **d, update_weights_interval=4).means["step"] / synchronous <= 0.35


# ---- the simulator itself ---------------------------------------------------------------------------------
def test_one_step_off_by_hand():
    """Lengths 6 and 2 in turn, one sample a step, 3 of training, a sync of 0.5.
    0 sync | 0.5 gen 0 | 6.5 gen 1, train 0 | 9.5 sync | 10 gen 2, train 1 | 13 wait | 16 sync | 16.5 train 2 | 19.5"""
    result = simulate("one_step_off", slots=1, steps=3, lengths=[6.0, 2.0], train_time=3.0, sync_time=0.5,
                      rollout_batch_size=1, n_samples_per_prompt=1)
    assert [step["sync"] for step in result.steps] == [0.5, 0.5, 0.5]
    assert [step["end"] for step in result.steps] == [9.5, 13.0, 19.5]
    assert [step["wait"] for step in result.steps] == [6.0, 0.0, 3.0]
    assert result.means["slots idle"] == result.means["train idle"] == 1 - 6 / 10         # from 9.5 to 19.5


def test_queued_samples_start_at_every_completion():
    """2 slots, 4 samples of 3, 1, 1, 1: the short ones follow one another beside the long one."""
    result = simulate("sync", slots=2, steps=1, lengths=[3.0, 1.0, 1.0, 1.0], rollout_batch_size=4,
                      n_samples_per_prompt=1)
    assert result.steps[-1]["end"] == 3.0


def test_over_sampling_by_hand():
    """Batches of 1 out of 2 that run, 2 slots, no training, groups of one sample that take 5, 2, 2, 2.
    Reset:   0 g0 g1 | 2 g1 ends, g0 is aborted | 2 g0 anew, g2 | 4 g2 ends; g0 is not aborted again | 7 it ends, take g0
             | g2 is there already, but the oldest version is taken first: so g2 (v1) comes after g0 (v1, lower id)
    Partial: 0 g0 g1 | 2 g1 ends, g0 has 2 | g0 goes on, g2 | 4 g2 ends, g0 has 4 | g0 goes on, g3 | 5 g0 ends"""
    flags = {"slots": 2, "steps": 3, "lengths": [5.0, 2.0, 2.0, 2.0], "rollout_batch_size": 1, "n_samples_per_prompt": 1,
             "over_sampling_batch_size": 2, "watch": Account()}
    reset = simulate("sync", **flags)
    assert ([step["end"] for step in reset.steps], [step["groups"] for step in reset.steps]) == ([2.0, 7.0, 7.0], [[1], [0], [2]])
    partial = simulate("sync", **{**flags, "partial_rollout": True, "watch": Account()})
    assert [step["end"] for step in partial.steps] == [2.0, 4.0, 5.0]
    assert [step["groups"] for step in partial.steps] == [[1], [2], [0]]
    assert partial.steps[2]["lags"] == {2: 2, 1: 2, 0: 1}


def test_latency_is_paid_at_each_start_and_an_abort_loses_the_token_in_the_making():
    """Mode d, one sample a step of 2 tokens, 1 a second behind a latency of 0.5, training 1.25: g0 and g1 start at 0 and
    end at 2.5, train g0 until 3.75 | sync 1: g2 starts; train g1 until 5 | sync 2: of g2's 1.25 s 0.5 were latency and 0.75
    made no token: it starts anew and ends at 7.5, train g2 until 8.75."""
    result = run("d", slots=2, steps=3, lengths=[2.0], latency=0.5, train_time=1.25, rollout_batch_size=1,
                 n_samples_per_prompt=1)
    assert [step["end"] for step in result.steps] == [3.75, 5.0, 8.75] and result.put_back == 1


# ---- rates from a recorded run ----------------------------------------------------------------------------
def write_run(folder, args, rows, records):
    folder.mkdir(exist_ok=True)
    (folder / "args.json").write_text(json.dumps(args))
    for name, lines in (("metrics", rows), ("ledger", [{"seq": i + 1, **record} for i, record in enumerate(records)])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


ARGS = {"script": "train_fully_async.py", "groups_per_step": 2, "n_samples_per_prompt": 2, "over_sampling_batch_size": 2,
        "staleness_threshold": 0.5, "update_weights_interval": 1, "max_lag": None, "max_lag_policy": "wait",
        "partial_rollout": False, "fully_async": True, "num_engines": 3, "rollout_num_gpus_per_engine": 2,
        "sglang_server_concurrency": 10, "world_size": 2}


def test_a_recorded_run_gives_lengths_and_rates(tmp_path):
    """By hand: 1 s + 1/20 s a token in the groups that were not aborted (g1 was); training 4 s + 0.02 s a token on 2 GPUs; a
    sync works 0.5 s and pauses at least 1 s; 0.75 s of a step are none of these. The first step's times do not count."""
    records = [{"event": "draw", "group": 0}, {"event": "draw", "group": 1}, {"event": "draw", "group": 2},
               {"event": "finish", "group": 0, "tokens": [10, 40], "seconds": [1.5, 3.0]},
               {"event": "put_back", "group": 1, "tokens": [5, 0]}, {"event": "draw", "group": 1},
               {"event": "finish", "group": 1, "tokens": [20, 60], "seconds": [9.0, 9.0]},
               {"event": "drop", "group": 2, "reason": "filter: zero_spread", "tokens": [30, 20], "seconds": [2.5, 2.0]},
               {"event": "batch", "step": 0, "groups": [0, 1]}, {"event": "trained", "step": 0, "groups": [0, 1]}]
    row = lambda step, tokens, train, sync, pause, wait, lag: {
        "step": step, "rollout/tokens": tokens, "perf/train_time": train, "sync/time": sync, "sync/pause_time": pause,
        "perf/wait_prev_gen": wait, "perf/step_time": train + sync + wait + 0.75, "perf/engine_busy_time": 4.0,
        "staleness/mean": lag, "staleness/max": 2 * lag}
    rows = [row(0, 100, 90.0, 90.0, 0.1, 90.0, 0), row(1, 100, 6.0, 1.5, 1.0, 2.0, 1), row(2, 200, 8.0, 3.5, 3.0, 4.0, 2)]
    options = simulator.parse(["--fit", write_run(tmp_path, ARGS, rows, records), "--update-weights-interval", "2"])
    own = {name: pytest.approx(vars(options.own)[name]) for name in ("latency", "rate", "train_time", "train_token_time")}
    assert own == {"latency": 1.0, "rate": 20.0, "train_time": 4.0, "train_token_time": 0.04}
    assert (options.own.sync_time, options.own.overhead, options.own.drop_share) == (1.5, 0.75, 1 / 3)
    assert (options.own.split, options.own.slots_per_gpu, options.own.steps) == ((2, 6), 5.0, 3)
    assert (options.own.update_weights_interval, options.update_weights_interval, options.mode) == (1, 2, "fully_async")
    assert [options.lengths(i, random.Random(0)) for i in range(6)] == [10, 40, 20, 60, 30, 20]
    assert {options.lengths(i, random.Random(i)) for i in range(6, 100)} == {10, 40, 20, 60, 30}
    assert options.measured == {"step": 13.25, "wait": 3.0, "sync": 2.5, "train idle": 1 - 7 / 13.25, "mean lag": 1.0,
                                "engines idle": 1 - 4 / 13.25, "max lag": 4, "length bias": pytest.approx(32.5 / 30)}
    other = simulator.parse(["--fit", str(tmp_path), "--mode", "sync", "--gpus", "8"])       # nothing of the old mode is left
    assert (other.staleness_threshold, other.split, other.gpus, other.rate) == (0.0, None, 8, options.rate)


@pytest.mark.contract
def test_the_record_of_one_mode_predicts_the_others(tmp_path):
    """The synchronous loop is recorded under the virtual clock; what is fitted to that record gives every other mode the very
    times that it has with the true lengths and rates."""
    truth = {"slots": 12, "steps": 12, "rate": 4.0, "latency": 0.25, "train_time": 1.0, "train_token_time": 0.125,
             "sync_time": 0.5, "overhead": 0.25, "rollout_batch_size": 4, "n_samples_per_prompt": 2, "lengths": TAIL}
    records = []

    def keep(world, event, fields):
        if event == "finish":
            fields["seconds"] = [0.25 + tokens / 4.0 for tokens in fields["tokens"]]
        records.append({"event": event, **fields})

    rows = [{"rollout/tokens": sum(step["lags"].values()), "perf/train_time": step["train"], "sync/time": step["sync"],
             "sync/pause_time": 0.0, "perf/wait_prev_gen": step["wait"], "perf/step_time": step["time"], "staleness/mean": 0,
             "staleness/max": 0} for step in simulate("sync", **truth, watch=keep).steps]
    args = {**ARGS, "script": "train_sync.py", "fully_async": False, "groups_per_step": 4, "over_sampling_batch_size": 4,
            "staleness_threshold": 0.0, "sglang_server_concurrency": 4}
    folder = write_run(tmp_path, args, rows, records)
    for mode, flags in (("sync", []), ("one_step_off", []), ("fully_async", ["--staleness-threshold", "1"]),
                        ("fully_async", ["--staleness-threshold", "1", "--partial-rollout"])):
        changes = {} if not flags else {"staleness_threshold": 1.0, "partial_rollout": len(flags) == 3}
        predicted = simulator.run(simulator.parse(["--fit", folder, "--mode", mode, *flags]))
        for step, true in zip(predicted.steps, simulate(mode, **truth, **changes).steps, strict=True):
            assert step["groups"] == true["groups"]
            assert (step["time"], step["wait"], step["sync"]) == pytest.approx((true["time"], true["wait"], true["sync"]))


def test_best_split_and_how_many_are_enough():
    """Even lengths: 32 samples x 10 over 2 slots a GPU against 64 / training GPUs of training: at t training and r rollout
    GPUs a step takes max(10 x ceil(16 / r), 64 / t). Of 12 the best has r = 8: 20, where training takes 16. Nothing is
    faster than 10, for which 16 rollout GPUs are needed and, within 1 %, 7 training GPUs (9.1; with 6 it is 10.7)."""
    options = simulator.parse(["--mode", "one_step_off", "--gpus", "12", "--slots-per-gpu", "2", "--lengths", "1:10",
                               "--rate", "1", "--train-token-time", "0.2", "--rollout-batch-size", "8",
                               "--n-samples-per-prompt", "4"])
    results, best = simulator.best_split(options)
    assert best == (4, 8) and results[best].means["step"] == 20.0 and len(results) == 11
    assert simulator.enough(options) == (7, 16)


def test_what_is_printed(capsys):
    """Even lengths of 10: a step generates for 10 and trains for 40 on 1 GPU; nothing is faster than the 10."""
    argv = ["--mode", "sync", "--split", "1/8", "--slots-per-gpu", "1", "--lengths", "1:10", "--rate", "1", "--train-token-time",
            "0.5", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--steps", "5", "--sync-time", "2"]
    simulator.report(simulator.parse(argv))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1/8", "52.000", "10.000", "2.000", "23%", "81%", "81%", "0.00", "0", "1.000"]
    assert lines[2:4] == ["tokens by lag: 0: 100.0%", "groups: drawn 20, dropped 0, aborted 0 times"]
    assert lines[-1].startswith("beyond 330 training and 8 rollout GPUs")         # 40 / 330 <= 1.01 x (12 + 40 / 32768) - 12


def test_a_sweep_prints_its_best_and_draws_it(capsys, tmp_path):
    argv = ["--split", "1/8", "--slots-per-gpu", "1", "--lengths", "50:1,50:10", "--rate", "1", "--train-token-time", "0.1",
            "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--sweep", "threshold", "--plot", str(tmp_path / "a.png")]
    simulator.sweep(simulator.parse(argv))
    lines = capsys.readouterr().out.splitlines()
    steps = {line.split()[0]: float(line.split()[1]) for line in lines[1:-2]}
    assert list(steps) == ["0", "0.1", "0.25", "0.5", "1", "2", "4"]
    assert lines[-2] == f"best threshold: {min(steps, key=steps.get)}" and min(steps.values()) < 0.9 * steps["0"]
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("argv, named", (
    (["--lengths", "long"], "--lengths"), (["--partial-rollout"], "--staleness-threshold"),
    (["--mode", "sync", "--max-lag", "1"], "--max-lag"), (["--fit", "no/run"], "--fit"), (["--gpus", "1"], "--gpus"),
    (["--split", "4"], "--split"), (["--split", "4/0"], "--split"), (["--sweep", "threshold", "--mode", "sync"], "--sweep"),
    (["--over-sampling-batch-size", "4"], "--over-sampling-batch-size"), (["--drop-share", "1"], "--drop-share"),
    (["--update-weights-interval", "4", "--max-lag", "2"], "--max-lag"), (["--plot", "x.png"], "--plot"),
    (["--steps", "0"], "--steps")))
def test_bad_input_is_named_in_one_line(argv, named):
    with pytest.raises(ValueError, match=named) as caught:
        simulator.parse(argv)
    assert "\n" not in str(caught.value)
