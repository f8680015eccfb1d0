"""The gate and the stream of train_fully_async.py, under the virtual clock of scripts/simulate.py: no engine, no Ray.

Modes: a. on-policy stream; b. stream off-policy; c. stale samples; d. partial rollout. In the timelines by hand a group
is one sample, so that g3 is the fourth sample; "g3 v2" was started by version 2.
"""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from buffer import Buffer, Gate, Group, Ledger, Stream
from scripts import simulate as simulator
from scripts.simulate import ROWS, simulate

MODES = {"a": {}, "b": {"update_weights_interval": 3}, "c": {"staleness_threshold": 1.0},
         "d": {"staleness_threshold": 1.0, "partial_rollout": True}}
TAIL = simulator.parse_lengths("90:1,10:10")[0]
HEAVY = simulator.parse_lengths("lognormal:4:1.2:60")[0]


def run(mode, **flags):
    """A small run of the fully asynchronous script. Every event is checked for conservation."""
    values = {"slots": 8, "steps": 20, "lengths": TAIL, "train_time": 4.0, "rollout_batch_size": 4,
              "n_samples_per_prompt": 2}
    return simulate("fully_async", **{**values, **MODES[mode], "watch": conserved, **flags})


def conserved(world, event, fields):
    tally = world.tally
    assert tally.trained + len(tally.dropped) + world.buffer.outstanding == tally.drawn, event
    assert world.buffer.next_id == tally.drawn


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
    assert (result.seconds, result.put_back) == (seconds, aborted)


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
    result = run("d", slots=16, steps=30, lengths=lengths, abort_time=0.25, sync_time=0.5)
    assert max(step["time"] for step in result.steps[:-1]) == 4.0 + 1.0 + 0.75


@pytest.mark.contract
@pytest.mark.parametrize("mode", "abcd")
@pytest.mark.parametrize("drop_share", (0.0, 0.1, 0.5))
def test_no_deadlock_and_no_starved_trainer(mode, drop_share):
    """At each batch all places are taken: a dropped group gave its own back. simulate() raises when none can come."""
    def full(world, event, fields):
        conserved(world, event, fields)
        if event == "batch":
            assert world.tally.drawn - len(world.tally.dropped) == world.stream.gate.bound(world.stream.published)

    for seed in range(20):
        result = run(mode, drop_share=drop_share, seed=seed, watch=full)
        assert result.trained == 20 * 4 and len(result.steps) == 20
        assert bool(result.dropped) == (drop_share > 0)
        assert result.drawn == result.trained + sum(result.dropped.values())      # nothing past the last step


@pytest.mark.parametrize("mode", ("sync", "one_step_off"))
def test_the_other_scripts_fill_up_after_drops_too(mode):
    for max_lag in (0, 1) if mode == "one_step_off" else (None,):
        result = simulate(mode, slots=8, steps=20, lengths=TAIL, train_time=4.0, rollout_batch_size=4, max_lag=max_lag,
                          n_samples_per_prompt=2, drop_share=0.5, watch=conserved)
        assert result.trained == 80 and result.drawn == 80 + sum(result.dropped.values())
        assert [max(step["lags"]) for step in result.steps] == [0] + [max_lag or 0] * 19


LAGS = [(k, lag) for k in (1, 3) for lag in sorted({k - 1, k, 2 * k})]


@pytest.mark.contract
@pytest.mark.parametrize("policy", ("wait", "drop", "mask"))
@pytest.mark.parametrize("k, max_lag", LAGS)
@pytest.mark.parametrize("partial", (False, True))
def test_max_lag_holds_and_all_make_progress(policy, k, max_lag, partial):
    """A threshold far beyond --max-lag, and a tail of fifteen times the median."""
    for seed, drop_share in ((0, 0.0), (1, 0.0), (2, 0.2)):
        with_loss, without = Counter(), Counter()

        def masks(world, event, fields):
            conserved(world, event, fields)
            batch = world.buffer.waiting(fields["step"]) if event == "batch" else []
            for version, count in [run for group in batch for sample in group.samples for run in sample.version_runs]:
                lag = fields["step"] - version                    # the rule of batch.loss_mask, run by run
                (without if policy == "mask" and lag > max_lag else with_loss)[lag] += count

        result = run("c", steps=24, lengths=HEAVY, staleness_threshold=3.0, update_weights_interval=k, max_lag=max_lag,
                     max_lag_policy=policy, partial_rollout=partial, drop_share=drop_share, seed=seed, train_time=2.0,
                     watch=masks)
        assert result.trained == 24 * 4 and max(with_loss) <= max_lag
        if policy == "mask":
            assert bool(without) == (result.masked_share > 0)
        else:
            assert max(result.lags) <= max_lag
        if policy == "wait":
            assert "lag" not in result.dropped and result.masked_share == 0
        assert result.drawn == result.trained + sum(result.dropped.values())


@pytest.mark.contract
def test_each_policy_does_something_where_the_lag_would_be_too_large():
    flags = {"steps": 24, "lengths": HEAVY, "staleness_threshold": 3.0, "train_time": 2.0}
    assert max(run("d", **flags).lags) > 2
    for policy in ("wait", "drop", "mask"):
        result = run("d", **flags, max_lag=1, max_lag_policy=policy)
        assert (max(result.lags) > 1, result.masked_share > 0, "lag" in result.dropped) == (
            policy == "mask", policy == "mask", policy == "drop")
        if policy == "drop":
            assert result.length_bias < 0.9 and result.dropped_length["lag"] > 1     # long answers are starved


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
    synchronous = simulate("sync", **flags).step_time
    assert simulate("one_step_off", **flags).step_time / synchronous <= 0.78
    assert simulate("fully_async", **flags, **c).step_time / synchronous <= 0.78
    assert simulate("fully_async", **flags, **d).step_time / synchronous <= 0.52
    assert simulate("fully_async", **flags, **d, update_weights_interval=4).step_time / synchronous <= 0.35


# ---- the simulator itself ---------------------------------------------------------------------------------
def test_one_step_off_by_hand():
    """Lengths 6 and 2 in turn, one sample a step, 3 of training, a sync of 0.5.
    0 sync | 0.5 gen 0 | 6.5 gen 1, train 0 | 9.5 sync | 10 gen 2, train 1 | 13 wait | 16 sync | 16.5 train 2 | 19.5"""
    result = simulate("one_step_off", slots=1, steps=3, lengths=[6.0, 2.0], train_time=3.0, sync_time=0.5,
                      rollout_batch_size=1, n_samples_per_prompt=1)
    assert [step["sync"] for step in result.steps] == [0.5, 0.5, 0.5]
    assert [step["end"] for step in result.steps] == [9.5, 13.0, 19.5]
    assert [step["wait"] for step in result.steps] == [6.0, 0.0, 3.0]
    assert result.slots_idle_share == 1 - 14 / 19.5 and result.train_idle_share == 1 - 6 / 10


def test_queued_samples_start_at_every_completion():
    """2 slots, 4 samples of 3, 1, 1, 1: the short ones follow one another beside the long one."""
    result = simulate("sync", slots=2, steps=1, lengths=[3.0, 1.0, 1.0, 1.0], rollout_batch_size=4,
                      n_samples_per_prompt=1)
    assert result.seconds == 3.0


def test_a_recorded_run_gives_lengths_and_times(tmp_path):
    """A lognormal of mean 100 whose longest of 64 is on the average 600, generated in 30 s: 20 tokens a second."""
    row = {"rollout/response_len": 100.0, "rollout/response_len_max": 600, "rollout/tokens": 6400,
           "perf/generate_time": 30.0, "perf/train_time": 8.0, "perf/wait_prev_gen": 22.0, "perf/step_time": 31.0,
           "sync/time": 1.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, **row}) + "\n" for i in range(3)))
    options = simulator.parse(["--mode", "one_step_off", "--split", "2/2", "--lengths", str(tmp_path),
                               "--rollout-batch-size", "8"])
    simulator.read_split(options)
    measured = simulator.fill_in(options)
    assert (options.rate, options.sync_time, measured["perf/train_time"]) == (20.0, 1.0, 8.0)
    assert options.train_token_time == 8.0 * 2 / 6400
    numbers = random.Random(0)
    lengths = [options.draw(0, numbers) for _ in range(20_000)]
    assert max(lengths) == 600 and 90 < sum(lengths) / len(lengths) < 102       # the cap takes a little


def test_best_split_and_the_knee():
    """Even lengths: 32 samples x 10 over 2 slots a GPU against 64 / training GPUs of training: at r rollout GPUs of 12
    a step takes max(10 x ceil(16 / r), 64 / (12 - r)): 20 at r = 8, where training takes 16."""
    options = simulator.parse(["--mode", "one_step_off", "--gpus", "12", "--slots-per-gpu", "2", "--lengths", "1:10",
                               "--rate", "1", "--train-token-time", "0.2", "--rollout-batch-size", "8",
                               "--n-samples-per-prompt", "4"])
    simulator.read_split(options)
    simulator.fill_in(options)
    results, best = simulator.best_split(options)
    assert best == (4, 8) and results[best].step_time == 20.0 and len(results) == 11
    assert simulator.knee(lambda gpus: 10.0 * -(-16 // gpus), 24) == 16
    assert simulator.knee(lambda gpus: max(20.0, 10.0 * -(-16 // gpus)), 24) == 8


@pytest.mark.parametrize("argv, named", (
    (["--lengths", "long"], "--lengths"), (["--partial-rollout"], "--staleness-threshold"),
    (["--mode", "sync", "--max-lag", "1"], "--max-lag"), (["--lengths", "."], "--split"), (["--gpus", "1"], "--gpus"),
    (["--split", "4"], "--split"),
    (["--update-weights-interval", "4", "--max-lag", "2"], "--max-lag"), (["--plot", "x.png"], "--plot"),
    (["--steps", "0"], "--steps")))
def test_bad_input_is_named_in_one_line(argv, named):
    with pytest.raises(ValueError, match=named) as caught:
        options = simulator.parse(argv)
        simulator.read_split(options)
        simulator.fill_in(options)
    assert "\n" not in str(caught.value)
