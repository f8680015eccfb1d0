"""The rollout manager against engines that misbehave on order. It runs in this process: no Ray is needed."""

import asyncio
import sys
import time

import numpy as np
import pytest
import requests

import harness
import scripted_engine
from args import parse_args
from buffer import Ledger
from engine import NoEngineLeft
from rollout import RolloutManager


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def servers():
    engines = scripted_engine.start(2, vocab_size=250)
    yield [url for _, url in engines]
    scripted_engine.stop(engines)


@pytest.fixture
def make(model, servers, tmp_path):
    """make(orders, engines=1, **flags) -> a manager connected to engines that obey `orders` (see scripted_engine.py)."""
    def make(orders, engines=1, **flags):
        for url in servers:
            requests.post(f"{url}/script", json={"reset": True, "lengths": "5", "unit_seconds": 0.0, "slots": 1 << 30, "budget": None,
                                                 **orders}, timeout=10)
        flags = {"max_sample_retries": 2, "generate_timeout": 5, **flags}
        args = parse_args(harness.flags(model, tmp_path, f"run{len(list(tmp_path.iterdir()))}", servers[:engines], **flags))
        manager = RolloutManager(args)
        manager.connect(servers[:engines])
        asyncio.run(manager.publish(0, [], []))
        return manager
    return make


def run(coroutine, manager):
    async def both():
        try:
            return await coroutine
        finally:
            if manager.session:
                await manager.session.close()
                manager.session = None
    return asyncio.run(both())


def counter(url):
    return requests.get(f"{url}/script", timeout=10).json()


def drops(manager):
    return [r["reason"] for r in Ledger.read(manager.buffer.ledger.path) if r["event"] == "drop"]


# ---- scheduling -------------------------------------------------------------------------------------------
def test_batch_is_ordered_and_complete(make):
    manager = make({})
    groups, counts = run(manager.next_groups(0), manager)
    assert [g.group_id for g in groups] == [0, 1, 2, 3] and counts["rollout/drawn"] == 4
    for sample in (s for g in groups for s in g.samples):
        assert len(sample.response_tokens) == 5 and sample.version_runs == [[0, 5]] and sample.status == "completed"


def test_concurrency_is_bounded_and_refilled_at_every_completion(make, servers):
    """16 requests, 4 at a time, of which one in four takes 8 units and the others 1: waves would wait for the longest of
    each four; refilling needs about total work / 4."""
    manager = make({"lengths": "3:1,1:8", "unit_seconds": 0.1}, rollout_batch_size=8, sglang_server_concurrency=4,
                   rollout_max_response_len=8)
    before = time.time()
    groups, _ = run(manager.next_groups(0), manager)
    seconds = time.time() - before
    assert counter(servers[0])["peak_in_flight"] <= 4 or counter(servers[0])["queued"] == 0
    work = sum(len(s.response_tokens) for g in groups for s in g.samples) * 0.1
    assert seconds < work / 4 + 2 * 0.8 + 1.0        # the last long ones may run alone, plus overhead


def test_a_group_goes_to_one_engine_and_groups_to_the_least_loaded(make, servers):
    manager = make({"unit_seconds": 0.05}, engines=2, rollout_batch_size=4, n_samples_per_prompt=2)
    before = [counter(url)["requests"] for url in servers]
    seen = {}
    ask = manager.ask

    async def spy(work, sample, payload):
        seen.setdefault(sample.group_id, set()).add(work.lane.url)
        return await ask(work, sample, payload)

    manager.ask = spy
    run(manager.next_groups(0), manager)
    assert all(len(urls) == 1 for urls in seen.values())
    assert [counter(url)["requests"] - b for url, b in zip(servers, before)] == [4, 4]


def test_surplus_is_kept_and_used_first(make):
    """Eight kept submitted, four wanted: groups that finished beside them wait in the buffer, scored, for the next batch."""
    manager = make({}, over_sampling_batch_size=8)
    first, _ = run(manager.next_groups(0), manager)
    surplus = sorted(manager.buffer.finished)
    assert surplus, "equal lengths: several groups finish together"
    manager.buffer.trained(0)
    second, _ = run(manager.next_groups(1), manager)
    assert [g.group_id for g in second][:len(surplus)] == surplus[:4]


def test_control_calls_are_answered_while_requests_are_open(make):
    manager = make({"lengths": "4", "unit_seconds": 0.5}, rollout_batch_size=64, n_samples_per_prompt=4)

    async def control():
        generation = asyncio.create_task(manager.next_groups(0))
        await asyncio.sleep(0.5)
        before = time.time()
        await manager.fleet.check(manager.fleet.lanes[0], "")
        seconds = time.time() - before
        await generation
        return seconds

    assert run(control(), manager) < 1.0


# ---- faults -----------------------------------------------------------------------------------------------
@pytest.mark.drill
def test_a_4xx_is_never_retried_and_never_a_reward_of_0(make, servers):
    before = counter(servers[0])["refused"]
    manager = make({"refuse": 1, "status": 400})
    groups, counts = run(manager.next_groups(0), manager)
    assert counter(servers[0])["refused"] - before == 1
    assert counts["rollout/dropped_error"] == 1 and len(groups) == 4
    assert "answered /generate with 400" in drops(manager)[0]


@pytest.mark.drill
def test_a_5xx_is_retried_and_the_sample_is_whole(make, servers):
    manager = make({"refuse": 1, "status": 500})
    groups, counts = run(manager.next_groups(0), manager)
    assert "rollout/dropped_error" not in counts and drops(manager) == []
    assert all(len(s.response_tokens) == 5 for g in groups for s in g.samples)


@pytest.mark.drill
def test_a_busy_engine_is_asked_again_when_it_says_so(make, servers):
    """429 and 503 are no failures: more of them than --max-sample-retries lose nothing, and Retry-After is kept to."""
    for status in (429, 503):
        manager = make({"refuse": 24, "status": status, "retry_after": 0.4}, generate_timeout=20)
        before, refused = time.time(), counter(servers[0])["refused"]
        groups, counts = run(manager.next_groups(0), manager)
        assert 1.2 <= time.time() - before < 10 and counter(servers[0])["refused"] - refused == 24      # 8 samples, 3 times each
        assert drops(manager) == [] and all(len(s.response_tokens) == 5 for g in groups for s in g.samples)


@pytest.mark.drill
def test_an_engine_that_is_busy_for_ever_drops_the_group_after_the_time_limit(make):
    manager = make({"refuse": 10 ** 6, "status": 429, "retry_after": 0.2}, generate_timeout=1, max_filter_rounds=0.5)
    before = time.time()
    with pytest.raises(RuntimeError, match="only 0 of 4 accepted"):
        run(manager.next_groups(0), manager)
    assert time.time() - before < 10
    assert "is busy (429 or 503) for --generate-timeout 1 s" in drops(manager)[0]


@pytest.mark.drill
def test_an_engine_that_talks_nonsense_is_lost_and_another_one_gets_its_samples(make, servers):
    """16 wrong answers in a row, and no good one between. --max-sample-retries 5: eight samples at most come to it."""
    manager = make({}, engines=2, max_sample_retries=5, rollout_batch_size=8, max_engine_restarts=0)
    requests.post(f"{servers[1]}/script", json={"answers": "nan_logprobs"}, timeout=10)
    groups, _ = run(manager.next_groups(0), manager)
    assert len(groups) == 8 and drops(manager) == []
    assert [lane.state for lane in manager.fleet.lanes] == ["up", "gone"]
    assert "answered wrongly 16 times in a row" in manager.fleet.lanes[1].why


@pytest.mark.drill
def test_a_lost_engine_frees_its_requests_at_once_and_they_keep_their_tokens(make, servers):
    """Samples with tokens of an earlier turn, whose engine hangs: they go on at the other one, from these tokens."""
    calls.clear()
    manager = make({"lengths": "5", "unit_seconds": 0.02}, engines=2, custom_generate_function_path="test_rollout.two_turns",
                   rollout_max_response_len=20, generate_timeout=60)
    lane = manager.fleet.lanes[1]

    async def hang_in_the_second_turn():
        generation = asyncio.create_task(manager.next_groups(0))
        while not calls:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(requests.post, f"{servers[1]}/script", json={"hang": 100}, timeout=10)
        await asyncio.sleep(0.3)
        lost = time.time()
        manager.fleet.lose(lane, "engine: hangs")
        groups, _ = await generation
        return groups, time.time() - lost

    groups, seconds = run(hang_in_the_second_turn(), manager)
    assert seconds < 3 and len(calls) == len(set(calls)) == 8 and drops(manager) == []
    assert all(s.loss_mask == [1] * 5 + [0] * 3 + [1] * 5 for g in groups for s in g.samples)


@pytest.mark.drill
def test_control_calls_are_answered_within_a_second_beside_thousands_of_requests(make, servers):
    manager = make({"lengths": "4", "unit_seconds": 2.0}, rollout_batch_size=500, n_samples_per_prompt=4,
                   sglang_server_concurrency=4000, generate_timeout=60, max_filter_rounds=100)

    async def control():
        generation = asyncio.create_task(manager.next_groups(0))
        while counter(servers[0])["in_flight"] < 2000:
            await asyncio.sleep(0.2)
        seconds = []
        for verb in ("health", "info", "checksums"):
            before = time.time()
            await manager.fleet.call(manager.fleet.lanes[0], verb)
            seconds.append(time.time() - before)
        before = time.time()
        await manager.say_abort(manager.fleet.lanes[0], "nobody")
        seconds.append(time.time() - before)
        generation.cancel()
        await asyncio.gather(generation, return_exceptions=True)
        return seconds

    assert max(run(control(), manager)) < 1.0


@pytest.mark.drill
def test_a_request_that_fails_for_ever_drops_its_group_and_then_ends_the_run(make):
    manager = make({"refuse": 10 ** 6, "status": 502}, max_filter_rounds=2)
    with pytest.raises(RuntimeError, match=r"groups drawn .* only 0 of 4 accepted: .*dropped_error"):
        run(manager.next_groups(0), manager)
    assert all("sample" in reason and "502" in reason for reason in drops(manager))


@pytest.mark.drill
def test_a_hanging_request_is_tried_again(make):
    manager = make({"hang": 1, "seconds": 60}, generate_timeout=1)
    before = time.time()
    groups, _ = run(manager.next_groups(0), manager)
    assert len(groups) == 4 and time.time() - before < 10


@pytest.mark.drill
def test_a_dead_engine_ends_the_run_with_its_name(make, model, tmp_path):
    process, url = engine = scripted_engine.start(1, vocab_size=250)[0]
    manager = make({})
    manager.connect([url])
    asyncio.run(manager.publish(0, [], []))
    process.kill()
    process.wait(10)
    before = time.time()
    with pytest.raises(NoEngineLeft, match=f"no engine left: engine {url}: health: .* Connection refused"):
        run(manager.next_groups(0), manager)
    assert time.time() - before < 15


@pytest.mark.drill
@pytest.mark.parametrize("kind, text", [("missing_logprobs", "log-probs"), ("null_logprobs", "log-prob"), ("nan_logprobs", "log-prob"),
                                        ("short_logprobs", "log-probs"), ("too_long", "10 tokens where 6 were asked for"),
                                        ("foreign_ids", "beyond the vocabulary")])
def test_a_malformed_answer_is_refused_at_ingest_and_names_the_sample(kind, text, make):
    manager = make({"answers": kind, "count": 2}, max_sample_retries=1)
    groups, counts = run(manager.next_groups(0), manager)
    assert counts["rollout/dropped_error"] >= 1 and len(groups) == 4
    assert all(reason.startswith("error: sample") and text in reason for reason in drops(manager))


@pytest.mark.drill
def test_an_engine_that_stays_a_version_behind_is_named(make, servers):
    manager = make({"answers": "old_version"})
    with pytest.raises(NoEngineLeft, match=f"{servers[0]} generated with version .* but 1 was published"):
        asyncio.run(manager.publish(1, [], []))
        run(manager.next_groups(0), manager)


def test_engines_that_keep_their_experts_to_themselves_are_named_once(make, servers, capsys):
    """Of a mixture of experts, which the model of the servers here is not. They are asked for one sample of a group."""
    manager = make({})
    run(manager.next_groups(0), manager)
    assert "experts" not in capsys.readouterr().out        # nor are they asked
    manager = make({})
    manager.args.routed_experts = True
    groups, _ = run(manager.next_groups(0), manager)
    warning, = [line for line in capsys.readouterr().out.splitlines() if "experts" in line]
    assert warning.startswith(f"warning: engine {servers[0]} ") and "--enable-return-routed-experts" in warning
    assert len(groups) == 4 and not any(sample.experts for group in groups for sample in group.samples)


def test_too_long_a_prompt_is_dropped_and_counted(make):
    manager = make({}, rollout_max_prompt_len=5)     # 'a+b=' with one digit each is 4 tokens, with two each 6
    groups, counts = run(manager.next_groups(0), manager)
    assert all(len(g.samples[0].prompt_tokens) <= 5 for g in groups)
    reason = "prompt_too_long: 6 tokens, --rollout-max-prompt-len 5"
    assert counts["rollout/dropped_prompt_too_long"] == drops(manager).count(reason) > 0


# ---- rewards and filters ----------------------------------------------------------------------------------
async def slow_async_reward(args, sample):
    await asyncio.sleep(0.3)
    return float(sample.index)


def group_reward(args, samples):
    return [10.0 + sample.index for sample in samples]


calls = []


def hanging_reward(args, sample):
    calls.append(sample.name)
    time.sleep(3 if sample.group_id == 0 and sample.index == 0 else 0)
    return 1.0


def keep_odd(args, samples):
    return True if samples[0].group_id % 2 else "even"


def keep_numpy(args, samples):
    return np.bool_(samples[0].group_id % 2)


def short_reward(args, sample):
    time.sleep(0.05)
    return 1.0


def refused_reward(args, sample):
    calls.append(sample.name)
    raise ConnectionRefusedError("the checker is away")


async def two_turns(args, sample, agent):
    """A turn, three tool tokens, a turn; called again after an abort it goes on where the tokens say it was."""
    if 0 not in sample.loss_mask:
        await agent.generate(sample)
        calls.append(sample.name)
        sample.append([7, 8, 9], [0.0] * 3, sample.version_runs[-1][0], mask=0)
    await agent.generate(sample)


async def endless(args, sample, agent):
    await asyncio.sleep(60 if sample.group_id == 0 else 0)
    await agent.generate(sample)


def test_async_rewards_run_in_parallel(make):
    manager = make({}, custom_rm_path="test_rollout.slow_async_reward", rollout_batch_size=16)
    before = time.time()
    groups, _ = run(manager.next_groups(0), manager)
    assert [[s.reward for s in g.samples] for g in groups] == [[0.0, 1.0]] * 16
    assert time.time() - before < 32 * 0.3 / 3


def test_group_rewards(make):
    manager = make({}, custom_rm_path="test_rollout.group_reward", group_rm=True)
    groups, _ = run(manager.next_groups(0), manager)
    assert [s.reward for g in groups for s in g.samples] == [10.0, 11.0] * 4


@pytest.mark.drill
def test_a_hanging_reward_is_tried_again_then_drops_the_group(make):
    calls.clear()
    manager = make({}, custom_rm_path="test_rollout.hanging_reward", reward_timeout=0.5)
    groups, _ = run(manager.next_groups(0), manager)
    assert [g.group_id for g in groups] == [1, 2, 3, 4]
    assert calls.count("sample 0 of group 0") == 2           # --max-sample-retries 2
    assert drops(manager) == ["error: the reward took longer than --reward-timeout 0.5 s, 2 times"]


def test_rewards_that_wait_for_a_thread_do_not_time_out(make):
    """1,000 rewards of 50 ms on 64 threads take 0.8 s in all; each alone stays far below the limit of 0.4 s."""
    manager = make({}, custom_rm_path="test_rollout.short_reward", reward_timeout=0.4, rollout_batch_size=125, n_samples_per_prompt=8)
    run(manager.next_groups(0), manager)
    assert drops(manager) == []


@pytest.mark.drill
def test_a_reward_service_that_is_away_is_asked_again_then_drops_the_group(make):
    calls.clear()
    manager = make({}, custom_rm_path="test_rollout.refused_reward", max_filter_rounds=1, n_samples_per_prompt=1)
    with pytest.raises(RuntimeError, match="only 0 of 4 accepted"):
        run(manager.next_groups(0), manager)
    assert drops(manager)[0] == "error: the reward failed: ConnectionRefusedError: the checker is away, 2 times"
    assert calls.count("sample 0 of group 0") == 2


def exiting_reward(args, sample):
    sys.exit(3)


async def exiting_async_reward(args, sample):
    sys.exit(4)


def nan_reward(args, sample):
    return float("nan")


def none_reward(args, sample):
    return None


@pytest.mark.drill
@pytest.mark.parametrize("name, error, text", [
    ("exiting_reward", RuntimeError, r"exiting_reward called exit\(3\)"),
    ("exiting_async_reward", RuntimeError, r"exiting_async_reward called exit\(4\)"),
    ("nan_reward", ValueError, r"test_rollout.nan_reward returned nan for sample \d of group \d: a reward must be a finite number"),
    ("none_reward", ValueError, "test_rollout.none_reward returned None"),
])
def test_a_faulty_reward_ends_the_run_and_is_named(name, error, text, make):
    manager = make({}, custom_rm_path=f"test_rollout.{name}")
    with pytest.raises(error, match=text):
        run(manager.next_groups(0), manager)


def test_a_group_reward_without_a_list_is_named(make):
    manager = make({}, custom_rm_path="test_rollout.none_reward", group_rm=True)
    with pytest.raises(ValueError, match="--group-rm: test_rollout.none_reward returned None for 2 samples: it must be a list"):
        run(manager.next_groups(0), manager)


def test_an_empty_prompt_is_dropped_and_counted(make, model, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "", "label": "1"}\n' + '{"prompt": "1+1=", "label": "2"}\n' * 7)
    manager = make({}, prompt_data=str(tmp_path / "data.jsonl"), rollout_shuffle=None)
    manager.buffer.shuffle = False
    groups, counts = run(manager.next_groups(0), manager)
    assert [g.group_id for g in groups] == [1, 2, 3, 4] and drops(manager) == ["prompt_empty"]


# ---- turns ------------------------------------------------------------------------------------------------
def test_an_own_generate_function_takes_turns_with_a_tool(make):
    calls.clear()
    manager = make({}, custom_generate_function_path="test_rollout.two_turns", rollout_max_response_len=20)
    groups, _ = run(manager.next_groups(0), manager)
    for sample in (s for g in groups for s in g.samples):
        assert sample.loss_mask == [1] * 5 + [0] * 3 + [1] * 5 and sample.response_tokens[5:8] == [7, 8, 9]
        assert sample.rollout_logprobs[5:8] == [0.0] * 3 and sample.version_runs == [[0, 13]] and sample.status == "completed"
    assert len(calls) == 8


def test_a_partial_rollout_never_runs_a_tool_twice(make):
    """Aborted in either turn and continued, each sample has one tool call and the tokens of an uninterrupted one."""
    calls.clear()
    flags = dict(custom_generate_function_path="test_rollout.two_turns", rollout_max_response_len=40, partial_rollout=True,
                 over_sampling_batch_size=12, n_samples_per_prompt=1)
    manager = make({"lengths": "1:2,1:12", "unit_seconds": 0.05, "budget": 40}, **flags)
    trained = []
    for step in range(6):
        groups, _ = run(manager.next_groups(step), manager)
        manager.buffer.trained(step)
        trained += [s for g in groups for s in g.samples]
    put_back = [r for r in Ledger.read(manager.buffer.ledger.path) if r["event"] == "put_back"]
    assert any(r["tokens"] for r in put_back), "nothing was interrupted: the test shows nothing"
    assert len(calls) == len(set(calls)), "a tool ran twice"
    for sample in trained:
        assert sample.loss_mask.count(0) == 3 and len(sample.loss_mask) == len(sample.response_tokens)


@pytest.mark.drill
def test_an_own_generate_function_that_hangs_is_bounded(make):
    manager = make({}, custom_generate_function_path="test_rollout.endless", generate_timeout=1)
    groups, counts = run(manager.next_groups(0), manager)
    assert [g.group_id for g in groups] == [1, 2, 3, 4] and counts["rollout/dropped_error"] == 1
    assert "--custom-generate-function-path took longer than --generate-timeout 1 s" in drops(manager)[0]


def test_an_answer_that_ended_as_it_was_aborted_is_complete(make):
    """SGLang says abort when the abort and the stop token come in the same step: to go on would train on text behind the end."""
    manager = make({}, n_samples_per_prompt=1)
    eos = manager.tokenizer.eos_token_id

    async def answer(work, sample, payload):
        sample.append([5, eos], [-1.0, -1.0], 0)
        return {"output_ids": [5, eos], "meta_info": {"finish_reason": {"type": "abort"}}}

    manager.ask = answer
    groups, _ = run(manager.next_groups(0), manager)
    assert all(s.status == "completed" and s.response_tokens == [5, eos] for g in groups for s in g.samples)


# ---- filters and evaluation -------------------------------------------------------------------------------
def test_a_filter_may_answer_with_numpy_truths(make):
    manager = make({}, dynamic_sampling_filter_path="test_rollout.keep_numpy")
    groups, _ = run(manager.next_groups(0), manager)
    assert [g.group_id for g in groups] == [1, 3, 5, 7] and set(drops(manager)) == {"filter: rejected"}


def test_own_filter_and_its_reason(make):
    manager = make({}, dynamic_sampling_filter_path="test_rollout.keep_odd")
    groups, counts = run(manager.next_groups(0), manager)
    assert [g.group_id for g in groups] == [1, 3, 5, 7]
    assert drops(manager) == ["filter: even"] * counts["rollout/dropped_filter"]


def always_right(args, sample):
    return 1.0


def test_the_dynamic_filter_sees_the_reward_without_the_overlong_penalty(make):
    """Answers of different lengths, all right: the penalty would spread their rewards, and there is nothing to learn."""
    manager = make({"lengths": "25:3,25:4,25:5,25:6"}, custom_rm_path="test_rollout.always_right", dynamic_sampling_filter=True,
                   overlong_buffer_len=6, max_filter_rounds=2)
    with pytest.raises(RuntimeError, match=r"only 0 of 4 accepted: \d+ were all right, 0 all wrong"):
        run(manager.next_groups(0), manager)


def test_evaluation_is_a_mean_over_all_rows(make, model):
    import os
    manager = make({}, custom_rm_path="test_rollout.group_reward", group_rm=True, n_samples_per_eval_prompt=3,
                   eval_prompt_data=["sums", os.path.join(model, "eval.jsonl")], eval_interval=1)
    results = run(manager.evaluate(), manager)
    assert 0 < results.pop("seconds") < 5 and time.time() - 5 < results.pop("started") < time.time()
    assert results == {
        "version": 0, "sums/reward": 11.0, "sums/response_len": 5.0, "sums/truncated": 0.0, "sums/pass@1": 1.0, "sums/pass@2": 1.0}
