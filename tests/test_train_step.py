"""A whole training step of TrainWorker, on one and two ranks, against a plain loop with a Hugging Face model and torch's AdamW."""

import os
import socket

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

import harness
from args import parse_args

# a large eps: with 1e-8 Adam turns the last bits of a gradient near 0 into whole steps
FLAGS = dict(lr=2e-3, adam_beta2=0.95, adam_eps=1e-3, clip_grad=0.5, weight_decay=0.1, global_batch_size=8, rollout_temperature=0.7,
             eps_clip_high=0.3, entropy_coef=0.02, use_kl_loss=True, kl_loss_coef=0.1, kl_coef=0.05, rollout_max_response_len=12,
             n_samples_per_prompt=4, eps_clip_c=3.0)
LAYOUTS = {"one": {}, "alone": dict(use_dynamic_batch_size=False), "tiny_packs": dict(max_tokens_per_gpu=44),
           "chunks": dict(log_probs_chunk_size=3), "dp2": dict(actor_num_gpus_per_node=2),
           "dp2_split": dict(actor_num_gpus_per_node=2, use_distributed_optimizer=True, max_tokens_per_gpu=44),
           "tp2": dict(actor_num_gpus_per_node=2, tensor_model_parallel_size=2),
           "pp2": dict(actor_num_gpus_per_node=2, pipeline_model_parallel_size=2, max_tokens_per_gpu=44)}


def make_batch(seed, groups=4, n=4):
    """Uneven lengths, holes in the masks, engine log-probs that are off by noise."""
    g = np.random.default_rng(seed)
    batch = {name: [] for name in ("group_ids", "tokens", "response_lengths", "loss_mask", "rollout_logprobs", "rewards", "versions")}
    for i in range(groups * n):
        length = int(g.integers(1, 13))
        batch["group_ids"].append(i // n)
        batch["tokens"].append(g.integers(4, 250, size=int(g.integers(3, 20)) + length))
        batch["response_lengths"].append(length)
        batch["loss_mask"].append((g.random(length) > 0.2).astype(np.float32))
        batch["rollout_logprobs"].append((-5.5 + 0.3 * g.standard_normal(length)).astype(np.float32))
        batch["rewards"].append(float(g.integers(0, 3)))
        batch["versions"].append([[0, length]])
    return {"step": 0, "columns": {}, **batch}


# ---- the reference: a plain loop --------------------------------------------------------------------------
def token_logps(network, tokens, length, temperature):
    logp = (network(torch.tensor(tokens)[None]).logits[0, -length - 1:-1] / temperature).log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens)[-length:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def reference(model, batches, policy_old):
    """The same updates, sample by sample, with nothing packed. Returns the final weights and the loss of each update."""
    from transformers import AutoModelForCausalLM

    f, T = FLAGS, FLAGS["rollout_temperature"]
    network, frozen = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    matrices, vectors = ([p for p in network.parameters() if (p.ndim > 1) == flag] for flag in (True, False))
    adam = torch.optim.AdamW([dict(params=matrices, weight_decay=f["weight_decay"]), dict(params=vectors, weight_decay=0.0)],
                             lr=f["lr"], betas=(0.9, f["adam_beta2"]), eps=f["adam_eps"])
    losses = []
    for batch in batches:
        count = len(batch["tokens"])
        with torch.no_grad():
            ref = [token_logps(frozen, batch["tokens"][i], batch["response_lengths"][i], T)[0] for i in range(count)]
            old = [token_logps(network, batch["tokens"][i], batch["response_lengths"][i], T)[0] if policy_old == "recompute"
                   else torch.tensor(batch["rollout_logprobs"][i]) for i in range(count)]
        kl = lambda logp, i: (ref[i] - logp).exp() - 1 - (ref[i] - logp)
        rewards = np.array([batch["rewards"][i] - f["kl_coef"] * (kl(old[i], i) * torch.tensor(batch["loss_mask"][i])).sum().item()
                            for i in range(count)])
        ids = np.array(batch["group_ids"])
        advantages = np.array([(r - rewards[ids == g].mean()) / (rewards[ids == g].std(ddof=1) + 1e-6) for r, g in zip(rewards, ids)])
        for start in range(0, count, f["global_batch_size"]):
            part = range(start, start + f["global_batch_size"])
            tokens = sum(batch["loss_mask"][i].sum() for i in part)
            loss = 0.0
            for i in part:
                logp, entropy = token_logps(network, batch["tokens"][i], batch["response_lengths"][i], T)
                ratio, a = (logp - old[i]).exp(), advantages[i]
                value = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.3))
                if a < 0:
                    value = value.clamp(max=-a * f["eps_clip_c"])
                value = value - f["entropy_coef"] * entropy + f["kl_loss_coef"] * kl(logp, i)
                loss = loss + (value * torch.tensor(batch["loss_mask"][i])).sum() / tokens
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), f["clip_grad"])
            adam.step()
            losses.append(loss.item())
    return network.state_dict(), losses


# ---- the workers ------------------------------------------------------------------------------------------
def work(rank, cases, model, out, master):
    from megatron.core import parallel_state as mpu

    from trainer import TrainWorker
    for name, policy_old, args in cases:
        worker = TrainWorker(args, rank, master(name, policy_old))
        metrics = [worker.train(step, make_batch(step)) for step in range(2)]
        worker.export(os.path.join(out, f"{name}-{policy_old}"))
        if rank == 0:
            torch.save(metrics, os.path.join(out, f"{name}-{policy_old}.pt"))
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()


class Masters:
    """A rendezvous of its own for each case: the ports are found before the processes start."""

    def __init__(self, cases):
        self.ports = {}
        for name, policy_old, _ in cases:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                self.ports[name, policy_old] = s.getsockname()[1]

    def __call__(self, name, policy_old):
        return f"127.0.0.1:{self.ports[name, policy_old]}"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Runs every layout with both policies of old log-probs: one set of processes for each world size."""
    out = tmp_path_factory.mktemp("steps")
    (out / "model").mkdir()
    model = harness.make_model(out / "model")
    cases = [(name, policy_old, parse_args(harness.flags(model, out, "run", policy_old=policy_old, **{**FLAGS, **changes})))
             for name, changes in LAYOUTS.items() for policy_old in (("rollout", "recompute") if name in ("one", "dp2_split") else ("rollout",))]
    for world in (1, 2):
        mine = [case for case in cases if case[2].world_size == world]
        mp.spawn(work, (mine, model, str(out), Masters(mine)), nprocs=world)
    return out, {policy_old: reference(model, [make_batch(0), make_batch(1)], policy_old) for policy_old in ("rollout", "recompute")}


@pytest.mark.contract
@pytest.mark.parallel
@pytest.mark.parametrize("name, policy_old", [(name, "rollout") for name in LAYOUTS] + [("one", "recompute"), ("dp2_split", "recompute")])
def test_two_steps_equal_the_plain_loop(name, policy_old, results):
    """Two batches of two updates each: clip on both sides, dual clip, KL in the reward and in the loss, entropy, temperature,
    weight decay, gradient clipping. Losses and final weights agree however samples were packed and ranks laid out."""
    from safetensors.torch import load_file

    out, references = results
    weights, losses = references[policy_old]
    metrics = torch.load(out / f"{name}-{policy_old}.pt")
    assert [m["train/loss"] for m in metrics] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2], abs=1e-6)
    folder = out / f"{name}-{policy_old}"
    got = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    moved = max((weights[k] - v).abs().max().item() for k, v in load_file(out / "model" / "model.safetensors").items())
    worst = max((weights[k] - got[k]).abs().max().item() for k in got)
    assert moved > 1e-3 and worst < 1e-6, (moved, worst)
    if policy_old == "recompute":
        assert all(m["train/first_ppo_kl"] == 0.0 for m in metrics)
