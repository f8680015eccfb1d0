"""The scripts that measure on GPUs: what of them can be checked without one."""

import argparse
import asyncio
import json
import os
import statistics
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "scripts"), os.path.join(ROOT, "scripts", "gpu")]

import pytest

import bench_async_gpu
import harness
import rollout
import scripted_engine
import shapes
import smollm2
from args import parse_args
from batch import load_groups


def test_forced_lengths_have_the_long_tail_in_every_step_and_follow_from_row_and_index():
    """Median 512, one in a hundred at the cut of 8,192; the same in every process, whatever was drawn before."""
    groups = [[bench_async_gpu.forced_length(row, index, 36, 8, 512, 8192) for index in range(8)] for row in range(72)]
    first, second = ([n for group in part for n in group] for part in (groups[:36], groups[36:]))
    assert sorted(first) == sorted(second) and first != second        # a step's lengths are any other's, in another order
    assert statistics.median(first) == pytest.approx(512, rel=0.01)
    assert statistics.mean(first) == pytest.approx(990, rel=0.005)    # 512 e^(s^2/2) = 1,041 uncut, s = ln 16 / 2.326
    assert sum(n == 8192 for n in first) == 3                         # of 288: P(above) = 0.01
    assert min(first) >= 1 and max(first) == 8192
    assert len(set(groups[0])) > 4                                    # the samples of a group differ


def test_every_answer_has_the_length_that_it_is_given(tmp_path, monkeypatch):
    """The engine would go on for 40 tokens, and the flag allows 30: each sample ends where its row and index say."""
    servers = scripted_engine.start(1, vocab_size=250, lengths="40")
    try:
        monkeypatch.setattr(bench_async_gpu.placement, "RolloutManager", None)
        monkeypatch.setattr(rollout.ray, "put", lambda batch: batch)
        bench_async_gpu.force_lengths(4, 2, median=8, longest=24)
        args = parse_args(harness.flags(harness.make_model(tmp_path), tmp_path, "run", [servers[0][1]], rollout_max_response_len=30))

        async def batch():
            manager = bench_async_gpu.placement.RolloutManager(args)
            manager.connect([servers[0][1]])
            await manager.publish(0, [], [])
            await manager.generate(0)
            await manager.session.close()
        asyncio.run(batch())
    finally:
        scripted_engine.stop(servers)
    samples = [s for group in load_groups(args.record_path.format(step=0)) for s in group.samples]
    assert len(samples) == 8
    for s in samples:
        assert len(s.response_tokens) == bench_async_gpu.forced_length(s.row, s.index, 4, 2, 8, 24)


def test_arms_name_their_split_and_servers_its_slots(monkeypatch, capsys):
    """6+2 of eight GPUs: six train, two generate. Slots of a server: those that two need for what may be in flight."""
    words = ["--device", "cpu", "--gpus", "8", "--groups", "72", "--samples", "8", "--threshold", "1.5", "--output-dir", "/nowhere"]
    options, flags = bench_async_gpu.parse([*words, "--arms", "sync", "one_step_off:6+2", "partial", "--bf16"])
    assert options.arms == {"sync": (8, 8), "one_step_off:6+2": (6, 2), "partial": (4, 4)} and flags == ["--bf16"]
    monkeypatch.setattr(bench_async_gpu, "parse_args", lambda words, script: (words, script))
    words, script = bench_async_gpu.arm_args("one_step_off:6+2", "model", "prompts", options, flags, 2)
    given = dict(zip(words, words[1:]))
    assert script == "train_async.py" and given["--actor-num-gpus-per-node"] == "6" and given["--rollout-num-gpus"] == "2"
    assert given["--sglang-server-concurrency"] == "720"              # 72 x 8 x 2.5 / 2
    for arm in ("one_step_off:6+3", "sync:4+4", "partial:8+0", "fast"):
        with pytest.raises(SystemExit):
            bench_async_gpu.parse(["--gpus", "8", "--arms", arm])
        assert f"--arms {arm}: give sync, " in capsys.readouterr().err


def test_layouts_have_names():
    assert shapes.read_layout("tp2pp2", "--layout", None) == {"tp": 2, "pp": 2, "dp": 1} and shapes.ranks({"tp": 2, "pp": 2, "dp": 3}) == 12
    with pytest.raises(SystemExit):
        shapes.read_layout("tp2pp", "--layout", argparse.ArgumentParser())


def test_the_curve_adds_up_the_steps_and_the_evaluation_is_first_and_last(tmp_path):
    rows = [{"perf/step_time": t, "rollout/reward": r} for t, r in ((2.0, 0.1), (0.5, 0.2), (0.5, 0.4))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"sums/reward": r}) + "\n" for r in (0.1, 0.9, 0.7)))
    assert smollm2.curve(str(tmp_path)) == [(2.0, 0.1), (2.5, 0.2), (3.0, 0.4)]
    assert smollm2.ends(str(tmp_path)) == (0.1, 0.7)
