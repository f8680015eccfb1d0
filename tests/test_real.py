"""The whole loop on real parts: two SGLang servers on the CPU, Megatron ranks over gloo, Ray. Hugging Face is the oracle."""

import base64
import contextlib
import copy
import os

import numpy as np
import pytest
import ray
import torch

import harness
import placement
import train_async
import train_sync
from args import parse_args
from engine import SGLangEngine
from tracking import Tracker


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(model, tmp_path_factory):
    """Two servers, shared by the tests of this file: each launch joins them anew and sends its own weights first."""
    with servers(model, tmp_path_factory.mktemp("engines"), 2) as urls:
        yield urls


@contextlib.contextmanager
def servers(model, out, count, tp=1, **changes):
    os.environ["PYTHONPATH"] = os.pathsep.join([harness.ROOT, harness.TESTS])
    args = parse_args(harness.flags(model, out, "engines", rollout_num_gpus=count * tp, rollout_num_gpus_per_engine=tp,
                                    **changes))
    first = not ray.is_initialized()
    if first:
        placement.start_ray(args)
    actors = [SGLangEngine.remote(rank, args) for rank in range(count)]
    try:
        yield ray.get([actor.start.remote() for actor in actors], timeout=240)
    finally:
        if first:
            placement.stop(actors)
        else:                              # beside the engines of the other tests
            for actor in actors:
                ray.kill(actor)            # its server dies with it


def launch(model, urls, out, name, **changes):
    args = parse_args(harness.flags(model, out, name, urls, **changes))
    placement.take_folder(args)
    trainers, rollout = placement.launch(args, [])
    return args, trainers, rollout


def steps(loop, args, trainers, rollout, start, stop, folder):
    """Runs `loop` over some steps and returns their rows."""
    part = copy.copy(args)
    part.num_rollout, part.run_dir = stop, os.path.join(args.run_dir, folder)
    os.makedirs(part.run_dir)
    tracker = Tracker(part, start)
    assert loop(part, trainers, rollout, tracker, start) == stop
    tracker.bar.close()
    return tracker.rows.read()


def differences(data, weights, temperature):
    """max |engine's log-prob - log_softmax(logits / T)| over all samples of a batch, by Hugging Face with these weights."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    worst = 0.0
    for sample in (s for group in harness.read_groups(data) for s in group["samples"]):
        prompt, response = sample["prompt_tokens"], sample["response_tokens"]
        with torch.no_grad():
            logits = network(torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1]
        want = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        worst = max(worst, (want - torch.tensor(sample["rollout_logprobs"])).abs().max().item())
    return worst


@pytest.mark.contract
@pytest.mark.parallel
def test_three_steps_on_real_parts(model, engines, tmp_path):
    """Two tensor-parallel ranks. After every sync both engines sample with exactly their weights: log-probs agree to 1e-4 with
    those of the exported version, and are far off with the version before. On-policy KL between old and current is 0.
    (Pipeline stages are below, with experts; data-parallel ranks there and with colocated engines.)"""
    data, temperature = str(tmp_path / "{step}.npz"), 0.7
    args, trainers, rollout = launch(model, engines, tmp_path, "run", rollout_temperature=temperature, rollout_batch_size=8,
                                     save_debug_rollout_data=data, actor_num_gpus_per_node=2, tensor_model_parallel_size=2)
    try:
        exports = [model]
        for step in range(3):
            row, = steps(train_sync.train, args, trainers, rollout, step, step + 1, f"part{step}")
            assert row["staleness/max"] == 0 and row["sync/bytes"] == 4 * count_parameters(model)
            assert abs(row["train/first_ppo_kl"]) < 1e-4
            assert row["train/logprob_abs_diff"] < 1e-4 and row["train/grad_norm"] > 0
            exports.append(str(tmp_path / f"version{step + 1}"))
            ray.get([trainer.export.remote(exports[-1]) for trainer in trainers])
        for step in range(3):
            right = differences(data.format(step=step), exports[step], temperature)
            wrong = differences(data.format(step=step), exports[step + 1], temperature)
            print(f"step {step}: max |engine - trainer| {right:.1e}; with the next version's weights {wrong:.1e}")
            assert right < 1e-4 and wrong > 1e-2
    finally:
        for actor in [*trainers, rollout]:
            ray.kill(actor)


def count_parameters(model):
    from safetensors import safe_open
    with safe_open(os.path.join(model, "model.safetensors"), "pt") as f:
        return sum(f.get_tensor(name).numel() for name in f.keys())


@pytest.mark.contract
def test_one_step_off_on_real_parts(model, engines, tmp_path):
    """train_async.py: lag 0, then 1, and what engine and trainer differ in is age alone."""
    args, trainers, rollout = launch(model, engines, tmp_path, "run", parity_interval=1)
    try:
        rows = steps(train_async.train, args, trainers, rollout, 0, 3, "part")
        assert [(row["staleness/min"], row["staleness/max"]) for row in rows] == [(0, 0), (1, 1), (1, 1)]
        assert rows[0]["train/logprob_abs_diff"] < 1e-4 < rows[1]["train/logprob_abs_diff"]
        # what differs is age: on the same weights engine and trainer agree
        assert all(row["parity/coverage"] == 1 and row["parity/mismatch_max"] < 1e-4 for row in rows)
        assert rows[0]["parity/staleness"] == 0 and min(row["parity/staleness"] for row in rows[1:]) > 1e-3
        assert rows[1]["parity/staleness"] == pytest.approx(rows[1]["train/logprob_abs_diff"], abs=1e-4)
    finally:
        for actor in [*trainers, rollout]:
            ray.kill(actor)


@pytest.mark.contract
def test_colocated_engines_give_their_memory_back_and_go_on(model, engines, tmp_path):
    """train_sync.py --colocate with over-sampling and partial rollout: generate until the batch is complete, abort, release the
    memory, train on two data-parallel ranks, sync, resume, continue. Long answers come back with mixed versions and whole
    columns. The engines' weights are checked at each sync, and the batches' log-probs here."""
    data = str(tmp_path / "{step}.npz")
    args = parse_args(harness.flags(model, tmp_path, "run", engines, colocate=True, actor_num_gpus_per_node=2, partial_rollout=True,
                                    over_sampling_batch_size=16, rollout_max_response_len=200, max_tokens_per_gpu=512, lr=1e-4,
                                    use_distributed_optimizer=True, policy_old="recompute", save_debug_rollout_data=data),
                      "train_sync.py")
    placement.take_folder(args)
    trainers, rollout = placement.launch(args, [])
    try:
        rows = steps(train_sync.train, args, trainers, rollout, 0, 4, "part")
        assert rows[0]["train/logprob_abs_diff"] < 1e-4 and rows[0]["staleness/max"] == 0
        assert all(row["train/first_ppo_kl"] == 0 and row["train/grad_norm"] > 0 for row in rows)   # old is current
        assert differences(data.format(step=0), model, 1.0) < 1e-4
        samples = [s for step in range(4) for group in harness.read_groups(data.format(step=step)) for s in group["samples"]]
        for sample in samples:
            length = len(sample["response_tokens"])
            assert length == len(sample["loss_mask"]) == len(sample["rollout_logprobs"]) <= 200
            assert length == sum(count for _, count in sample["version_runs"])
        assert any(len(sample["version_runs"]) > 1 for sample in samples), "nothing was continued: the test shows nothing"
        assert max(row["staleness/max"] for row in rows) > 0
    finally:
        for actor in [*trainers, rollout]:
            ray.kill(actor)


def chosen_experts(sample, weights):
    """By transformers: experts [response tokens, layers, k] that the position before each of them is sent to, sorted."""
    from transformers import AutoModelForCausalLM

    network, found = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval(), []
    for layer in network.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: found.append(out[2]))
    prompt, response = sample["prompt_tokens"], sample["response_tokens"]
    with torch.no_grad():
        network(torch.tensor([prompt + response]))
    return torch.stack(found, 1)[len(prompt) - 1:-1].sort(-1).values.numpy()


@pytest.mark.contract
@pytest.mark.parallel
def test_a_mixture_of_experts_on_real_parts(tmp_path):
    """An engine of two ranks, and trainers that share the experts out in two layouts. After each sync, which proves every
    expert on both ranks, the engine samples with exactly their weights: its log-probs and its choice of experts are those of
    the exported version by Hugging Face, and of no other."""
    model = harness.make_model(tmp_path / "model", num_experts=8)
    os.makedirs(tmp_path / "engine")
    flags = dict(sglang_enable_return_routed_experts=True, actor_num_gpus_per_node=4)
    with servers(model, tmp_path / "engine", 1, tp=2, **flags) as urls:
        for name, layout in (("tp2-ep2-sp", dict(actor_num_gpus_per_node=4, tensor_model_parallel_size=2, sequence_parallel=True,
                                                 use_distributed_optimizer=True)),
                             ("pp2-ep2", dict(actor_num_gpus_per_node=4, pipeline_model_parallel_size=2))):
            two_steps_of_experts(model, urls, tmp_path / name, **layout)


def two_steps_of_experts(model, urls, out, **layout):
    data = str(out / "{step}.npz")
    args, trainers, rollout = launch(model, urls, out, "run", expert_model_parallel_size=2, parity_interval=1,
                                     rollout_num_gpus_per_engine=2, save_debug_rollout_data=data, **layout)
    try:
        exports = [model]
        for step in range(2):
            row, = steps(train_async.train, args, trainers, rollout, step, step + 1, f"part{step}")
            assert row["staleness/max"] == 0 and row["sync/bytes"] == 4 * count_parameters(model)
            assert row["parity/coverage"] == 1 and row["parity/mismatch_max"] < 1e-4 and row["train/grad_norm"] > 0
            assert row["parity/routing_mismatch"] == 0
            exports.append(str(out / f"version{step + 1}"))
            ray.get([trainer.export.remote(exports[-1]) for trainer in trainers])
        for step in range(2):
            right = differences(data.format(step=step), exports[step], 1.0)
            wrong = differences(data.format(step=step), exports[step + 1], 1.0)
            print(f"{out.name} step {step}: max |engine - trainer| {right:.1e}; with the next version's weights {wrong:.1e}")
            assert right < 1e-4 and wrong > 1e-2
            moved = 0
            for sample in (group["samples"][0] for group in harness.read_groups(data.format(step=step))):
                (first, count, code), = sample["experts"]
                assert (first, count) == (0, len(sample["response_tokens"]))
                engine = np.sort(np.frombuffer(base64.b64decode(code), np.int32).reshape(count, 2, 2))
                assert (engine == chosen_experts(sample, exports[step])).all()
                moved += (engine != chosen_experts(sample, exports[step + 1])).sum()
            assert moved > 0, "no token went to other experts with other weights: the comparison shows nothing"
    finally:
        for actor in [*trainers, rollout]:
            ray.kill(actor)
