"""Training: one `TrainWorker` on each rank. A batch goes in, weights one step further come out.

Every rank holds the whole batch (lists by column), so advantages, denominators and the cut into ranks and micro-batches are
computed by each of them alike, without any communication; only log-probs and gradients are distributed.
"""

import os
import time

import model   # before megatron: it makes megatron importable, and quiet, on a machine without CUDA

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

import weight_map
from loss import ADVANTAGES, kl_estimate, policy_objective, token_weights
from sync_weights import WeightSender


class TrainWorker:
    def __init__(self, args, rank, master):
        """master: "address:port" of rank 0. Blocks until all ranks have joined."""
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.world_size) if args.device == "cpu" else 4)
        os.environ["NCCL_CUMEM_ENABLE"] = "0"     # SGLang sets that for itself, and both ends of a group must agree
        self.args, self.rank = args, rank
        model.init_parallel(rank, args.world_size, f"tcp://{master}", args.tensor_model_parallel_size,
                            args.pipeline_model_parallel_size, args.seed, args.distributed_timeout)
        self.hf = model.load_hf_config(args.hf_checkpoint)
        policy = model.build_model(self.hf, args)
        model.load_weights(policy, self.hf, args.hf_checkpoint)
        self.model, self.optimizer, self.scheduler = model.wrap(policy, args)
        self.reference = None
        if args.use_reference:
            self.reference = model.build_model(self.hf, args)
            model.load_weights(self.reference, self.hf, args.ref_load)
            self.reference.eval()
        self.dp_rank, self.dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.sender = WeightSender(args, self.model, self.hf)

    def ready(self):
        """Answers once the constructor is through: an error in it surfaces here."""

    # ---- one step -----------------------------------------------------------------------------------------
    def train(self, step, batch):
        """One pass over the batch, an optimizer step for each `global_batch_size` samples. Returns the step's metrics."""
        started, size, lr = time.time(), self.args.global_batch_size, self.optimizer.param_groups[0]["lr"]
        updates = [self.plan(batch, range(i, i + size)) for i in range(0, len(batch["tokens"]), size)]
        self.add_columns(batch, updates)
        prepared = time.time()            # with --policy-old recompute: the pass for old log-probs lies before
        sums = [self.update(batch, plan) for plan in updates]
        return {**step_metrics(sums), "train/lr": lr, "perf/log_probs_time": prepared - started,
                "perf/train_time": time.time() - started}

    def plan(self, batch, indices):
        """Cuts the samples `indices` into micro-batches. Returns this rank's list of lists of sample indices."""
        lengths = {i: len(batch["tokens"][i]) for i in indices}
        shares = balance(lengths, self.dp_size)
        budget = self.args.max_tokens_per_gpu if self.args.use_dynamic_batch_size else None
        packs = [pack(share, lengths, budget, self.args.micro_batch_size) for share in shares]
        return split_to(packs[self.dp_rank], max(len(p) for p in packs))

    def add_columns(self, batch, updates):
        """Everything that the loss needs beside the engine's answer: old and reference log-probs, advantages, weights."""
        args, count = self.args, len(batch["tokens"])
        mine = [micro for plan in updates for micro in plan]
        batch["old_logprobs"] = batch["rollout_logprobs"]
        if args.policy_old == "recompute":
            batch["old_logprobs"] = self.log_probs(self.model, batch, mine)
        rewards = list(batch["rewards"])
        if args.use_reference:
            batch["ref_logprobs"] = self.log_probs(self.reference, batch, mine)
            if args.kl_coef:
                rewards = self.penalize(batch, rewards, mine)
        batch["advantages"] = ADVANTAGES[args.advantage_estimator](rewards, batch["group_ids"],
                                                                   not args.disable_grpo_std_normalization)
        batch["weights"] = [None] * count
        size = args.global_batch_size
        for i in range(0, count, size):
            batch["weights"][i:i + size] = token_weights(batch["loss_mask"][i:i + size], args.loss_agg_mode,
                                                         args.rollout_max_response_len)

    def log_probs(self, network, batch, micros):
        """Log-probs of the responses of the samples in `micros`, without gradient: a list over the whole batch (None elsewhere).

        The same micro-batches as in training, so that on unchanged weights the result is the same to the last bit.
        """
        found = [None] * len(batch["tokens"])
        packs = [self.to_pack(batch, micro) for micro in micros]

        def collect(hidden, i):
            logp, _ = self.head(network, hidden, packs[i])
            return logp.detach()

        flat = model.run([network], packs, collect, forward_only=True)
        for i, micro in enumerate(micros):
            lengths = [batch["response_lengths"][s] for s in micro]
            logp = flat[i].cpu() if flat else torch.zeros(sum(lengths))   # other stages never look at them
            for s, part in zip(micro, logp.split(lengths)):
                found[s] = part
        return found

    def penalize(self, batch, rewards, micros):
        """rewards - kl_coef x KL of each sample to the reference (summed over its tokens); every rank gets every sample's."""
        kl = torch.zeros(len(rewards), dtype=torch.float64, device=device())
        if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0:
            for s in (s for micro in micros for s in micro):
                mask = torch.as_tensor(batch["loss_mask"][s]) > 0
                old, ref = torch.as_tensor(batch["old_logprobs"][s]), batch["ref_logprobs"][s]
                kl[s] = kl_estimate(old[mask], ref[mask], self.args.kl_loss_type).double().sum()
        dist.all_reduce(kl)
        return [r - self.args.kl_coef * k for r, k in zip(rewards, kl.tolist())]

    def update(self, batch, micros):
        """One optimizer step over this rank's micro-batches. Returns the global sums behind the metrics."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        packs = [self.to_pack(batch, micro) for micro in micros]
        columns = [self.to_columns(batch, micro) for micro in micros]

        def objective(hidden, i):
            logp, entropy = self.head(self.model, hidden, packs[i], entropy=self.args.entropy_coef != 0)
            return policy_objective(self.args, logp, entropy, columns[i])

        sums = total(model.run([self.model], packs, objective))
        ok, grad_norm, _ = self.optimizer.step()
        if not ok:
            raise RuntimeError("the gradient is not finite: the optimizer refused the step")
        self.scheduler.step(increment=1)
        return {**sums, "grad_norm": float(grad_norm)}

    # ---- tensors ------------------------------------------------------------------------------------------
    def to_pack(self, batch, micro):
        samples = [(batch["tokens"][s].tolist(), batch["response_lengths"][s]) for s in micro]
        align = self.args.tensor_model_parallel_size if self.args.sequence_parallel else 1
        return model.pack(samples, device(), align)

    def to_columns(self, batch, micro):
        """The columns of `policy_objective` for one micro-batch: [N] tensors over its response tokens."""
        def flat(name):
            return torch.from_numpy(np.concatenate([np.asarray(batch[name][s], np.float32) for s in micro])).to(device())

        lengths = torch.tensor([batch["response_lengths"][s] for s in micro])
        advantage = torch.tensor([batch["advantages"][s] for s in micro], dtype=torch.float32)
        columns = {"weight": flat("weights"), "mask": flat("loss_mask"), "old_logp": flat("old_logprobs"),
                   "rollout_logp": flat("rollout_logprobs"), "advantage": advantage.repeat_interleave(lengths).to(device())}
        if self.args.use_reference:
            columns["ref_logp"] = flat("ref_logprobs")
        return columns

    def head(self, network, hidden, packed, entropy=False):
        return model.token_logprobs(network, hidden, packed.labels, self.args.rollout_temperature,
                                    chunk=self.args.log_probs_chunk_size, entropy=entropy)

    # ---- weights ------------------------------------------------------------------------------------------
    def gpu(self):
        """The id of this rank's device, as CUDA_VISIBLE_DEVICES of an engine beside it names it."""
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def join_engines(self, urls, group):
        self.sender.join(urls, group)

    def leave_engines(self):
        self.sender.leave()

    def send_weights(self):
        return self.sender.send()

    def save(self, folder):
        model.save_rank(os.path.join(folder, f"rank_{self.rank:05d}.pt"), self.model, self.optimizer, self.scheduler)

    def load(self, folder):
        model.load_rank(os.path.join(folder, f"rank_{self.rank:05d}.pt"), self.model, self.optimizer, self.scheduler)

    def export(self, folder):
        weight_map.save_hf(self.model, self.hf, self.args.hf_checkpoint, folder)


# ---- batching ---------------------------------------------------------------------------------------------
def balance(lengths, ranks):
    """Deals samples {index: tokens} to ranks, equally many to each, longest first to the rank with the fewest tokens."""
    shares, tokens, room = [[] for _ in range(ranks)], [0] * ranks, -(-len(lengths) // ranks)
    for i in sorted(lengths, key=lambda i: (-lengths[i], i)):
        rank = min((r for r in range(ranks) if len(shares[r]) < room), key=lambda r: tokens[r])
        shares[rank].append(i)
        tokens[rank] += lengths[i]
    return shares


def pack(share, lengths, budget, size):
    """Micro-batches of one rank: by token budget (first fit, longest first), or `size` samples each when budget is None."""
    if budget is None:
        return [share[i:i + size] for i in range(0, len(share), size)]
    bins, room = [], []
    for i in share:                      # `balance` hands them over longest first
        b = next((b for b in range(len(bins)) if room[b] >= lengths[i]), None)
        if b is None:
            bins.append([])
            room.append(budget)
            b = len(bins) - 1
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins


def split_to(bins, count):
    """Halves the fullest micro-batches until there are `count`: data-parallel ranks need equally many (pipelines of
    experts, and collectives in them, run in step)."""
    bins = list(bins)
    while len(bins) < count:
        fullest = max(range(len(bins)), key=lambda b: len(bins[b]))
        half = len(bins[fullest]) // 2
        bins[fullest:fullest + 1] = [bins[fullest][:half], bins[fullest][half:]]
    return bins


# ---- metrics ----------------------------------------------------------------------------------------------
def total(sums):
    """Adds the micro-batches' sums over the data-parallel ranks of the last stage; every rank gets the result."""
    names = None
    if sums and mpu.get_tensor_model_parallel_rank() == 0:
        names = sorted(sums[0])
        vector = torch.stack([torch.stack([s[name] for s in sums]).sum() for name in names])
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if names is None else dict(zip(names, vector.tolist())))
    parts = [part for part in everyone if part is not None]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def step_metrics(updates):
    """Sums of each update -> means over its tokens, averaged over the updates. `first_...` are of the first update: there
    nothing has moved since the old log-probs were taken."""
    whole = ("loss", "pg_loss", "grad_norm")
    means = [{name: value if name in whole else value / max(u["tokens"], 1) for name, value in u.items()} for u in updates]
    metrics = {f"train/{name}": sum(m[name] for m in means) / len(means) for name in means[0] if name != "tokens"}
    metrics["train/first_ppo_kl"] = means[0]["ppo_kl"]
    metrics["train/logprob_abs_diff"] = means[0]["logprob_abs_diff"]
    return metrics


def device():
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
