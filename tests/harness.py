"""What the tests of whole runs share: a small model and its data, a run as a subprocess, and how to read what it left."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TESTS = os.path.join(ROOT, "tests")
sys.path.insert(0, os.path.join(ROOT, "scripts"))


def token_reward(args, sample):
    """A reward with spread for answers without sense: any number that follows from the tokens."""
    return (sum(sample.response_tokens) % 7) / 7


def make_model(folder, rows=200, seed=0, num_experts=0):
    """A random model of the tiny model's shape, dense or with experts, with train.jsonl and eval.jsonl of sums
    beside it. Returns the folder."""
    import make_tiny_model

    folder = str(folder)
    tokenizer = make_tiny_model.build_tokenizer()
    tokenizer.save_pretrained(folder)
    make_tiny_model.build_model(tokenizer, seed, num_experts=num_experts).save_pretrained(folder)
    draw = random.Random(seed)
    for name, count in (("train", rows), ("eval", 8)):
        with open(os.path.join(folder, f"{name}.jsonl"), "w") as f:
            for _ in range(count):
                a, b = draw.randrange(100), draw.randrange(100)
                f.write(json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) + "\n")
    return folder


def padded_worker(seconds):
    """A class for training ranks whose step takes so long, most of it asleep: two cores are few for an honest load."""
    from trainer import TrainWorker

    class PaddedWorker(TrainWorker):
        def train(self, step, batch):
            started = time.time()
            metrics = super().train(step, batch)
            time.sleep(max(0.0, started + seconds - time.time()))
            return {**metrics, "perf/train_time": time.time() - started}

    return PaddedWorker


def flags(model, output_dir, run_name, urls=(), **changes):
    """The command line of a small run; changes={flag: value}, value True for a switch, None to leave a flag out."""
    values = {"hf_checkpoint": model, "prompt_data": os.path.join(model, "train.jsonl"), "output_dir": str(output_dir),
              "run_name": run_name, "num_rollout": 6, "rollout_batch_size": 4, "n_samples_per_prompt": 2,
              "rollout_max_prompt_len": 32, "rollout_max_response_len": 6, "lr": 0.01, "use_dynamic_batch_size": True,
              "max_tokens_per_gpu": 128, "custom_rm_path": "harness.token_reward", "distributed_timeout": 120,
              "engine_start_timeout": 180, "rollout_external_engine_addrs": list(urls) or None, **changes}
    words = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        words += [] if value is True else [str(v) for v in (value if isinstance(value, (list, tuple)) else [value])]
    return words


def start(script, words, **popen):
    env = dict(os.environ, PYTHONPATH=TESTS, RAY_DEDUP_LOGS="0", CUDA_VISIBLE_DEVICES="")
    return subprocess.Popen([sys.executable, os.path.join(ROOT, script), *words], env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, **popen)


def run(script, words, timeout=180):
    """Runs to the end. Returns (exit status, output)."""
    process = start(script, words)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"{script} did not end within {timeout} s:\n{output[-3000:]}")
    return process.returncode, output


def succeed(script, words, timeout=180):
    status, output = run(script, words, timeout)
    assert status == 0, output[-3000:]
    return output


def interrupt(process, condition, how, timeout=120):
    """Sends signal `how` as soon as condition() holds; checks that no process of the run is left 20 s later (after a
    SIGKILL two idle agents of Ray's own take a minute to notice). Returns (exit status, output)."""
    deadline = time.time() + timeout
    while not condition():
        assert process.poll() is None, f"ended before it was interrupted:\n{process.stdout.read()[-3000:]}"
        assert time.time() < deadline, "the moment of the interruption did not come"
        time.sleep(0.002)
    family = [p for p in psutil.Process(process.pid).children(recursive=True)
              if how != signal.SIGKILL or not p.cmdline() or p.cmdline()[0] not in ("ray::DashboardAgent", "ray::RuntimeEnvAgent")]
    process.send_signal(how)
    output, _ = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, f"left behind after signal {how}: {[p.cmdline() for p in alive]}"
    return process.returncode, output


def read_jsonl(path):
    """The whole lines of a JSONL file as far as it is written; [] when it is not there yet."""
    try:
        with open(path) as f:
            return [json.loads(line) for line in f if line.endswith("\n")]
    except (FileNotFoundError, ValueError):
        return []


def read_groups(path):
    """The groups of a batch's file, as plain dicts."""
    from batch import load_groups
    return [group.to_json() for group in load_groups(str(path))]


def metrics(output_dir, run_name):
    return read_jsonl(os.path.join(output_dir, run_name, "metrics.jsonl"))


def saved_state(output_dir, run_name, step, rank=0):
    """What a training rank saved after `step` steps."""
    path = os.path.join(output_dir, run_name, "checkpoints", f"step_{step:07d}", f"rank_{rank:05d}.pt")
    return torch.load(path, weights_only=True)


def same_bits(a, b):
    """Whether two nests of dicts, lists and tensors are equal to the last bit."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return a == b
