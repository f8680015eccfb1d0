"""--dry-run: sizes against transformers, memory against what was measured on H200s, and what does not fit."""

import glob
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import harness
import plan
from args import parse_args

WORDS = ["--prompt-data", "not-here.jsonl", "--num-rollout", "1", "--dry-run", "--bf16", "--device", "cuda", "--use-dynamic-batch-size"]


def parse(name, *words):
    return parse_args(["--hf-checkpoint", name, *WORDS, *words], "train_async.py")


@pytest.mark.parametrize("name", plan.SHAPES)
def test_parameters_are_those_that_transformers_counts(name):
    config = plan.known_config(name)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert plan.parameters(config) == sum(p.numel() for p in network.parameters())


def test_published_counts():
    """Of the checkpoints' own index files."""
    assert plan.parameters(plan.known_config("Qwen/Qwen3-8B")) == 8_190_735_360
    assert plan.parameters(plan.known_config("Qwen/Qwen2.5-Math-7B-Instruct/")) == 7_615_616_512
    assert plan.known_config("Qwen/Qwen3-235B-A22B") is None


# torch.cuda.max_memory_allocated of a training rank, GB; docs/gpu/results.md
@pytest.mark.parametrize("name, words, buckets, measured", [
    ("qwen3-4b", ["--max-tokens-per-gpu", "8192", "--use-distributed-optimizer"], False, 122),
    ("qwen3-8b", ["--max-tokens-per-gpu", "4096", "--use-distributed-optimizer", "--actor-num-gpus-per-node", "2"], False, 130),
    ("qwen2.5-3b", ["--max-tokens-per-gpu", "9216", "--update-weight-buffer-size", str(2 << 30)], True, 109.4)])
def test_memory_is_within_a_tenth_of_what_was_measured(name, words, buckets, measured):
    args = parse(name, *words, "--rollout-max-response-len", "2048")
    memory = plan.trainer_memory(args, plan.known_config(name))
    if not buckets:                # no engine was there
        del memory["buckets of the sync"]
    assert abs(sum(memory.values()) / measured - 1) < 0.1


def test_memory_by_hand():
    """A rank of TP 2 x PP 2 x DP 2 with a distributed optimizer: the counts of Qwen3-8B's layers and tables."""
    args = parse("qwen3-8b", "--actor-num-gpus-per-node", "8", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2",
                 "--use-distributed-optimizer", "--rollout-num-gpus", "8", "--use-kl-loss", "--kl-loss-coef", "0.1",
                 "--rollout-max-response-len", "2048", "--num-gpus-per-node", "16")
    layer = (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288) / 2 + 2 * 4096 + 2 * 128
    count = 18 * layer + 4096 * 151936 / 2
    memory = plan.trainer_memory(args, plan.known_config("qwen3-8b"))
    assert memory["weights"] == memory["reference"] == pytest.approx(2 * count / 1e9)
    assert memory["gradients"] == pytest.approx(4 * count / 1e9)
    assert memory["optimizer"] == pytest.approx(6 * count / 1e9)


def test_what_does_not_fit_is_refused_with_a_layout_that_does(tmp_path):
    args = parse("qwen3-32b", "--actor-num-gpus-per-node", "8", "--rollout-num-gpus-per-engine", "2", "--rollout-max-response-len", "2048")
    text, fits = plan.describe(args)
    assert not fits and "32,762,123,264 parameters" in text
    flags = text.rpartition("that does: ")[2].split()
    text, fits = plan.describe(parse("qwen3-32b", "--actor-num-gpus-per-node", "8", "--rollout-num-gpus-per-engine", "2",
                                     "--rollout-max-response-len", "2048", *flags))
    assert fits, text
    assert not plan.fits(SimpleNamespace(**{**vars(args), "gpu_memory_gb": 24.0}), plan.known_config("qwen3-32b"))
    text, fits = plan.describe(parse("qwen2.5-1.5b", "--gpu-memory-gb", "100", "--sglang-mem-fraction-static", "0.02"))
    assert not fits and "the engine does not fit" in text and "the training does not" not in text


def test_a_shared_gpu_has_room_for_the_cache_behind_the_trainer(tmp_path):
    words = ["--hf-checkpoint", "qwen3-8b", *WORDS, "--actor-num-gpus-per-node", "2", "--use-distributed-optimizer", "--colocate",
             "--max-tokens-per-gpu", "2048"]
    args, config = parse_args(words, "train_sync.py"), plan.known_config("qwen3-8b")
    memory = plan.trainer_memory(args, config)
    beside = 16.38 + 32.76 + 49.14 + memory["buckets of the sync"]      # weights, gradients, half of the optimizer's states
    assert plan.engine_memory(args, config)[1] == pytest.approx(0.85 * (141 - beside) - 16.38, abs=0.1)


def test_bf16_is_planned_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert parse_args(["--hf-checkpoint", "qwen3-8b", *[w for w in WORDS if w not in ("--device", "cuda")]], "train_async.py").device == "cuda"
    with pytest.raises(SystemExit):
        parse("qwen3-8b", "--rollout-num-gpus", "16", "--rollout-num-gpus-per-engine", "16")


def test_kv_cache_by_hand():
    """0.6B: 2 x 28 layers x 1,024 x 2 bytes = 114,688 bytes a token in what 0.5 of 100 GB leave beside 1.19 GB of weights."""
    args = parse("qwen3-0.6b", "--gpu-memory-gb", "100", "--sglang-mem-fraction-static", "0.5")
    weights, cache, tokens = plan.engine_memory(args, plan.known_config("qwen3-0.6b"))
    assert weights == pytest.approx(1.1921, abs=1e-4) and cache == pytest.approx(50 - 1.1921, abs=1e-4)
    assert tokens == int((50e9 - 2 * 596_049_920) / 114_688)


@pytest.mark.parametrize("recipe", sorted(map(os.path.basename, glob.glob(os.path.join(harness.ROOT, "scripts", "run-*.sh")))))
def test_every_recipe_plans_on_a_machine_without_a_gpu(recipe):
    run = subprocess.run(["bash", os.path.join(harness.ROOT, "scripts", recipe), "--dry-run"], capture_output=True, text=True, timeout=120,
                         cwd="/")
    assert run.returncode == 0, run.stderr[-2000:]
    assert "training ranks" in run.stdout and "GB of weights" in run.stdout and ("KV cache" in run.stdout) == ("GPUs on" in run.stdout)
