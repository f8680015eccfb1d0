"""A whole training step of TrainWorker, on one and two ranks, against a plain loop with a Hugging Face model and torch's AdamW."""

import copy
import os

import numpy as np
import pytest
import torch

import harness
import test_model
from args import parse_args
from engine import pick_port

# a large eps: with 1e-8 Adam turns the last bits of a gradient near 0 into whole steps
FLAGS = dict(lr=2e-3, adam_beta2=0.95, adam_eps=1e-3, clip_grad=0.5, weight_decay=0.1, global_batch_size=8, rollout_temperature=0.7,
             eps_clip_high=0.3, entropy_coef=0.02, use_kl_loss=True, kl_loss_coef=0.1, kl_coef=0.05, rollout_max_response_len=12,
             n_samples_per_prompt=4, eps_clip_c=3.0)
LAYOUTS = {"one": {}, "alone": dict(use_dynamic_batch_size=False), "tiny_packs": dict(max_tokens_per_gpu=44),
           "chunks": dict(log_probs_chunk_size=3), "dp2": dict(actor_num_gpus_per_node=2),
           "dp2_split": dict(actor_num_gpus_per_node=2, use_distributed_optimizer=True, max_tokens_per_gpu=44),
           "tp2": dict(actor_num_gpus_per_node=2, tensor_model_parallel_size=2),
           "pp2": dict(actor_num_gpus_per_node=2, pipeline_model_parallel_size=2, max_tokens_per_gpu=44)}

# the corrections, on the same optimizer: decoupled over a cycle of two steps, bypass, and functions of one's own
PLAIN = {name: FLAGS[name] for name in ("lr", "adam_beta2", "adam_eps", "clip_grad", "weight_decay", "global_batch_size",
                                        "rollout_temperature", "rollout_max_response_len", "n_samples_per_prompt")}
CORRECTED = {
    "decoupled": (dict(policy_old="recompute", update_weights_interval=2, loss_type="gspo", eps_clip_high=0.3,
                       advantage_estimator="rloo", loss_agg_mode="seq-mean-token-mean", overlong_buffer_len=6,
                       overlong_penalty_factor=0.5, rollout_is="sequence", rollout_is_threshold="0.03_3",
                       rollout_is_batch_normalize=True, rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.4_2.8,0.25"),
                  ("one", "dp2_split", "pp2")),
    "bypass": (dict(loss_type="reinforce", advantage_estimator="reinforce_plus_plus", kl_coef=0.05, kl_loss_type="k2",
                    rollout_is="token", rollout_is_threshold="1.2", rollout_rs="token_k1", rollout_rs_threshold="1.5",
                    entropy_coef=0.02), ("tiny_packs", "dp2", "tp2")),
    "critic": (dict(advantage_estimator="ppo", critic_lr=3e-3, gamma=0.98, lambd=0.9, kl_coef=0.05, kl_loss_type="k2",
                    value_clip=0.05, eps_clip_high=0.3), ("tiny_packs", "dp2_split", "tp2", "pp2")),
    "own": (dict(custom_loss_path="test_train_step.own_loss", custom_advantage_path="test_train_step.own_advantage"), ("dp2",))}


def own_loss(args, logp, columns):
    return -columns["advantage"] * columns["level"] * logp, {"trust": columns["trust"]}


def own_advantage(args, batch):
    """One for each token: the reward less its mean, where the column of the sample says so."""
    mean = sum(batch["rewards"]) / len(batch["rewards"])
    return [(reward - mean) * np.asarray(trust) for reward, trust in zip(batch["rewards"], batch["columns"]["trust"])]


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
    columns = {"level": [float(i % 3) for i in range(groups * n)],
               "trust": [np.linspace(0, 1, length) for length in batch["response_lengths"]]}
    sizes = [FLAGS["global_batch_size"]] * (groups * n // FLAGS["global_batch_size"])
    return {"step": seed, "columns": columns, "shares": [1.0] * groups * n, "update_sizes": sizes,
            "file_order": range(groups * n), **batch}


# ---- the reference: a plain loop --------------------------------------------------------------------------
def token_logps(network, tokens, length, temperature):
    logp = (network(torch.tensor(tokens)[None]).logits[0, -length - 1:-1] / temperature).log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens)[-length:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def reference(model, batches, policy_old):
    """The same updates, sample by sample, with nothing packed. Returns the final weights, and loss and norm of each update."""
    from transformers import AutoModelForCausalLM

    f, T = FLAGS, FLAGS["rollout_temperature"]
    network, frozen = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    adam, losses = make_adam(network), []
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
            losses.append((loss.item(), update(network, adam, loss)))
    return network.state_dict(), losses


def make_adam(network, lr=FLAGS["lr"]):
    matrices, vectors = ([p for p in network.parameters() if (p.ndim > 1) == flag] for flag in (True, False))
    return torch.optim.AdamW([dict(params=matrices, weight_decay=FLAGS["weight_decay"]), dict(params=vectors, weight_decay=0.0)],
                             lr=lr, betas=(0.9, FLAGS["adam_beta2"]), eps=FLAGS["adam_eps"])


def update(network, adam, loss):
    """Returns the gradient's norm: what clipping and Adam hide of its scale."""
    adam.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), FLAGS["clip_grad"])
    adam.step()
    return norm.item()


def corrected_reference(model, batches, case):
    """The same for one case of CORRECTED. Returns the final weights, the losses, and the share of tokens that was masked."""
    from transformers import AutoModelForCausalLM

    T, size, kept_tokens, tokens, losses = FLAGS["rollout_temperature"], FLAGS["global_batch_size"], 0, 0, []
    network, frozen, critic = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(3))
    critic.value_head = torch.nn.Linear(critic.config.hidden_size, 1)
    torch.nn.init.zeros_(critic.value_head.weight), torch.nn.init.zeros_(critic.value_head.bias)
    adam, critic_adam = make_adam(network), make_adam(critic, lr=3e-3)
    for step, batch in enumerate(batches):
        row = lambda name, i: torch.as_tensor(batch[name][i], dtype=torch.float32)
        logps = lambda net, i: token_logps(net, batch["tokens"][i], batch["response_lengths"][i], T)
        everyone = range(len(batch["tokens"]))
        if step == 0:                                        # published; not again before step 2
            cycle = copy.deepcopy(network)
        with torch.no_grad():
            old = [logps(cycle, i)[0] for i in everyone]
            ref = [logps(frozen, i)[0] for i in everyone]
        if case == "critic":
            with torch.no_grad():
                before = [token_values(critic, batch["tokens"][i], batch["response_lengths"][i]) for i in everyone]
            advantages, returns = hand_made_gae(batch, ref, before)
        else:
            advantages = hand_made_advantages(case, batch, ref)
        for start in range(0, len(old), size):
            parts = []                                       # (sample, log-probs, entropy, kept tokens, importance weight)
            for i in range(start, start + size):
                logp, entropy = logps(network, i)
                mask = row("loss_mask", i) > 0
                lr = ((old[i] if case == "decoupled" else logp.detach()) - row("rollout_logprobs", i)) * mask
                if case == "decoupled":
                    near = (-lr >= np.log(0.4)) & (-lr <= np.log(2.8)) & ((lr.exp() - 1 - lr).sum() / mask.sum() <= 0.25)
                    weight = lr.sum().exp()
                    weight = weight if 0.03 <= weight <= 3 else 0.0
                else:
                    near = (lr.abs() <= np.log(1.5)) if case == "bypass" else True
                    weight = lr.exp().clamp(max=1.2) if case == "bypass" else 1.0
                parts.append((i, logp, entropy, mask & near, weight))
                kept_tokens, tokens = kept_tokens + (mask & near).sum().item(), tokens + mask.sum().item()
            counts = [kept.sum() for _, _, _, kept, _ in parts]
            mean = 1.0
            if case == "decoupled":
                mean = np.mean([float(weight) for i, *_, weight in parts if batch["loss_mask"][i].any()])
            loss = 0.0
            for (i, logp, entropy, kept, weight), count in zip(parts, counts):
                a = torch.as_tensor(advantages[i], dtype=torch.float32)
                if case == "decoupled":
                    s = ((logp - old[i]).detach() * kept).sum().div(count.clamp(min=1)).exp()
                    ratio = s * (logp - logp.detach()).exp()
                    value = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.3)) * weight / mean
                    loss = loss + (value * kept).sum() / count.clamp(min=1) / sum(c > 0 for c in counts)
                elif case == "critic":
                    ratio = (logp - row("rollout_logprobs", i)).exp()
                    loss = loss + (torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.3)) * kept).sum() / sum(counts)
                else:
                    value = -a * weight * logp * (batch["columns"]["level"][i] if case == "own" else 1.0)
                    value = value - (FLAGS["entropy_coef"] * entropy if case == "bypass" else 0.0)
                    loss = loss + (value * kept).sum() / sum(counts)
            losses.append((loss.item(), update(network, adam, loss)))
            if case == "critic":
                value_loss = 0.0
                for i, _, _, kept, _ in parts:
                    v, target = token_values(critic, batch["tokens"][i], batch["response_lengths"][i]), torch.tensor(returns[i])
                    bounded = torch.minimum(torch.maximum(v, before[i] - 0.05), before[i] + 0.05)
                    value = torch.maximum((v - target) ** 2, (bounded - target) ** 2) / 2
                    value_loss = value_loss + (value * kept).sum() / sum(counts)
                losses[-1] += (value_loss.item(), update(critic, critic_adam, value_loss))
    return network.state_dict(), losses, 1 - kept_tokens / tokens


def token_values(critic, tokens, length):
    hidden = critic.model(torch.tensor(tokens)[None]).last_hidden_state[0, -length - 1:-1]
    return critic.value_head(hidden)[:, 0]


def hand_made_gae(batch, ref, values):
    """Whitened advantages and returns, over the tokens with mask 1 alone: gamma .98, lambda .9, k2 of the KL x .05."""
    advantages, returns = [], []
    for reward, r, p, m, v in zip(batch["rewards"], ref, batch["rollout_logprobs"], batch["loss_mask"], values):
        at, a, after = np.flatnonzero(m), 0.0, 0.0
        rows = np.zeros((2, len(m)))
        for t in at[::-1]:
            gain = -0.05 * (r[t].item() - p[t]) ** 2 / 2 + (reward if t == at[-1] else 0.0)
            a = gain + 0.98 * after - v[t].item() + 0.98 * 0.9 * a
            after = v[t].item()
            rows[:, t] = a, a + after
        advantages.append(rows[0])
        returns.append(rows[1].astype(np.float32))
    counted = np.concatenate([x[m > 0] for x, m in zip(advantages, batch["loss_mask"])])
    return [(x - counted.mean()) / counted.std(ddof=1) for x in advantages], returns


def hand_made_advantages(case, batch, ref):
    rewards, ids, lengths = np.array(batch["rewards"]), np.array(batch["group_ids"]), np.array(batch["response_lengths"])
    if case == "decoupled":
        rewards = rewards - 0.5 * np.maximum(lengths - 6, 0) / 6
        return [r - (rewards[ids == g].sum() - r) / 3 for r, g in zip(rewards, ids)]
    if case == "own":
        return [(r - rewards.mean()) * np.linspace(0, 1, n) for r, n in zip(rewards, lengths)]
    kl = [(r.numpy() - p) ** 2 / 2 * m for r, p, m in zip(ref, batch["rollout_logprobs"], batch["loss_mask"])]
    returns = [r - 0.05 * np.cumsum(k[::-1])[::-1] for r, k in zip(rewards, kl)]
    counted = np.concatenate([x[m > 0] for x, m in zip(returns, batch["loss_mask"])]).astype(np.float64)
    return [(x - counted.mean()) / counted.std(ddof=1) for x in returns]


# ---- the workers ------------------------------------------------------------------------------------------
def work(rank, world, port, jobs, out):
    from megatron.core import parallel_state as mpu

    from trainer import TrainWorker
    cases, master = jobs
    for name, policy_old, args in cases:
        worker = TrainWorker(args, rank, master(name, policy_old))
        metrics = [worker.train(0, make_batch(0))]
        if args.update_weights_interval == 1:
            worker.send_weights([None])                           # to no engine: a version all the same
        os.makedirs(os.path.join(out, f"saved-{name}-{policy_old}"), exist_ok=True)
        worker.save(os.path.join(out, f"saved-{name}-{policy_old}"))
        metrics.append(worker.train(1, make_batch(1)))
        worker.export(os.path.join(out, f"{name}-{policy_old}"))
        if (name, policy_old) == ("tiny_packs", "critic"):      # once more from what was saved
            worker.load(os.path.join(out, f"saved-{name}-{policy_old}"))
            metrics.append(worker.train(1, make_batch(1)))
        if rank == 0:
            torch.save(metrics, os.path.join(out, f"{name}-{policy_old}.pt"))
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()


class Masters:
    """A rendezvous of its own for each case: the ports are found before the processes start."""

    def __init__(self, cases):
        self.ports = {}
        for name, policy_old, _ in cases:
            self.ports[name, policy_old] = pick_port(None, "127.0.0.1", "rendezvous")

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
    cases += [(name, case, parse_args(harness.flags(model, out, "run", **{**PLAIN, **flags, **LAYOUTS[name]})))
              for case, (flags, names) in CORRECTED.items() for name in names]
    for world in (1, 2):
        mine = [case for case in cases if case[2].world_size == world]
        test_model.run_ranks(work, world, (mine, Masters(mine)), str(out), 180)
    batches = [make_batch(0), make_batch(1)]
    return out, ({policy_old: reference(model, batches, policy_old) for policy_old in ("rollout", "recompute")}
                 | {case: corrected_reference(model, batches, case) for case in CORRECTED})


@pytest.mark.contract
@pytest.mark.parallel
@pytest.mark.parametrize("name, policy_old", [(name, "rollout") for name in LAYOUTS] + [("one", "recompute"), ("dp2_split", "recompute")])
def test_two_steps_equal_the_plain_loop(name, policy_old, results):
    """Two batches of two updates each: clip on both sides, dual clip, KL in the reward and in the loss, entropy, temperature,
    weight decay, gradient clipping. Losses and final weights agree however samples were packed and ranks laid out."""
    metrics = compare(name, policy_old, *results)
    if policy_old == "recompute":
        assert all(m["train/first_ppo_kl"] == 0.0 for m in metrics)


@pytest.mark.contract
@pytest.mark.parallel
@pytest.mark.parametrize("name, case", [(name, case) for case, (_, names) in CORRECTED.items() for name in names])
def test_two_corrected_steps_equal_the_plain_loop(name, case, results):
    """Weights and rejections whose means and denominators span the ranks, old log-probs from two steps' common start, an
    advantage for each token, own columns. In the second step of the cycle the old policy is not the current one."""
    metrics = compare(name, case, *results)
    masked, tokens = results[1][case][2], [sum(mask.sum() for mask in make_batch(i)["loss_mask"]) for i in range(2)]
    assert np.average([m["correction/masked_token_frac"] for m in metrics[:2]], weights=tokens) == pytest.approx(masked, abs=1e-6)
    assert 0.05 < masked < 0.8 or not CORRECTED[case][0].get("rollout_rs")
    if case == "critic":
        assert metrics[1]["train/value_clip_frac"] > 0
    if len(metrics) > 2:
        values = lambda m: {k: v.tolist() if torch.is_tensor(v) else v for k, v in m.items()
                            if k != "started" and not k.startswith("perf/")}
        again = metrics.pop()
        assert values(again) == values(metrics[1]), "a resume has forgotten something of the policy or the critic"
    if case == "decoupled":
        assert metrics[0]["train/first_ppo_kl"] == 0.0 != metrics[1]["train/first_ppo_kl"]
        assert metrics[0]["train/overlong_penalty"] < 0
    if case == "own":                                       # a mean over the tokens of each update, then over both
        masks = make_batch(1)["loss_mask"]
        trust = [np.concatenate([np.linspace(0, 1, len(m))[m > 0] for m in masks[i:i + 8]]).mean() for i in (0, 8)]
        assert metrics[1]["train/trust"] == pytest.approx(np.mean(trust), abs=1e-6)


def compare(name, policy_old, out, references):
    """Losses and final weights against the reference's. Returns the metrics of the steps."""
    from safetensors.torch import load_file

    weights, losses = references[policy_old][:2]
    metrics = torch.load(out / f"{name}-{policy_old}.pt")
    steps = metrics[:2]
    names = ("train/loss", "train/grad_norm", "train/value_loss", "train/critic_grad_norm")
    for i, value in enumerate(names[:len(losses[0])]):
        assert [m[value] for m in steps] == pytest.approx([np.mean([x[i] for x in part]) for part in (losses[:2], losses[2:])],
                                                            abs=1e-6, rel=1e-5 if i else 0), value
    folder = out / f"{name}-{policy_old}"
    got = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    moved = max((weights[k] - v).abs().max().item() for k, v in load_file(out / "model" / "model.safetensors").items())
    worst = max((weights[k] - got[k]).abs().max().item() for k in got)
    assert moved > 1e-3 and worst < 1e-6, (moved, worst)
    return metrics
