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
    assert plan.known_config("Qwen/Qwen4-1B") is None


@pytest.mark.parametrize("name, total, active", [("Qwen3-30B-A3B", 30.5e9, 3.3e9), ("Qwen3-235B-A22B", 235e9, 22e9)])
def test_experts_count_as_the_model_cards_say(name, total, active):
    config = plan.known_config(name)
    assert plan.parameters(config) == pytest.approx(total, rel=0.01)
    assert plan.parameters(config, of_a_token=True) == pytest.approx(active, rel=0.02)


# torch.cuda.max_memory_allocated of a training rank, GB; docs/gpu/results.md
@pytest.mark.parametrize("name, words, buckets, measured", [
    ("qwen3-4b", ["--max-tokens-per-gpu", "8192", "--use-distributed-optimizer"], False, 122),
    ("qwen3-8b", ["--max-tokens-per-gpu", "4096", "--use-distributed-optimizer", "--actor-num-gpus-per-node", "2"], False, 130),
    ("qwen3-8b", ["--max-tokens-per-gpu", "4096", "--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "2"], False, 92),
    ("qwen3-8b", ["--max-tokens-per-gpu", "4096", "--pipeline-model-parallel-size", "2", "--actor-num-gpus-per-node", "2"], False, 103),
    ("qwen2.5-3b", ["--max-tokens-per-gpu", "9216", "--update-weight-buffer-size", str(2 << 30)], True, 109.4),
    ("qwen2.5-3b", ["--max-tokens-per-gpu", "9216", "--update-weight-buffer-size", str(2 << 30), "--use-distributed-optimizer",
                    "--actor-num-gpus-per-node", "2"], True, 90.9),
    ("qwen3-0.6b", ["--max-tokens-per-gpu", "8192"], True, 28.6)])
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


def test_memory_of_experts_by_hand():
    """30B-A3B on TP 2 x DP 8 with experts over 4: an expert's states are split over the two ranks that have it, others over 8."""
    args = parse("qwen3-30b-a3b", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8", "--tensor-model-parallel-size", "2",
                 "--sequence-parallel", "--expert-model-parallel-size", "4", "--use-distributed-optimizer")
    dense = 48 * ((2048 * (4096 + 2 * 512) + 4096 * 2048) / 2 + 2 * 2048 + 2 * 128 + 2048 * 128) + 2 * 2048 * 151936 / 2
    experts = 48 * 128 * 3 * 2048 * 768 / (2 * 4)
    memory = plan.trainer_memory(args, plan.known_config("qwen3-30b-a3b"))
    assert memory["weights"] == pytest.approx(2 * (dense + experts) / 1e9)
    assert memory["optimizer"] == pytest.approx(12 * (dense / 8 + experts / 2) / 1e9)


BIG = ["--bf16", "--dry-run", "--use-dynamic-batch-size", "--rollout-batch-size", "128", "--rollout-num-gpus-per-engine", "8",
       "--rollout-num-gpus", "32", "--actor-num-gpus-per-node", "8"]


def shaped(name, *words):
    return parse_args(["--hf-checkpoint-shape", name, *BIG, *words], "train_async.py")


@pytest.mark.parametrize("nodes, name", [(2, "qwen3-8b"), (4, "qwen3-32b"), (4, "qwen3-30b-a3b"), (8, "qwen3-235b-a22b"),
                                         (124, "qwen3-235b-a22b")])
def test_the_layout_that_is_proposed_is_one_that_the_model_takes(nodes, name):
    """94 layers divide by 1, 2, 47 and 94; args and memory agree with what is proposed."""
    batch = ["--actor-num-nodes", str(nodes), "--rollout-batch-size", str(nodes * 8)]
    args = shaped(name, *batch)
    flags = plan.cheapest(args, plan.known_config(name))
    text, fits = plan.describe(shaped(name, *batch, *flags.split()))
    assert fits, (flags, text)
    assert max(map(len, text.splitlines())) <= 100
    layers, pp = plan.known_config(name)["num_hidden_layers"], shaped(name, *batch, *flags.split()).pipeline_model_parallel_size
    assert layers % pp == 0


def test_too_few_ranks_are_told_how_many_do():
    text, fits = plan.describe(shaped("qwen3-235b-a22b", "--rollout-num-gpus-per-engine", "2"))
    assert not fits and "--rollout-num-gpus-per-engine 4 does" in " ".join(text.split())      # 470 GB / 4 = 118 of 0.85 x 141
    words = " ".join(text.split()).partition("one that does: ")[2].partition(" the engine")[0].split()
    assert int(words[1]) > 1
    assert plan.describe(shaped("qwen3-235b-a22b", *words))[1]
    text, _ = plan.describe(shaped("qwen3-8b", "--max-tokens-per-gpu", "10000000"))
    assert text.split()[-3:] == ["a", "lower", "--max-tokens-per-gpu"]


def test_a_shape_and_rates_belong_to_a_dry_run(capsys):
    for words, said in ((["--hf-checkpoint-shape", "qwen3-8b"], "--hf-checkpoint-shape needs --dry-run"),
                        (["--hf-checkpoint-shape", "qwen9"], "invalid choice: 'qwen9'"), (["--dry-run"], "--hf-checkpoint is missing"),
                        (["--hf-checkpoint-shape", "qwen3-8b", "--dry-run", "--dry-run-rates", '{"speed": 1}'], "there is no speed, but"),
                        (["--hf-checkpoint-shape", "qwen3-8b", "--dry-run", "--dry-run-rates", '{"decode_ms": 0}'], "must be above 0")):
        with pytest.raises(SystemExit):
            parse_args(words, "train_async.py")
        assert said in capsys.readouterr().err


def test_times_by_hand():
    """Equal lengths, so that a step can be computed: 2 nodes of trainers, 4 engines of TP 8, 1,024 samples of 1,000 tokens."""
    rates = '{"lengths": "1:1000", "train_tflops": 100, "read_tb_s": 1, "decode_ms": 10, "network_gb_s": 10, "sync_ms": 1000}'
    args = shaped("qwen3-8b", "--actor-num-nodes", "2", "--use-distributed-optimizer", "--max-tokens-per-gpu", "4096",
                  "--dry-run-rates", rates)
    config, n = plan.known_config("qwen3-8b"), 8_190_735_360
    rates = plan.read_rates(args.dry_run_rates)
    sync = plan.sync_seconds(2 * n, rates, nodes=6)
    assert sync == pytest.approx(1 + 2 * n / 10e9)
    steps, (slots, rate, mean) = plan.step_times(args, config, rates, sync)
    read = 2 * n / 8 + 256 * (512 + 500) * (2 * 36 * 128 * 2)           # one of 8 key-value heads on each GPU
    assert slots == 256 and mean == 1000 and rate == pytest.approx(1 / (max(read / 1e12, 256 * 2 * n / 8 / 1e14) + 0.01))
    train = 1024 * (1000 + 512) * 6 * n / (16 * 1e14)
    generate = 1000 / rate
    assert [round(seconds, 3) for _, seconds, _, _ in steps[:2]] == [
        round(generate + train + sync, 3), round(max(generate, train) + sync, 3)]
    assert "network_gb_s 10 (given)" in " ".join(plan.describe(args)[0].split())


def test_what_does_not_fit_is_refused_with_a_layout_that_does(tmp_path):
    args = parse("qwen3-32b", "--actor-num-gpus-per-node", "8", "--rollout-num-gpus-per-engine", "2", "--rollout-max-response-len", "2048")
    text, fits = plan.describe(args)
    assert not fits and "32,762,123,264 parameters" in text
    flags = text.rpartition("layout that does: ")[2].split()
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


def test_a_shared_engine_lies_on_one_node(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--hf-checkpoint", "qwen3-8b", *WORDS, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "6", "--colocate", "--rollout-batch-size", "24",
                    "--rollout-num-gpus-per-engine", "4"], "train_sync.py")
    assert "--actor-num-gpus-per-node 6 does not divide by --rollout-num-gpus-per-engine 4" in capsys.readouterr().err


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


RECIPES = sorted(glob.glob(os.path.join(harness.ROOT, "scripts", "run-*.sh")))


def plan_of(recipe, **env):
    options = dict(env={**os.environ, **env}, cwd="/", capture_output=True, text=True, timeout=120)
    run = subprocess.run(["bash", recipe, "--dry-run"], **options)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.mark.parametrize("recipe", RECIPES, ids=os.path.basename)
def test_every_recipe_plans_on_a_machine_without_a_gpu(recipe, tmp_path):
    """The first by its script, the others by what an interpreter would get from theirs: the imports take long."""
    if recipe == RECIPES[0]:
        text = plan_of(recipe)
    else:
        (tmp_path / "python").write_text("#!/usr/bin/env bash\nprintf '%s\\0' \"$@\"\n")
        (tmp_path / "python").chmod(0o755)
        script, *words = plan_of(recipe, PYTHON=str(tmp_path / "python")).split("\0")[:-1]
        text, fits = plan.describe(parse_args(words, os.path.basename(script)))
        assert fits, text
    assert "training ranks" in text and "GB of weights" in text and ("KV cache" in text) == ("GPUs on" in text)
