"""A batch as columns, numbers and a file; and what a run says of its speed. By hand-computed numbers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from batch import batch_metrics, load_groups, make_batch, makespan, plain_column, save_groups
from buffer import Group, Sample
from tracking import speed

ARGS = SimpleNamespace(fully_async=False, mask_offpolicy_in_partial_rollout=False, num_engines=1, sglang_server_concurrency=2,
                       global_batch_size=2, data_parallel_size=1)


def make_group(group_id, runs, rewards=(1.0, 0.0), text="3+4="):
    """Two samples; the runs of the first are given, the second has one token of version 5."""
    samples = [Sample(group_id, i, 7, text, "7", [11, 12], {"level": [1, {"a": None}]}) for i in range(2)]
    for version, count in runs:
        samples[0].append(range(20, 20 + count), [float(np.float32(-0.1 * (i + 1))) for i in range(count)], version)
    samples[1].append([9], [-0.5], 5, mask=0)
    for sample, reward, seconds in zip(samples, rewards, (3.0, 1.0)):
        sample.status, sample.reward, sample.response, sample.seconds = "completed", reward, "7\u2028é", seconds
    return Group(group_id, 7, 2, samples)


def test_a_file_gives_back_what_was_written(tmp_path):
    groups = [make_group(3, [(4, 2), (5, 1)]), make_group(4, [])]
    path = str(tmp_path / "new" / "step.npz")
    save_groups(path, groups)
    again = load_groups(path)
    assert [group.to_json() for group in again] == [group.to_json() for group in groups]
    assert again[0].samples[0].rollout_logprobs == [float(np.float32(x)) for x in (-0.1, -0.2, -0.1)]
    with pytest.raises(ValueError, match="--replay: there is no .*missing.npz"):
        load_groups(str(tmp_path / "missing.npz"), "--replay")


def test_columns_and_lags_by_hand():
    """Step 5: 2 tokens of lag 1, then 1 + 1 of lag 0 in the first group, 1 of lag 0 in the second."""
    groups = [make_group(3, [(4, 2), (5, 1)]), make_group(4, [(5, 1)], rewards=(1.0, 1.0))]
    columns = make_batch(ARGS, 5, groups)
    assert columns["group_ids"] == [3, 3, 4, 4] and columns["response_lengths"] == [3, 1, 1, 1]
    assert columns["tokens"][0].tolist() == [11, 12, 20, 21, 20] and columns["loss_mask"][1].tolist() == [0]
    metrics = batch_metrics(ARGS, 5, groups)
    assert metrics["staleness/histogram"] == {"0": 4, "1": 2} and metrics["staleness/max"] == 1
    assert metrics["staleness/mean"] == pytest.approx(2 / 6) == metrics["staleness/off_policy_token_frac"]
    assert metrics["rollout/reward"] == 0.75 and metrics["rollout/zero_spread"] == 0.5
    assert metrics["perf/lone_generate_time"] == 4.0         # two slots, first come first served: 3 | 1 + 3, then + 1 on the first


@pytest.mark.parametrize("seconds, slots, want", [([1, 10, 1, 1], 4, 10), ([1, 10, 1, 1], 1, 13), ([4, 3, 2, 1], 2, 5),
                                                  ([1, 1, 1, 9], 3, 10)])
def test_makespan_by_hand(seconds, slots, want):
    assert makespan(seconds, slots) == want


def test_the_speed_report_by_hand():
    """Generation 10 s, training 4, sync 1, rest 0.5: a synchronous step takes 15.5. This run waits 6 s and syncs every second
    step: 6 + 0.5 + 4 + 0.5 = 11. The first row warms up and is not counted. Both would wait for an evaluation at the sync."""
    row = {"perf/step_time": 10.5, "perf/wait_prev_gen": 6.0, "perf/train_time": 4.0, "perf/log_probs_time": 1.0,
           "perf/lone_generate_time": 10.0}
    synced = {**row, "perf/step_time": 11.5, "sync/time": 1.2, "sync/pause_time": 0.2, "perf/wait_prev_gen": 5.8}
    rows = [{**row, "perf/step_time": 99.0}, row, synced]
    args = SimpleNamespace(rollout_num_gpus=1, world_size=3, policy_old="rollout")
    got = speed(args, rows)
    assert got["async"] == 11.0 and got["sync"] == pytest.approx(15.5)
    assert got["hidden generation"] == pytest.approx(4.0) and got["fewer syncs"] == pytest.approx(0.5)
    assert got["sync"] - got["async"] == pytest.approx(got["hidden generation"] + got["fewer syncs"])
    seconds = {"perf/step_time": 14.5, "sync/time": 4.2, "sync/pause_time": 3.2, "sync/eval_wait_time": 3.0}       # 3 s more
    late = speed(args, [*rows[:2], {**synced, **seconds}])
    assert late["async"] == 12.5 and late["sync"] == pytest.approx(17.0)
    assert late["hidden generation"] == pytest.approx(4.0) and late["fewer syncs"] == pytest.approx(0.5)
    assert got["no log-prob pass"] == pytest.approx(1.0)     # a third of the update's 3 s
    assert got["fewer training GPUs"] == pytest.approx(-1.0)    # 4 s on 3 of 4 GPUs would be 3 on all
    assert speed(SimpleNamespace(rollout_num_gpus=1, world_size=3, policy_old="recompute"), rows)["no log-prob pass"] == 0.0


def test_own_columns_reach_the_batch_as_plain_numbers():
    group = make_group(3, [(4, 2)])
    for sample, level, tool in zip(group.samples, (np.float32(0.5), 2), (np.array([1, 0]), [True])):
        sample.columns = {"level": level, "tool": tool}
        sample.columns = {name: plain_column(sample, name) for name in sample.columns}
    assert make_batch(ARGS, 5, [group])["columns"] == {"level": [0.5, 2.0], "tool": [[1.0, 0.0], [1.0]]}
    json.dumps(group.to_json())                              # a checkpoint holds them
    del group.samples[1].columns["tool"]
    with pytest.raises(ValueError, match="sample 1 of group 3 has no column 'tool', other samples of the batch have"):
        make_batch(ARGS, 5, [group])
    for wrong in ([1, 2, 3], "high", None, [[1], [2]]):
        group.samples[0].columns["tool"] = wrong
        with pytest.raises(ValueError, match="sample 0 of group 3: column 'tool' must be a number, or one for each of the 2"):
            plain_column(group.samples[0], "tool")
    group.samples[0].reset()
    assert group.samples[0].columns == {}


def test_several_samples_of_an_attempt_by_hand():
    """Two groups, the first with a second sample of its attempt 0; two optimizer steps of two attempts on two ranks. Three
    samples do not divide by two: the shortest is there twice, once without loss and in a group of its own."""
    groups = [make_group(3, [(5, 2)]), make_group(4, [(5, 1)])]
    part = Sample(3, 0, 7, "help", "7", [1], part=1, reward=1.0)
    part.append([30, 31], [-0.5, -0.25], 4)
    part.status = "completed"
    groups[0].samples.append(part)
    batch = make_batch(SimpleNamespace(**{**vars(ARGS), "data_parallel_size": 2}), 5, groups)
    assert [row.tolist() for row in batch["tokens"]] == [[11, 12, 20, 21], [1, 30, 31], [11, 12, 9], [1, 30, 31],
                                                         [11, 12, 20], [11, 12, 9]]
    assert batch["update_sizes"] == [4, 2] and batch["shares"] == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert batch["file_order"] == [0, 2, 1, 4, 5]            # in the file the further sample is behind both attempts
    assert batch["group_ids"] == [3, 3, 3, -4, 4, 4] and batch["rewards"] == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert [mask.tolist() for mask in batch["loss_mask"]] == [[1, 1], [1, 1], [0], [0, 0], [1], [0]]
    metrics = batch_metrics(ARGS, 5, groups)
    assert metrics["rollout/reward"] == 0.5 and metrics["staleness/histogram"] == {"0": 5, "1": 2}


def test_conversations_in_the_metrics():
    groups = [make_group(3, [(5, 1)]), make_group(4, [(5, 1)])]
    assert not any("turns" in name for name in batch_metrics(ARGS, 5, groups))
    tool = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "1"}]
    samples = [s for g in groups for s in g.samples]
    for sample, turns, mismatch in zip(samples, (1, 2, 3, 0), ("", "text: here", "tokens", "text: there")):
        sample.messages, sample.mismatch = tool * turns, mismatch
    metrics = batch_metrics(ARGS, 5, groups)
    assert (metrics["rollout/turns"], metrics["rollout/template_mismatch"], metrics["rollout/retokenized"]) == (3.0, 1 / 3, 1 / 3)
