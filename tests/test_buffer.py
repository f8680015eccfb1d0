"""The buffer and its ledger: every drawn group ends in one place, and no row is skipped or trained twice.

The oracles are computed here, by hand or by a loop of a few lines, and never by the code under test.
"""

import json
import math
import os
import random
import time
import signal
import subprocess
import sys
from collections import Counter

import pytest

from buffer import Buffer, Ledger

PROJECT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# ---- helpers ----------------------------------------------------------------------------------------------
def make_rows(count):
    return [{"prompt": f"question {i}", "prompt_tokens": [i, i + 1], "label": str(i), "metadata": {"tags": [i]}}
            for i in range(count)]


def make_buffer(rows=10, n=2, seed=7, path=None, **flags):
    rows = make_rows(rows) if isinstance(rows, int) else rows
    return Buffer(rows, n, seed, Ledger(path), **flags)


def permutation(count, seed, epoch):
    order = list(range(count))
    random.Random(seed + epoch).shuffle(order)
    return order


def generate(sample, count, version, status="pending"):
    """Appends `count` tokens, as an engine of that version would; status "completed" also rewards the sample."""
    start = len(sample.response_tokens)
    sample.append(list(range(start, start + count)), [-(start + i + 1) / 3 for i in range(count)], version)
    sample.status = status
    if status == "completed":
        sample.reward = sample.row / 7


def complete(buffer, groups, version=0, length=3):
    for group in groups:
        for sample in group.samples:
            if sample.status == "pending":
                generate(sample, length, version, "completed")
        buffer.finish(group)


def rows_of(groups):
    return [group.row for group in groups]


def ids_of(groups):
    return [group.group_id for group in groups]


def reload(buffer, **flags):
    """A new buffer that gets the state of the old one through a JSON text, as a resume does."""
    new = Buffer(buffer.rows, buffer.n_samples_per_prompt, buffer.seed, Ledger(), shuffle=buffer.shuffle,
                 **{"num_epoch": buffer.num_epoch, "partial_rollout": buffer.partial_rollout, **flags})
    new.load_state(json.loads(json.dumps(buffer.state())))
    return new


# ---- samples ----------------------------------------------------------------------------------------------
def test_append_keeps_columns_equal_and_merges_version_runs():
    sample = make_buffer().draw(1)[0].samples[0]
    sample.append([5, 6], [-0.5, -0.25], 3)
    sample.append([7], [-1.0], 3)
    sample.append([8, 9], [0.0, 0.0], 3, mask=0)
    sample.append([], [], 4)
    sample.append([10], [-2.0], 5)
    assert sample.response_tokens == [5, 6, 7, 8, 9, 10]
    assert sample.rollout_logprobs == [-0.5, -0.25, -1.0, 0.0, 0.0, -2.0]
    assert sample.loss_mask == [1, 1, 1, 0, 0, 1]
    assert sample.version_runs == [[3, 5], [5, 1]]
    assert sample.oldest_version == 3


@pytest.mark.parametrize("logprobs, message", [
    (None, "2 tokens came with 0 log-probs"),
    ([-0.5], "2 tokens came with 1 log-probs"),
    ([-0.5, -0.5, float("nan")], "2 tokens came with 3 log-probs"),
    ([-0.5, None], "2 log-probs, 1 of them finite"),
    ([float("nan"), -0.5], "2 log-probs, 1 of them finite"),
    ([-0.5, -math.inf], "2 log-probs, 1 of them finite"),
])
def test_append_refuses_bad_logprobs_and_names_the_sample(logprobs, message):
    sample = make_buffer().draw(3)[2].samples[1]
    with pytest.raises(ValueError, match=f"sample 1 of group 2: .*{message}"):
        sample.append([5, 6], logprobs, 0)
    assert (sample.response_tokens, sample.loss_mask, sample.version_runs) == ([], [], [])


@pytest.mark.parametrize("version", [None, "3", 3.0])
def test_append_refuses_a_version_that_is_no_number(version):
    with pytest.raises(ValueError, match="sample 0 of group 0: version"):
        make_buffer().draw(1)[0].samples[0].append([5], [-0.5], version)


def test_append_asserts_the_lengths_where_someone_else_broke_them():
    sample = make_buffer().draw(1)[0].samples[0]
    sample.append([5], [-0.5], 0)
    sample.loss_mask.pop()
    with pytest.raises(AssertionError, match="sample 0 of group 0"):
        sample.append([6], [-0.5], 0)


@pytest.mark.parametrize("status", ["completed", "truncated", "failed"])
def test_a_sample_that_is_done_takes_no_more_tokens(status):
    sample = make_buffer().draw(1)[0].samples[0]
    generate(sample, 2, 0, status)
    with pytest.raises(ValueError, match=f"is {status}"):
        sample.append([6], [-0.5], 0)
    assert sample.response_tokens == [0, 1]


def test_floats_survive_json_to_the_last_bit():
    rng = random.Random(0)
    floats = [-1 / 3, -0.1, -5e-324, -0.0, -1e-17, -1.7976931348623157e308]
    floats += [-rng.random() * 10 ** rng.randint(-300, 3) for _ in range(1000)]
    buffer = make_buffer(n=1)
    [group] = buffer.draw(1)
    group.samples[0].append(list(range(len(floats))), floats, 0)
    group.samples[0].status, group.samples[0].reward = "completed", 0.1 + 0.2
    buffer.finish(group)
    [again] = reload(buffer).take(0, 1)
    assert [x.hex() for x in again.samples[0].rollout_logprobs] == [x.hex() for x in floats]
    assert again.samples[0].reward.hex() == (0.1 + 0.2).hex()
    assert again == group and again.samples[0] is not group.samples[0]


# ---- drawing ----------------------------------------------------------------------------------------------
def test_each_epoch_has_its_own_permutation_and_ids_count_up():
    groups = make_buffer(rows=10, seed=7).draw(30)
    assert rows_of(groups) == permutation(10, 7, 0) + permutation(10, 7, 1) + permutation(10, 7, 2)
    assert permutation(10, 7, 0) != permutation(10, 7, 1)
    assert ids_of(groups) == list(range(30))
    assert [group.epoch for group in groups] == [0] * 10 + [1] * 10 + [2] * 10


def test_a_group_carries_its_row_in_every_sample():
    [group] = make_buffer(rows=make_rows(10), n=3, seed=1).draw(1)
    row = permutation(10, 1, 0)[0]
    assert [(s.group_id, s.index, s.row, s.prompt, s.label, s.prompt_tokens, s.metadata) for s in group.samples] == [
        (0, index, row, f"question {row}", str(row), [row, row + 1], {"tags": [row]}) for index in range(3)]
    assert {s.status for s in group.samples} == {"pending"} and group.oldest_version is None


def test_without_shuffle_rows_come_in_order():
    assert rows_of(make_buffer(rows=3, shuffle=False).draw(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_a_request_that_is_bigger_than_epochs_goes_on():      # symptom 6: fewer rows than asked for
    buffer = make_buffer(rows=5, seed=3)
    expected = [row for epoch in range(4) for row in permutation(5, 3, epoch)]
    assert rows_of(buffer.draw(3)) == expected[:3]
    assert rows_of(buffer.draw(12)) == expected[3:15]
    assert rows_of(buffer.draw(1)) == expected[15:16]


def test_the_data_end_cleanly_after_num_epoch():
    buffer = make_buffer(rows=5, seed=3, num_epoch=2)
    assert len(buffer.draw(9)) == 9 and not buffer.exhausted
    last = buffer.draw(4)
    assert rows_of(last) == permutation(5, 3, 1)[-1:] and buffer.exhausted
    assert buffer.draw(4) == [] and buffer.draw(0) == [] and buffer.draw(-3) == []
    generate(last[0].samples[0], 1, 0)
    buffer.put_back(last[0])                                   # no fresh prompt, but this one is still to be done
    assert buffer.exhausted and ids_of(buffer.draw(4)) == [9]


def test_the_buffer_does_not_disturb_the_global_random_state():
    random.seed(5)
    make_buffer().draw(25)
    assert random.random() == random.Random(5).random()


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="--prompt-data: no rows"):
        make_buffer(rows=[])
    rows = make_rows(1)
    rows[0]["metadata"] = {"when": object()}
    with pytest.raises(ValueError, match="--prompt-data: metadata of row 0 cannot be saved as JSON"):
        make_buffer(rows=rows).draw(1)


# ---- finishing and taking ---------------------------------------------------------------------------------
def test_surplus_finished_groups_stay_scored_and_are_used_first():     # symptom 4
    buffer = make_buffer()
    groups = buffer.draw(6)
    complete(buffer, groups[:5], version=0)
    assert ids_of(buffer.take(0, 3)) == [0, 1, 2] and buffer.finished_count == 2
    buffer.put_back(groups[5])
    complete(buffer, buffer.draw(3), version=1)                # the reset group 5, then 6 and 7
    batch = buffer.take(1, 4)
    assert ids_of(batch) == [3, 4, 5, 6]
    assert batch[0] is groups[3] and [s.reward for s in batch[0].samples] == [groups[3].row / 7] * 2
    assert [group.oldest_version for group in batch] == [0, 0, 1, 1]


def test_take_prefers_the_oldest_version_then_the_lowest_id():
    buffer = make_buffer(n=1)
    groups = buffer.draw(5)
    for group, version in reversed(list(zip(groups, [4, 2, 4, 2, 3]))):
        complete(buffer, [group], version)
    assert ids_of(buffer.take(5, 2)) == [1, 3]
    assert ids_of(buffer.take(6, 2)) == [4, 0]
    assert ids_of(buffer.take(7, 1)) == [2]


def test_answers_without_a_token_have_no_version_and_do_not_wait():
    buffer = make_buffer()
    groups = buffer.draw(2)
    complete(buffer, groups[:1], version=0)
    complete(buffer, groups[1:], version=4, length=0)
    assert groups[1].oldest_version is None and ids_of(buffer.take(4, 1)) == [1]


def test_take_refuses_too_few_and_a_second_batch_and_changes_nothing():
    buffer = make_buffer()
    complete(buffer, buffer.draw(3))
    with pytest.raises(ValueError, match="step 0 takes 4 groups, but 3 are finished"):
        buffer.take(0, 4)
    assert buffer.finished_count == 3
    buffer.take(0, 1)
    with pytest.raises(ValueError, match="step 0 has its batch already"):
        buffer.take(0, 1)
    assert buffer.finished_count == 2


def test_a_batch_is_in_hand_until_it_is_trained():
    buffer = make_buffer()
    complete(buffer, buffer.draw(3))
    batch = buffer.take(4, 2)
    assert buffer.waiting(4) is batch and buffer.waiting(5) is None
    buffer.trained(4)
    assert buffer.waiting(4) is None
    with pytest.raises(ValueError, match="step 4 has no batch in hand"):
        buffer.trained(4)


@pytest.mark.parametrize("status, reward", [("pending", 1.0), ("failed", 1.0), ("completed", None),
                                            ("completed", math.nan)])
def test_finish_refuses_a_sample_that_is_not_done_and_rewarded(status, reward):
    buffer = make_buffer()
    [group] = buffer.draw(1)
    generate(group.samples[0], 2, 0, "completed")
    generate(group.samples[1], 2, 0, "completed")
    group.samples[1].status, group.samples[1].reward = status, reward
    with pytest.raises(ValueError, match=f"sample 1 of group 0 is not finished: {status}, reward"):
        buffer.finish(group)
    assert list(buffer.in_flight) == [0] and buffer.finished_count == 0


def test_a_group_leaves_flight_once():
    buffer = make_buffer()
    [group] = buffer.draw(1)
    complete(buffer, [group])
    with pytest.raises(ValueError, match="group 0 is not in flight"):
        buffer.finish(group)
    [other] = buffer.draw(1)
    buffer.put_back(other)
    for again in (buffer.put_back, lambda group: buffer.drop(group, "error")):
        with pytest.raises(ValueError, match="group 1 is not in flight"):
            again(other)


def test_a_full_buffer_forgets_nothing(tmp_path):              # symptom 9: the oldest sample vanishes
    path = tmp_path / "ledger.jsonl"
    buffer = make_buffer(rows=5000, n=1, path=path)
    complete(buffer, buffer.draw(5000), length=1)
    assert ids_of(buffer.take(0, 1)) == [0] and buffer.finished_count == 4999
    assert Counter(group["outcome"] for group in Ledger.outcomes(path).values()) == {"buffered": 5000}


def test_dropped_groups_end_and_say_why(tmp_path):             # symptom 10: nothing but equal rewards still ends
    path = tmp_path / "ledger.jsonl"
    buffer = make_buffer(rows=4, path=path, num_epoch=2)
    for _ in range(8):
        [group] = buffer.draw(1)
        buffer.drop(group, "zero_spread" if group.epoch else "error")
    assert buffer.draw(1) == [] and buffer.exhausted
    outcomes = Ledger.outcomes(path)
    assert [outcomes[i]["outcome"] for i in range(8)] == ["dropped"] * 8
    assert [outcomes[i]["reason"] for i in range(8)] == ["error"] * 4 + ["zero_spread"] * 4


def test_a_finished_group_can_be_dropped_and_is_never_taken():         # --max-lag-policy drop
    buffer = make_buffer()
    groups = buffer.draw(4)
    complete(buffer, groups)
    buffer.drop(groups[0], "lag")
    buffer.drop(groups[2], "lag")
    assert buffer.finished_count == 2 and ids_of(buffer.take(0, 2)) == [1, 3]


# ---- aborted groups ---------------------------------------------------------------------------------------
def test_without_partial_rollout_an_aborted_group_goes_back_to_its_prompt():   # symptom 3
    buffer = make_buffer()
    groups = buffer.draw(3)
    generate(groups[1].samples[0], 4, 0, "completed")
    generate(groups[1].samples[1], 2, 0)
    groups[1].samples[0].response = "text"
    buffer.put_back(groups[1])
    [again] = buffer.draw(1)
    assert (again.group_id, again.row, again.keep) == (1, permutation(10, 7, 0)[1], True)
    for sample in again.samples:
        assert [sample.response_tokens, sample.loss_mask, sample.rollout_logprobs, sample.version_runs] == [[]] * 4
        assert (sample.response, sample.reward, sample.status) == ("", None, "pending")
        assert sample.prompt_tokens == [again.row, again.row + 1]
    assert not groups[0].keep


def test_unfinished_groups_come_first_lowest_id_first():
    buffer = make_buffer()
    groups = buffer.draw(6)
    for i in (4, 0, 3):
        buffer.put_back(groups[i])
    assert ids_of(buffer.draw(2)) == [0, 3]
    buffer.put_back(groups[1])
    assert ids_of(buffer.draw(4)) == [1, 4, 6, 7]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("status", ["completed", "truncated"])
def test_a_group_whose_samples_are_all_done_is_never_put_back(partial, status):
    buffer = make_buffer(partial_rollout=partial)
    [group] = buffer.draw(1)
    for sample in group.samples:
        generate(sample, 2, 0, status)
    with pytest.raises(ValueError, match="group 0 has nothing left to generate"):
        buffer.put_back(group)
    assert list(buffer.in_flight) == [0] and len(group.samples[0].response_tokens) == 2


@pytest.mark.contract
def test_a_continued_group_keeps_tokens_and_its_finished_member_is_untouched():    # symptoms 1 and 5
    buffer = make_buffer(partial_rollout=True)
    groups = buffer.draw(2)
    short, long = groups[1].samples
    generate(short, 2, 3, "completed")
    generate(long, 4, 3)
    untouched = json.dumps(short.to_json())
    buffer.put_back(groups[1])
    [again] = buffer.draw(1)
    assert again is groups[1] and not again.keep
    generate(long, 1, 4)
    buffer.put_back(again)
    buffer.draw(1)
    generate(long, 3, 6, "completed")
    buffer.finish(again)
    assert json.dumps(short.to_json()) == untouched and short.loss_mask == [1, 1]
    assert long.version_runs == [[3, 4], [4, 1], [6, 3]] and again.oldest_version == 3
    assert long.response_tokens == list(range(8)) and long.loss_mask == [1] * 8
    assert long.rollout_logprobs == [-(i + 1) / 3 for i in range(8)]


@pytest.mark.contract
def test_partial_rollout_mixes_versions_and_loses_no_group(tmp_path):
    """Eight steps of over-sampling in which each sample needs as many tokens as its row says, four per step."""
    path = tmp_path / "ledger.jsonl"
    buffer = make_buffer(rows=16, path=path, num_epoch=1, partial_rollout=True)
    batches = []
    for step in range(8):
        for group in buffer.draw(6 - buffer.finished_count):
            for sample in group.samples:
                need = 1 + (group.row + sample.index) % 11 - len(sample.response_tokens)
                if sample.status == "pending":
                    generate(sample, min(need, 4), step, "completed" if need <= 4 else "pending")
                columns = sample.response_tokens, sample.loss_mask, sample.rollout_logprobs
                assert {len(column) for column in columns} == {sum(count for _, count in sample.version_runs)}
            done = all(sample.status == "completed" for sample in group.samples)
            (buffer.finish if done else buffer.put_back)(group)
        batches.append(buffer.take(step, min(2, buffer.finished_count)))
        buffer.trained(step)
    trained = [group for batch in batches for group in batch]
    assert sorted(rows_of(trained)) == list(range(16))
    outcomes = Ledger.outcomes(path)
    assert {(group["outcome"], group["row"]) for group in outcomes.values()} == {("trained", row) for row in range(16)}
    assert len(outcomes) == 16
    for group in trained:
        for sample in group.samples:
            need = 1 + (group.row + sample.index) % 11
            assert sample.response_tokens == list(range(need))
            assert [count for _, count in sample.version_runs] == [4] * (need // 4) + ([need % 4] if need % 4 else [])
            versions = [version for version, _ in sample.version_runs]
            assert versions == sorted(set(versions))
    assert any(len(sample.version_runs) == 3 for group in trained for sample in group.samples)


@pytest.mark.parametrize("partial", [False, True])
def test_long_answers_are_trained_as_often_as_short_ones(partial):     # symptom 8: a third of the prompts never trained
    buffer = make_buffer(rows=40, n=1, num_epoch=3, partial_rollout=partial)
    trained, step = [], 0
    while buffer.finished_count or buffer.unfinished or not buffer.exhausted:
        running = buffer.draw(8 - buffer.finished_count)
        running.sort(key=lambda group: group.row)              # a row's number is the length of its answer
        wanted = min(4, buffer.finished_count + len(running))
        for group in running:
            enough = buffer.finished_count >= wanted
            have = len(group.samples[0].response_tokens)
            if enough and not group.keep and have + 10 < group.row:
                generate(group.samples[0], 10, step)
                buffer.put_back(group)
            else:
                generate(group.samples[0], group.row - have, step, "completed")
                buffer.finish(group)
        trained += buffer.take(step, wanted)
        buffer.trained(step)
        step += 1
    assert Counter((group.epoch, group.row) for group in trained) == {(e, r): 1 for e in range(3) for r in range(40)}
    assert sum(len(group.samples[0].response_tokens) for group in trained) == 3 * sum(range(40))


# ---- state ------------------------------------------------------------------------------------------------
class Schedule:
    """A random loop around a buffer. It keeps its own books, in the simplest form, to be the oracle of the tests."""

    def __init__(self, buffer, seed):
        self.buffer, self.rng, self.step = buffer, random.Random(seed), 0
        self.place = {}                # group id -> "in_flight" | "unfinished" | "finished" | ("in_hand", step) | ...
        self.content = {}              # group id -> JSON text of the group as it was put away
        self.groups = {}               # group id -> group in flight

    def ids(self, place):
        return sorted(group_id for group_id, where in self.place.items() if where == place)

    def event(self):
        """One random event."""
        flying, finished = self.ids("in_flight"), self.ids("finished")
        hand = [where[1] for where in self.place.values() if where[0] == "in_hand"]
        name = self.rng.choice("draw generate finish put_back drop generate finish take trained".split())
        if name == "draw":
            for group in self.buffer.draw(self.rng.randint(1, 4)):
                self.place[group.group_id], self.groups[group.group_id] = "in_flight", group
        elif name == "take" and finished:
            for group in self.buffer.take(self.step, self.rng.randint(1, len(finished))):
                self.place[group.group_id] = "in_hand", self.step
            self.step += 1
        elif name == "trained" and hand:
            self.buffer.trained(min(hand))
            for group_id in self.ids(("in_hand", min(hand))):
                self.place[group_id] = "trained", min(hand)
        elif name not in ("take", "trained") and flying:
            self.move(name, self.groups[self.rng.choice(flying)])

    def move(self, name, group):
        pending = [sample for sample in group.samples if sample.status == "pending"]
        if name == "generate" and len(pending) > 1:
            generate(pending[0], self.rng.randint(0, 3), self.step, self.rng.choice(["pending", "completed"]))
        if name in ("put_back", "drop") and pending:
            self.buffer.put_back(group) if name == "put_back" else self.buffer.drop(group, "error")
            self.place[group.group_id] = "unfinished" if name == "put_back" else ("dropped", "error")
        if name == "finish":
            complete(self.buffer, [group], self.step, self.rng.randint(0, 3))
            self.place[group.group_id] = "finished"
        self.content[group.group_id] = json.dumps(group.to_json(), sort_keys=True)


def test_state_round_trip_at_every_event_of_random_schedules():        # symptom 6: the buffer is not in the checkpoint
    for seed in range(200):
        buffer = make_buffer(rows=7, n=2, seed=seed, partial_rollout=bool(seed % 2))
        schedule = Schedule(buffer, seed)
        for _ in range(20):
            schedule.event()
            text = json.dumps(buffer.state())
            assert json.loads(text) == buffer.state()          # JSON changes nothing, state() neither
            again = reload(buffer)
            check_content(again, schedule)
            check_draws(again, schedule, seed)


def check_content(again, schedule):
    groups = {**again.finished, **{group.group_id: group for batch in again.in_hand.values() for group in batch}}
    scored = [i for i, where in schedule.place.items() if where == "finished" or where[0] == "in_hand"]
    assert sorted(groups) == sorted(scored)
    for group_id, group in groups.items():
        assert json.dumps(group.to_json(), sort_keys=True) == schedule.content[group_id]
    for step, batch in again.in_hand.items():
        assert sorted(ids_of(batch)) == schedule.ids(("in_hand", step))
    assert again.in_flight == {}


def check_draws(again, schedule, seed):
    """Unfinished and lost groups by id, then the fresh prompts that are due: rows by permutation, tokens as kept."""
    waiting = sorted(schedule.ids("unfinished") + schedule.ids("in_flight"))
    fresh = list(range(len(schedule.place), len(schedule.place) + 10))
    drawn = again.draw(len(waiting) + 10)
    assert ids_of(drawn) == waiting + fresh
    assert rows_of(drawn) == [permutation(7, seed, i // 7)[i % 7] for i in waiting + fresh]
    for group in drawn:
        if schedule.place.get(group.group_id) == "unfinished":
            assert json.dumps(group.to_json(), sort_keys=True) == schedule.content[group.group_id]
        else:
            assert {len(sample.response_tokens) for sample in group.samples} == {0}
            assert {sample.status for sample in group.samples} == {"pending"}


def test_state_is_independent_of_later_changes_on_both_sides():
    rows = make_rows(4)
    buffer = make_buffer(rows=rows, partial_rollout=True)
    partial, done, flying = buffer.draw(3)
    generate(partial.samples[0], 2, 0)
    buffer.put_back(partial)
    complete(buffer, [done])
    state = buffer.state()
    before = json.dumps(state)
    again = Buffer(rows, 2, 7, Ledger(), partial_rollout=True)
    again.load_state(state)
    for group in [partial, done, flying, *again.draw(3), *again.finished.values()]:
        sample = group.samples[0]
        sample.status = "pending"
        generate(sample, 5, 0)
        sample.metadata["tags"].append("changed")
        sample.prompt_tokens.append(-1)
        group.keep = True
    assert json.dumps(state) == before
    assert rows == make_rows(4)                                # nor do they reach the data,
    assert flying.samples[1].metadata == {"tags": [flying.row]}        # nor the sample's siblings


def test_groups_in_flight_are_drawn_again_from_their_prompt_and_keep_their_mark():
    buffer = make_buffer(partial_rollout=False)
    groups = buffer.draw(4)
    buffer.put_back(groups[2])
    assert buffer.draw(1) == [groups[2]] and groups[2].keep
    generate(groups[0].samples[0], 3, 0, "completed")
    generate(groups[2].samples[0], 3, 0)
    again = reload(buffer).draw(5)
    assert ids_of(again) == [0, 1, 2, 3, 4] and [group.keep for group in again] == [False, False, True, False, False]
    assert [sum(group.response_lengths) for group in again] == [0] * 5
    assert sum(groups[0].response_lengths) == 3                      # the run that saved goes on with its own


def test_partial_rollout_switched_off_at_a_resume_leaves_no_old_tokens():
    buffer = make_buffer(partial_rollout=True)
    [group] = buffer.draw(1)
    generate(group.samples[0], 3, 0)
    buffer.put_back(group)
    assert sum(reload(buffer).draw(1)[0].response_lengths) == 3
    assert sum(reload(buffer, partial_rollout=False).draw(1)[0].response_lengths) == 0


def test_a_resume_may_lengthen_the_run():
    buffer = make_buffer(rows=4, num_epoch=1)
    buffer.draw(4)
    longer = reload(buffer, num_epoch=2)
    assert not longer.exhausted and rows_of(longer.draw(9)) == permutation(4, 7, 0) + permutation(4, 7, 1)


@pytest.mark.drill
@pytest.mark.parametrize("change, flag", [
    (dict(rows=11), r"--prompt-data \(rows\): the checkpoint has 10, this run 11"),
    (dict(rows=[{**row, "label": "x"} for row in make_rows(10)]), r"--prompt-data \(content\)"),
    (dict(rows=[{**row, "prompt": "x"} for row in make_rows(10)]), r"--prompt-data \(content\)"),
    (dict(seed=8), "--seed: the checkpoint has 7, this run 8"),
    (dict(shuffle=False), "--rollout-shuffle: the checkpoint has True, this run False"),
    (dict(n=3), "--n-samples-per-prompt: the checkpoint has 2, this run 3"),
])
def test_state_of_other_data_is_refused(change, flag):
    with pytest.raises(ValueError, match=flag):
        make_buffer(**change).load_state(make_buffer().state())


# ---- a million rows ---------------------------------------------------------------------------------------
class CountingRows:
    """A data set that counts how it is used, and cannot be iterated over."""
    __iter__ = None

    def __init__(self, length):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        self.read.append(i)
        return {"prompt": str(i), "prompt_tokens": [i], "label": "", "metadata": {}}


def test_of_a_million_rows_only_the_drawn_ones_are_read():
    rows = CountingRows(10 ** 6)
    buffer = Buffer(rows, 1, 7, Ledger())
    assert rows.read == [0, 249999, 499999, 749999, 999999]    # to recognise the data
    groups = buffer.draw(20)
    groups += buffer.draw(30)
    assert rows.read[5:] == permutation(10 ** 6, 7, 0)[:50]
    complete(buffer, groups[:40])
    buffer.take(0, 20)
    buffer.trained(0)
    buffer.put_back(groups[45])
    buffer.state()
    assert len(rows.read) == 55
    assert ids_of(buffer.draw(2)) == [45, 50] and len(rows.read) == 56


def lines_executed(call):
    """How many lines of Python run in `call`."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_no_operation_gets_slower_with_more_groups_or_rows():
    def costs(size):
        fresh, buffer = [make_buffer(rows=CountingRows(5 * size), n=1, shuffle=shuffle) for shuffle in (True, False)]
        groups = buffer.draw(3 * size)
        fresh.draw(1)                                          # the first of an epoch shuffles it
        complete(buffer, groups[:size])
        for group in groups[size:2 * size]:
            buffer.put_back(group)
        flying = groups[2 * size:]
        generate(flying[0].samples[0], 1, 0, "completed")
        calls = [lambda: fresh.draw(1), lambda: buffer.draw(1), lambda: buffer.finish(flying[0]),
                 lambda: buffer.put_back(flying[1]), lambda: buffer.drop(flying[2], "error"),
                 lambda: buffer.drop(groups[5], "lag"), lambda: buffer.take(0, 1), lambda: buffer.trained(0)]
        return [lines_executed(call) for call in calls]
    assert costs(10) == costs(2000)


# ---- the ledger -------------------------------------------------------------------------------------------
def write_lines(path, records):
    """A ledger by hand: records without a number get the next one."""
    lines = [json.dumps({"seq": i + 1, **record}) for i, record in enumerate(records)]
    path.write_text("\n".join(lines) + "\n")


def draw(group, row=None, epoch=0):
    return {"event": "draw", "group": group, "row": group if row is None else row, "epoch": epoch}


def one(event, group, **fields):
    return {"event": event, "group": group, **fields}


def many(event, step, *groups):
    return {"event": event, "step": step, "groups": list(groups)}


def test_ledger_lines_are_written_at_once_and_numbered(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for i in range(3):
        ledger.write("save", step=i)
        record = json.loads(path.read_text().splitlines()[-1])
        assert abs(record.pop("time") - time.time()) < 60
        assert record == {"seq": i + 1, "event": "save", "step": i}
        assert path.read_bytes().endswith(b"\n")
    ledger.sync()
    again = Ledger(path)
    assert again.seq == 3
    again.write("save", step=3)
    assert [record["seq"] for record in Ledger.read(path)] == [1, 2, 3, 4]


def test_ledger_without_a_path_keeps_nothing_and_still_counts():
    ledger = Ledger()
    ledger.write("save", step=0)
    ledger.sync()
    ledger.resume(0, 40)
    assert ledger.seq == 2


def test_outcomes_by_hand(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write_lines(path, [draw(0, 4), draw(1, 2), draw(2, 0), draw(3, 1), draw(4, 3), draw(5, 4, 1),
                       one("put_back", 1, tokens=[3]), one("finish", 0), one("drop", 2, reason="error"), draw(1, 2),
                       one("finish", 1), one("finish", 3), many("batch", 0, 1, 0), many("trained", 0, 1, 0),
                       {"event": "save", "step": 1}, one("put_back", 5, tokens=[0])])
    none = {"step": None, "reason": None}
    assert Ledger.outcomes(path) == {
        0: {"outcome": "trained", "row": 4, "epoch": 0, "step": 0, "reason": None},
        1: {"outcome": "trained", "row": 2, "epoch": 0, "step": 0, "reason": None},
        2: {"outcome": "dropped", "row": 0, "epoch": 0, "step": None, "reason": "error"},
        3: {"outcome": "buffered", "row": 1, "epoch": 0, **none},
        4: {"outcome": "in_flight", "row": 3, "epoch": 0, **none},
        5: {"outcome": "buffered", "row": 4, "epoch": 1, **none}}


def test_a_resume_voids_what_came_after_its_checkpoint_even_an_earlier_resume(tmp_path):
    path = tmp_path / "ledger.jsonl"
    resume = {"event": "resume", "step": 0}
    write_lines(path, [draw(0), draw(1), one("finish", 0), {"event": "save", "step": 0},                  # 1..4
                       many("batch", 0, 0), many("trained", 0, 0), {"event": "save", "step": 1},           # 5..7
                       draw(2), {**resume, "step": 1, "void_after": 7}, draw(1), draw(2),                  # 8..11
                       {**resume, "void_after": 4}, draw(1), one("finish", 1), many("batch", 0, 0, 1)])    # 12..15
    assert [record["seq"] for record in Ledger.surviving(path)] == [1, 2, 3, 4, 12, 13, 14, 15]
    assert {i: group["outcome"] for i, group in Ledger.outcomes(path).items()} == {0: "buffered", 1: "buffered"}
    write_lines(path, [draw(0), draw(1), {**resume, "void_after": 0}, draw(0)])
    assert {i: group["outcome"] for i, group in Ledger.outcomes(path).items()} == {0: "in_flight"}


START = [draw(0), draw(1), one("finish", 0), one("finish", 1), many("batch", 0, 0, 1)]


@pytest.mark.parametrize("records, message", [
    (START + [many("trained", 0, 0, 1), many("trained", 0, 0, 1)], r"record 7 \(trained\): group 0 is trained"),
    (START + [many("trained", 0, 0, 1), one("drop", 1, reason="lag")], r"record 7 \(drop\): group 1 is trained"),
    (START + [many("trained", 0, 0, 1), many("batch", 1, 1)], r"\(batch\): group 1 is trained"),
    (START + [many("trained", 1, 0, 1)], "group 0 is in the batch of step 0, not 1"),
    (START + [one("put_back", 0)], "group 0 is in_hand"),
    ([draw(0), one("drop", 0, reason="error"), draw(0)], "group 0 is dropped"),
    ([draw(0), one("drop", 0, reason="error"), one("drop", 0, reason="error")], "group 0 is dropped"),
    ([draw(0), draw(0)], "group 0 is in_flight"),
    ([draw(0), many("batch", 0, 0)], "group 0 is in_flight"),
    ([draw(0), one("finish", 0), many("trained", 0, 0)], "group 0 is finished"),
    ([draw(0), one("finish", 0), one("put_back", 0)], "group 0 is finished"),
    ([draw(0), one("put_back", 0), one("finish", 0)], "group 0 is unfinished"),
    ([draw(0), one("finish", 1)], "group 1 is not due"),
    ([draw(0), draw(2)], "group 2 is not due"),                                     # a prompt is skipped
    ([draw(0, row=3), draw(1, row=3)], "group 1 is not due"),                       # a row comes twice in an epoch
])
def test_outcomes_raise_on_what_no_correct_run_writes(tmp_path, records, message):
    path = tmp_path / "ledger.jsonl"
    write_lines(path, records)
    with pytest.raises(ValueError, match=message):
        Ledger.outcomes(path)


def test_the_same_row_in_the_next_epoch_is_no_repetition(tmp_path):
    write_lines(tmp_path / "ledger.jsonl", [draw(0, row=3, epoch=0), draw(1, row=3, epoch=1)])
    assert len(Ledger.outcomes(tmp_path / "ledger.jsonl")) == 2


@pytest.mark.parametrize("torn", [b'{"seq": 3, "ev', b'{', b'\x00\x00\x00', b'{"seq": 3, "event": "save", "step": 9}'])
def test_a_torn_last_line_stands_alone_and_numbers_go_on(tmp_path, torn):
    path = tmp_path / "ledger.jsonl"
    write_lines(path, [draw(0), draw(1)])
    with open(path, "ab") as file:
        file.write(torn)
    complete_line = torn.endswith(b"}")                        # only its newline was lost: the record counts
    ledger = Ledger(path)
    assert ledger.seq == (3 if complete_line else 2)
    ledger.resume(0, 2)
    ledger.write("draw", group=0, row=0, epoch=0)
    assert [record["event"] for record in Ledger.surviving(path)] == ["draw", "draw", "resume", "draw"]
    assert path.read_bytes().split(b"\n")[2] == torn
    assert Ledger.outcomes(path)[0]["outcome"] == "in_flight" and Ledger.outcomes(path)[1]["outcome"] == "buffered"


def test_two_torn_lines_in_a_row(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"seq": 1, "event": "save", "step": 0}\n{"seq": 2, "e\n{"seq"')
    ledger = Ledger(path)
    ledger.resume(0, 1)
    assert [record["seq"] for record in Ledger.read(path)] == [1, 2]


def test_a_lost_line_and_a_second_writer_are_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write_lines(path, [draw(0), draw(1), draw(2)])
    text = path.read_text().splitlines(keepends=True)
    path.write_text(text[0] + text[2])
    with pytest.raises(ValueError, match="record 3 stands where 2 is due"):
        Ledger(path)
    write_lines(path, [draw(0)])
    first, second = Ledger(path), Ledger(path)
    first.write("save", step=0)
    second.write("save", step=0)
    with pytest.raises(ValueError, match="record 2 stands where 3 is due"):
        Ledger.outcomes(path)


def test_a_resume_needs_the_ledger_of_the_run_that_saved(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(ValueError, match="ends at record 0, the checkpoint was saved at 12: copy the ledger"):
        ledger.resume(3, 12)


def test_conservation_at_every_event_of_random_schedules(tmp_path):
    names = {"unfinished": "buffered", "finished": "buffered", "in_hand": "buffered"}
    for seed in range(40):
        path = tmp_path / f"{seed}.jsonl"
        buffer = make_buffer(rows=7, seed=seed, path=path, partial_rollout=bool(seed % 2))
        schedule = Schedule(buffer, seed)
        for _ in range(60):
            schedule.event()
            place = {i: where if isinstance(where, tuple) else (where, None) for i, where in schedule.place.items()}
            found = Ledger.outcomes(path)
            assert found.keys() == place.keys()
            for group_id, (where, detail) in place.items():
                assert found[group_id]["outcome"] == names.get(where, where)
                assert found[group_id]["step" if where in ("trained", "in_hand") else "reason"] == detail
                assert found[group_id]["row"] == permutation(7, seed, group_id // 7)[group_id % 7]
            held = [*buffer.in_flight, *buffer.finished, *(group.group_id for _, group in buffer.unfinished),
                    *(group.group_id for batch in buffer.in_hand.values() for group in batch)]
            assert sorted(held) == sorted(i for i, (where, _) in place.items() if where not in ("trained", "dropped"))


# ---- kill and resume --------------------------------------------------------------------------------------
def one_step_off(buffer, steps, events, start):
    """train_async.py in small, yielding at every point where it may be killed; `events` gets what was trained.

    Five groups run, three make a batch, and what would be late is put back half done unless it was before.
    """
    running = [] if buffer.waiting(start) else buffer.draw(5)
    for step in range(start, steps):
        for group in running:
            if buffer.finished_count >= 3 and not group.keep:
                generate(group.samples[0], 2, step)
                buffer.put_back(group)
            else:
                complete(buffer, [group], step)
            yield "landed"
        batch = buffer.waiting(step) or buffer.take(step, 3)
        yield "save"
        running = buffer.draw(5 - buffer.finished_count) if step + 1 < steps else []
        yield "launched"
        events.append([step, [group.to_json() for group in batch]])
        buffer.trained(step)
        yield "trained"


@pytest.mark.parametrize("partial", [False, True])
def test_one_step_off_repeats_and_skips_nothing_wherever_it_is_killed(tmp_path, partial):      # symptom 7
    def run(path, stop_at=None, checkpoint=None):
        """-> (what was trained, the last checkpoint, how many points it passed)"""
        buffer = make_buffer(rows=8, path=path, partial_rollout=partial)
        start, events, state = json.loads(checkpoint) if checkpoint else (0, [], None)
        if checkpoint:
            buffer.load_state(state)
        buffer.ledger.resume(start, state["ledger_seq"] if checkpoint else 0)
        for count, place in enumerate(one_step_off(buffer, 7, events, start)):
            if place == "save":
                checkpoint = json.dumps([len(events), events, buffer.state()])
            if count == stop_at:
                break
        return events, checkpoint, count

    whole, _, length = run(tmp_path / "whole.jsonl")
    assert [step for step, _ in whole] == list(range(7)) and length > 40
    for stop_at in range(length):
        path = tmp_path / f"{stop_at}.jsonl"
        _, checkpoint, _ = run(path, stop_at)
        events, _, _ = run(path, None, checkpoint)
        assert events == whole                                 # the same groups in the same batches, to the last bit
        steps = Counter(group["step"] for group in Ledger.outcomes(path).values() if group["outcome"] == "trained")
        assert steps == {step: 3 for step in range(7)}


class Run:
    """A fully asynchronous run over two epochs with random events and saves, to be killed. Partial rollout is on or off
    at random: the flag may change at a resume."""

    def __init__(self, path, seed, checkpoint=None):
        self.buffer = make_buffer(rows=9, seed=3, path=path, num_epoch=2, partial_rollout=bool(seed % 2))
        self.rng, self.path = random.Random(seed), path
        self.step, self.trained, self.saves = 0, [], []        # saves: (bytes of the ledger, checkpoint)
        if checkpoint:
            state, self.step, self.trained = json.loads(checkpoint)
            self.buffer.load_state(state)
            self.buffer.ledger.resume(self.step, state["ledger_seq"])
        else:
            self.buffer.ledger.resume(0, 0)
        for step in list(self.buffer.in_hand):
            self.train(step)

    def train(self, step):
        self.trained += [[group.epoch, group.row] for group in self.buffer.waiting(step)]
        self.buffer.trained(step)
        self.step = step + 1

    def save(self):
        self.buffer.ledger.write("save", step=self.step)
        checkpoint = json.dumps([self.buffer.state(), self.step, self.trained])
        self.saves.append((os.path.getsize(self.path), checkpoint))

    def go(self, rounds):
        """Rounds of: draw; finish, put back or leave what flies; save, take, save, train. True when all is trained."""
        for _ in range(rounds):
            self.buffer.draw(self.rng.randint(1, 4))
            for group in list(self.buffer.in_flight.values()):
                fate = self.rng.choice(["finish", "put_back", "fly"])
                if fate == "finish":
                    complete(self.buffer, [group], self.step, self.rng.randint(1, 3))
                elif fate == "put_back":
                    generate(group.samples[0], 1, self.step)
                    self.buffer.put_back(group)
            if self.rng.random() < 0.3:
                self.save()
            over = self.buffer.exhausted and not self.buffer.unfinished and not self.buffer.in_flight
            if self.buffer.finished_count >= (1 if over else 3):
                self.buffer.take(self.step, min(3, self.buffer.finished_count))
                if self.rng.random() < 0.5:
                    self.save()
                self.train(self.step)
            if over and not self.buffer.finished_count:
                return True
        return False


def check_exactly_once(path, trained):
    every = Counter((epoch, row) for epoch in range(2) for row in range(9))
    assert Counter(map(tuple, trained)) == every
    outcomes = Ledger.outcomes(path).values()
    assert {group["outcome"] for group in outcomes} == {"trained"}
    assert Counter((group["epoch"], group["row"]) for group in outcomes) == every


@pytest.mark.contract
def test_every_row_is_trained_once_per_epoch_through_three_kills_at_any_byte(tmp_path):
    torn = 0
    for seed in range(40):
        path, checkpoint = tmp_path / f"{seed}.0.jsonl", None
        rng = random.Random(seed)
        for life in range(3):
            run = Run(path, seed * 10 + life, checkpoint)
            start = os.path.getsize(path)
            run.go(rng.randint(1, 6))
            cut = rng.randint(start, os.path.getsize(path))    # what the kill left of the file
            checkpoint = next((saved for size, saved in reversed(run.saves) if size <= cut), checkpoint)
            path = tmp_path / f"{seed}.{life + 1}.jsonl"
            path.write_bytes(run.path.read_bytes()[:cut])
            torn += cut > 0 and path.read_bytes()[-1:] != b"\n"
        run = Run(path, seed, checkpoint)
        assert run.go(10 ** 4)
        check_exactly_once(path, run.trained)
    assert torn > 40                                           # most kills tore a line


def test_every_row_is_trained_once_per_epoch_after_a_kill_at_each_record(tmp_path):
    whole = Run(tmp_path / "whole.jsonl", 5)
    assert whole.go(10 ** 4)
    check_exactly_once(whole.path, whole.trained)
    data = whole.path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    assert len(ends) > 60
    for end in ends:
        path = tmp_path / f"{end}.jsonl"
        path.write_bytes(data[:end])
        checkpoint = next((saved for size, saved in reversed(whole.saves) if size <= end), None)
        run = Run(path, end, checkpoint)
        assert run.go(10 ** 4)
        check_exactly_once(path, run.trained)


CHILD = """
import json, os, random, signal, sys
from buffer import Buffer, Ledger
folder, lives, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rows = [{"prompt": str(i), "prompt_tokens": [i], "label": "", "metadata": {}} for i in range(9)]
ledger = Ledger(folder + "/ledger.jsonl")
buffer = Buffer(rows, 1, 3, ledger, num_epoch=2)
step = 0
if os.path.exists(folder + "/state.json"):
    step, state = json.load(open(folder + "/state.json"))
    buffer.load_state(state)
    ledger.resume(step, state["ledger_seq"])
else:
    ledger.resume(0, 0)
write, last = ledger.write, ledger.seq + lives
def write_and_die(event, **fields):
    write(event, **fields)
    if ledger.seq >= last:
        os.kill(os.getpid(), signal.SIGKILL)
ledger.write = write_and_die
while step < 6:
    if not buffer.waiting(step):
        for group in buffer.draw(3 - buffer.finished_count):
            group.samples[0].append([1], [-0.5], step)
            group.samples[0].status, group.samples[0].reward = "completed", 1.0
            buffer.finish(group)
        buffer.take(step, 3)
    ledger.write("save", step=step)
    with open(folder + "/new.json", "w") as file:
        json.dump([step, buffer.state()], file)
    os.replace(folder + "/new.json", folder + "/state.json")
    buffer.trained(step)
    step += 1
"""


def test_processes_that_really_die_of_kill_9_lose_nothing(tmp_path):
    rng, codes = random.Random(1), []
    while 0 not in codes:
        assert len(codes) < 30, "no progress between the kills"
        child = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), str(rng.randint(8, 16)), "1"], timeout=60,
                               env={**os.environ, "PYTHONPATH": PROJECT})
        codes.append(child.returncode)
    assert codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1) and len(codes) > 4
    outcomes = Ledger.outcomes(tmp_path / "ledger.jsonl").values()
    assert Counter((group["outcome"], group["epoch"], group["row"]) for group in outcomes) == Counter(
        ("trained", epoch, row) for epoch in range(2) for row in range(9))
    assert Counter(group["step"] for group in outcomes) == {step: 3 for step in range(6)}
