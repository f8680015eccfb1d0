"""Evaluation: pass@k by counting subsets, several sets with sampling of their own, and whole sets of one version beside an
asynchronous run."""

import asyncio
import itertools
import json
import os
import time

import pytest
import requests

import engines
import harness
import light
from args import parse_args
from buffer import Sample
from engine import NoEngineLeft
from evaluation import pass_at_k, summary
from rollout import RolloutManager


# ---- pass@k -----------------------------------------------------------------------------------------------
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    """For every n up to 7: of all choices of k answers out of n, the share in which one of the c right ones is."""
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations(range(n), k))
            share = sum(min(subset) < c for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12), (n, c, k)


@pytest.mark.parametrize("n, c, k, want", [(5, 2, 2, 0.7), (4, 1, 2, 0.5), (10, 3, 5, 1 - 21 / 252), (8, 0, 8, 0.0),
                                           (8, 8, 1, 1.0), (200, 1, 100, 0.5), (1000, 10, 1, 0.01)])
def test_pass_at_k_by_hand(n, c, k, want):
    assert pass_at_k(n, c, k) == pytest.approx(want)


def answer(reward, length=2, status="completed"):
    return Sample(0, 0, 0, "", "", [], reward=reward, response_tokens=[5] * length, status=status)


def test_a_sets_means_by_hand():
    """Two prompts with four samples: 1 and 3 right. pass@1 = (1/4 + 3/4) / 2; pass@2 = (1 - 3/6 + 1) / 2; pass@4 = 1. Half a
    reward is not a pass."""
    rows = [[answer(1.0), answer(0.0), answer(0.5, 6, "truncated"), answer(0.0)],
            [answer(1.0), answer(1.0), answer(2.0), answer(0.0)]]
    assert summary(rows) == {"reward": 5.5 / 8, "response_len": 2.5, "truncated": 1 / 8,
                             "pass@1": 0.5, "pass@2": 0.75, "pass@4": 1.0}
    assert summary([[answer(1.0)], [answer(0.0)]]) == {"reward": 0.5, "response_len": 2.0, "truncated": 0.0}


# ---- beside a run -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = harness.make_model(tmp_path_factory.mktemp("model"))
    with open(os.path.join(folder, "more.jsonl"), "w") as f:
        for i in range(3):
            f.write(json.dumps({"prompt": f"{i}+{i}=", "label": str(2 * i)}) + "\n")
    return folder


@pytest.fixture
def engine():
    server = engines.Engines(1, again=False, vocab_size=250, lengths="10", unit_seconds=0.0, budget=24)
    yield server.urls[0]
    server.stop()


def sets(model):
    return ["sums", os.path.join(model, "eval.jsonl"), "doubles", os.path.join(model, "more.jsonl")]


def make_manager(model, tmp_path, url, orders, **flags):
    requests.post(f"{url}/script", json=orders, timeout=10)
    flags = {"eval_prompt_data": sets(model), "eval_interval": 1, "max_sample_retries": 2, "generate_timeout": 20, **flags}
    manager = RolloutManager(parse_args(harness.flags(model, tmp_path, "run", [url], rollout_max_response_len=24,
                                                      max_tokens_per_gpu=256, **flags)))
    manager.connect([url])
    return manager


def run(manager, scene):
    async def both():
        await manager.publish(0, [], [])
        try:
            return await scene()
        finally:
            if manager.session:
                await manager.session.close()
    return asyncio.run(both())


def test_sets_have_sampling_of_their_own(model, tmp_path, engine):
    """Temperature, top-p, top-k, length and number of samples of an evaluation are its own; a training request keeps its."""
    manager = make_manager(model, tmp_path, engine, {"budget": None}, eval_temperature=0.5, eval_top_p=0.9, eval_top_k=7,
                           eval_max_response_len=5, n_samples_per_eval_prompt=2)
    sent, ask = [], manager.ask

    async def spy(work, sample, payload):
        sent.append((sample.group_id, payload["sampling_params"]))
        return await ask(work, sample, payload)

    manager.ask = spy

    async def scene():
        results = await manager.evaluate()
        await manager.next_groups(0)
        return results

    results = run(manager, scene)
    assert set(results) == {"version", "started", "seconds"} | {f"{name}/{key}" for name in ("sums", "doubles")
                                          for key in ("reward", "response_len", "truncated", "pass@1", "pass@2")}
    assert results["sums/response_len"] == 5.0 and results["sums/truncated"] == 1.0
    names = ("temperature", "top_p", "top_k", "max_new_tokens")
    told = lambda group_id: {tuple(params[name] for name in names) for i, params in sent if i == group_id}
    assert told(-1) == told(-2) == {(0.5, 0.9, 7, 5)} and told(0) == {(1.0, 1.0, -1, 24)}
    assert [sum(i == group_id for i, _ in sent) for group_id in (-1, -2)] == [8 * 2, 3 * 2]
    seeds = [params["sampling_seed"] for i, params in sent if i < 0]
    assert len(set(seeds)) == len(seeds), "two samples of a prompt would be the same"


def test_a_sync_waits_for_the_evaluation_of_the_version_before(model, tmp_path, engine):
    """Half a second of evaluation, a sync asked for at once: it touches the engines only behind the last answer, all of which are
    whole and of version 0."""
    manager = make_manager(model, tmp_path, engine, {"unit_seconds": 0.05, "unit_tokens": 1})

    async def scene():
        started, evaluation = time.time(), asyncio.ensure_future(manager.evaluate())
        await asyncio.sleep(0)
        await manager.rest(1)
        paused = time.time() - started
        assert evaluation.done()
        await manager.update(1, [])
        await manager.publish(1, [], [])
        return paused, await evaluation, await manager.evaluate()

    paused, first, second = run(manager, scene)
    assert 0.4 < paused < 5 and manager.eval_wait == pytest.approx(paused, abs=0.2)
    assert (first["version"], second["version"]) == (0, 1)
    assert first["sums/response_len"] == first["doubles/response_len"] == 10.0 and first["sums/truncated"] == 0.0


@pytest.mark.drill
def test_an_answer_of_another_version_ends_it(model, tmp_path, engine):
    """Somebody else publishes a version in the middle."""
    manager = make_manager(model, tmp_path, engine, {"unit_seconds": 0.02, "unit_tokens": 1})

    async def scene():
        evaluation = asyncio.ensure_future(manager.evaluate())
        await asyncio.sleep(0.1)
        await asyncio.to_thread(manager.fleet.lanes[0].client.set_version, 1)
        await evaluation

    with pytest.raises(NoEngineLeft, match=f"engine {engine} generated with version 1, but 0 was published"):
        run(manager, scene)


@pytest.mark.drill
def test_an_aborted_answer_is_an_error_and_not_a_stub(model, tmp_path, engine):
    manager = make_manager(model, tmp_path, engine, {"unit_seconds": 0.05, "unit_tokens": 1})

    async def scene():
        evaluation = asyncio.ensure_future(manager.evaluate())
        await asyncio.sleep(0.2)
        await asyncio.to_thread(manager.fleet.lanes[0].client.abort_all)
        await evaluation

    with pytest.raises(RuntimeError, match=rf"evaluation, row \d: error: engine {engine} aborted it"):
        run(manager, scene)


def test_a_generation_goes_on_beside_it(model, tmp_path, engine):
    """Four places, 44 answers to evaluate: half of the places are the generation's, which is done long before."""
    manager = make_manager(model, tmp_path, engine, {"unit_seconds": 0.01, "unit_tokens": 1, "slots": 4},
                           sglang_server_concurrency=4, n_samples_per_eval_prompt=4)

    async def scene():
        started, evaluation = time.time(), asyncio.ensure_future(manager.evaluate())
        await asyncio.sleep(0.05)
        await manager.next_groups(0)
        generated = time.time() - started
        assert not evaluation.done()
        await evaluation
        return generated, time.time() - started

    generated, evaluated = run(manager, scene)
    assert generated < evaluated / 2             # 8 answers on two places, 44 on two: 0.4 s, 2.2 s


# ---- whole runs -------------------------------------------------------------------------------------------
@pytest.mark.contract
@pytest.mark.parametrize("script, flags, versions", [
    ("train_async.py", dict(eval_interval=1), [0, 1, 2, 3, 4]),
    ("train_async.py", dict(eval_interval=2, update_weights_interval=2), [0, 2, 4]),
    ("train_fully_async.py", dict(eval_interval=2, update_weights_interval=2, staleness_threshold=0.5), [0, 2, 4]),
    ("train_sync.py", dict(eval_interval=2), [0, 2, 4])])
def test_every_evaluation_is_of_one_version_however_slow_it_is(script, flags, versions, model, tmp_path, engine):
    """The engine's answers are a function of weights, prompt and seed. So an evaluation that takes longer than its step, with
    syncs pressing behind it, must give what the final evaluation of a run of so many steps gives, which runs alone."""
    words = lambda name, **more: harness.flags(model, tmp_path, name, [engine], rollout_max_response_len=24,
                                               n_samples_per_eval_prompt=4, eval_prompt_data=sets(model), **{**flags, **more})
    run_one = lambda name, **more: light.succeed(script, words(name, **more), worker=light.TinyWorker)
    requests.post(f"{engine}/script", json={"lengths": "10", "unit_seconds": 0.01, "unit_tokens": 1, "slots": 4}, timeout=10)
    run_one("beside", num_rollout=4, sglang_server_concurrency=4)
    rows = harness.read_jsonl(tmp_path / "beside" / "eval.jsonl")
    assert [row["version"] for row in rows] == versions
    for row in rows:
        assert row.pop("started") > 0 and row.pop("seconds") > 0.5, "nothing pressed"
    assert any(row.get("sync/eval_wait_time", 0.0) > 0.05 for row in harness.metrics(tmp_path, "beside")), "no sync had to wait"
    if script == "train_fully_async.py":
        return                                   # what it trains on hangs on the clock
    requests.post(f"{engine}/script", json={"unit_seconds": 0.0, "slots": 1 << 30}, timeout=10)
    for row in rows:
        if row["version"]:
            name = f"alone{row['version']}"
            run_one(name, num_rollout=row["version"], eval_interval=None)
            [alone] = harness.read_jsonl(tmp_path / name / "eval.jsonl")
            assert {key: value for key, value in alone.items() if key not in ("started", "seconds")} == row
