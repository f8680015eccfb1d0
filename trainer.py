"""Training: one `TrainWorker` on each rank. A batch goes in, weights one step further come out.

Every rank holds the whole batch (lists by column), so advantages, denominators and the cut into ranks and micro-batches are
computed by each of them alike, without any communication; only log-probs and gradients are distributed.
"""

import base64
import contextlib
import gc
import math
import os
import time

import model   # before megatron: it makes megatron importable, and quiet, on a machine without CUDA

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter

import checkpoint
import critic
import rank_state
import weight_map
from args import load_function
from loss import (ADVANTAGES, LOSSES, correction_metrics, gae, importance_weights, kept_scale, kl_estimate, overlong_penalty,
                  policy_objective, token_weights, weight_sum)
from sync_weights import WeightSender
from watchdog import Watchdog


class TrainWorker:
    def __init__(self, args, rank, master):
        """master: "address:port" of rank 0. Blocks until all ranks have joined."""
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.world_size) if args.device == "cpu" else 4)
        os.environ["NCCL_CUMEM_ENABLE"] = "0"     # SGLang sets that for itself, and both ends of a group must agree
        self.args, self.rank = args, rank
        model.init_parallel(rank, args.world_size, f"tcp://{master}", args.tensor_model_parallel_size,
                            args.pipeline_model_parallel_size, args.seed, args.distributed_timeout,
                            args.expert_model_parallel_size)
        self.hf = model.load_hf_config(args.hf_checkpoint)
        policy = model.build_model(self.hf, args)
        model.load_weights(policy, self.hf, args.hf_checkpoint)
        self.model, self.optimizer, self.scheduler = model.wrap(policy, args)
        self.reference = None
        if args.use_reference:
            self.reference = model.build_model(self.hf, args)
            model.load_weights(self.reference, self.hf, args.ref_load)
            self.reference.eval()
        self.critic = critic.make_critic(self.hf, args) if args.advantage_estimator == "ppo" else None
        self.advantages, self.policy_loss = ADVANTAGES[args.advantage_estimator], LOSSES[args.loss_type]
        if args.custom_advantage_path:
            self.advantages = load_function(args.custom_advantage_path, "--custom-advantage-path", 2)
        if args.custom_loss_path:
            self.policy_loss = load_function(args.custom_loss_path, "--custom-loss-path", 3)
        self.cycle_step, self.cycle_weights = None, None   # of the last published version; kept where old log-probs need them
        self.published = {}                                # version -> copy of its weights; kept around a parity step
        self.dp_rank, self.dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.sender = WeightSender(args, self.model, self.hf)
        last = rank == args.world_size - 1                  # of the last pipeline stage: the terminal shows what it counts
        self.watchdog = Watchdog(f"training rank {rank}", args, tick=1.0 if last else 5.0)
        self.steps = None                                  # that were trained, once one was in this process

    def ready(self):
        """Answers once the constructor is through: an error in it surfaces here."""
        gc.freeze()      # see placement.launch
        self.watchdog.start()

    # ---- one step -----------------------------------------------------------------------------------------
    def train(self, step, batch):
        """One pass over the batch, an optimizer step for each of its `update_sizes`. Returns the step's metrics."""
        with self.watchdog.at(f"the training of step {step}"):
            return self.train_step(step, batch)

    def train_step(self, step, batch):
        started, lr = time.time(), self.optimizer.param_groups[0]["lr"]
        if self.args.policy_old == "recompute" and self.cycle_step is None:
            self.begin_cycle(step)
        updates = [self.plan(batch, indices) for indices in update_ranges(batch)]
        noted = self.parity(step, batch, [micro for plan in updates for micro in plan])
        noted |= self.add_columns(step, batch, updates)
        prepared = time.time()            # all passes without gradient lie before: old and reference log-probs, values, parity
        self.steps = math.nan              # from here to the end the weights are of no step
        self.watchdog.begin("micro-batch", sum(map(len, updates)))
        sums = [self.update(batch, plan) for plan in updates]
        self.steps = step + 1
        metrics = {**step_metrics(sums), **noted, "train/lr": lr, "perf/log_probs_time": prepared - started,
                   "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 1e9}
        if self.args.record_path:         # beside the recorded batch: how far engine and trainer are apart, token by token
            rows = self.everywhere(batch, [micro for plan in updates for micro in plan], batch["trained_logprobs"])
            metrics |= {"logprobs": torch.cat([rows[i] for i in batch["file_order"]]).float()} if self.rank == 0 else {}
        if self.args.colocate and self.args.device == "cuda":
            torch.cuda.empty_cache()      # an engine wants its memory back on this GPU
        return {**metrics, "started": started, "perf/train_time": time.time() - started}

    def plan(self, batch, indices):
        """Cuts the samples `indices` into micro-batches. Returns this rank's list of lists of sample indices."""
        lengths = {i: len(batch["tokens"][i]) for i in indices}
        shares = balance(lengths, self.dp_size)
        budget = self.args.max_tokens_per_gpu if self.args.use_dynamic_batch_size else None
        packs = [pack(share, lengths, budget, self.args.micro_batch_size) for share in shares]
        return split_to(packs[self.dp_rank], max(len(p) for p in packs))

    def add_columns(self, step, batch, updates):
        """Everything that the loss needs beside the engine's answer: old and reference log-probs, advantages, weights.

        An advantage function finds in the batch, for each sample of the whole batch on every rank: rewards [S] (the task's, with
        the overlong penalty and the KL penalty), scores [S] (without KL), kl [S][n] (to the reference, zeros without --kl-coef),
        group_ids, shares [S] (1, or 1 / samples of an attempt that made several), tokens, response_lengths, loss_mask [S][n],
        rollout_logprobs [S][n], versions, and columns {name: [S]}.
        """
        args, lengths = self.args, batch["response_lengths"]
        mine = [micro for plan in updates for micro in plan]
        batch["old_logprobs"], batch["trained_logprobs"] = batch["rollout_logprobs"], {}
        if args.policy_old == "recompute":
            with self.other_weights(None if step == self.cycle_step else self.cycle_weights):
                batch["old_logprobs"] = self.log_probs(self.model, batch, mine)
        penalties = [0.0] * len(lengths)
        if args.overlong_buffer_len:
            buffer = args.overlong_buffer_len, args.overlong_penalty_factor
            penalties = [overlong_penalty(n, args.rollout_max_response_len, *buffer) for n in lengths]
        batch["scores"] = [reward + penalty for reward, penalty in zip(batch["rewards"], penalties)]
        batch["kl"] = [torch.zeros(n) for n in lengths]
        if args.use_reference:
            batch["ref_logprobs"] = self.log_probs(self.reference, batch, mine)
            if args.kl_coef:
                batch["kl"] = self.token_kl(batch, mine)
        if self.critic:
            batch["values"] = self.everywhere(batch, mine, self.values(batch, mine))
            batch["gae"], batch["returns"] = gae(batch["scores"], batch["values"], batch["loss_mask"], args.gamma, args.lambd,
                                                 batch["kl"], args.kl_coef)
        batch["rewards"] = [score - args.kl_coef * kl.sum().item() for score, kl in zip(batch["scores"], batch["kl"])]
        batch["advantages"] = check_advantages(self.advantages(args, batch), lengths)
        batch["weights"] = []
        for indices in update_ranges(batch):
            masks = [batch["loss_mask"][i] for i in indices]
            batch["weights"] += token_weights(masks, args.loss_agg_mode, args.loss_scale_factor)
        return {"train/overlong_penalty": sum(penalties) / len(lengths)} if args.overlong_buffer_len else {}

    def log_probs(self, network, batch, micros):
        """Log-probs of the responses of the samples in `micros`, without gradient: a list over the whole batch (None elsewhere).

        The same micro-batches as in training, so that on unchanged weights the result is the same to the last bit.
        """
        packs = [self.to_pack(batch, micro) for micro in micros]
        self.watchdog.begin("log-probs, micro-batch", len(packs))

        def collect(hidden, i):
            logp, _ = self.head(network, hidden, packs[i])
            return logp.detach()

        return by_sample(batch, micros, model.run([network], packs, collect, forward_only=True))

    def values(self, batch, micros):
        """The critic's values of the same tokens, in the same form."""
        return by_sample(batch, micros, critic.predict(self.critic, [self.to_pack(batch, micro) for micro in micros]))

    def token_kl(self, batch, micros):
        """KL to the reference of every token of the whole batch, on every rank: S tensors [n], 0 where masked."""
        rows = [None] * len(batch["tokens"])
        for s in (s for micro in micros for s in micro):
            mask, old = torch.as_tensor(batch["loss_mask"][s]) > 0, torch.as_tensor(batch["old_logprobs"][s])
            rows[s] = torch.where(mask, kl_estimate(old, batch["ref_logprobs"][s], self.args.kl_loss_type), 0.0)
        return self.everywhere(batch, micros, rows)

    def everywhere(self, batch, micros, rows):
        """Rows that each rank has of its own samples, S tensors [n], as rows of the whole batch on every rank, float64."""
        lengths = batch["response_lengths"]
        flat = torch.zeros(sum(lengths), dtype=torch.float64, device=device())
        if speaks():
            parts = flat.split(lengths)
            for s in (s for micro in micros for s in micro):
                parts[s].copy_(rows[s])
        dist.all_reduce(flat)
        return flat.cpu().split(lengths)

    def begin_cycle(self, step):
        """The weights are the ones just published: with several steps to a version they are kept on the CPU, since each
        of these steps takes its old log-probs from them."""
        self.cycle_step = step
        if self.args.update_weights_interval > 1:
            self.cycle_weights = self.copy_weights()

    def copy_weights(self):
        return [p.detach().to("cpu", copy=True) for p in self.model.parameters()]

    @contextlib.contextmanager
    def other_weights(self, weights):
        """Within the block the model has these weights (None: its own). The optimizer's own copies stay as they are."""
        if weights is None:
            yield
            return
        current = self.copy_weights()
        try:
            self.put_weights(weights)
            yield
        finally:
            self.put_weights(current)

    def put_weights(self, weights):
        for p, value in zip(self.model.parameters(), weights):
            p.data.copy_(value)

    # ---- parity budget ------------------------------------------------------------------------------------
    def parity(self, step, batch, micros):
        """Every --parity-interval steps: how far engine and trainer are apart, |difference of log-probs| per token, in two parts.
        The mismatch is that on the same weights, so what kernels, dtypes and flags make; the staleness is what the steps
        since have changed: old weights against the current ones, both by the trainer. Measured on tokens of the last two
        published versions, which are kept for it; `parity/coverage` is their share."""
        interval, k = self.args.parity_interval, self.args.update_weights_interval
        if interval is None:
            return {}
        if step % k == 0 and -step % interval <= 2 * k:    # else a parity step is far
            self.published = dict([*self.published.items(), (step, self.copy_weights())][-2:])
        if step % interval:
            return {}
        now, sums, largest = self.log_probs(self.model, batch, micros), torch.zeros(4, dtype=torch.float64), 0.0
        tokens = sum(float(np.sum(mask)) for mask in batch["loss_mask"])
        routing = torch.zeros(2, dtype=torch.float64, device=device())
        for version, weights in self.published.items():
            if all(run[0] != version for runs in batch["versions"] for run in runs):
                continue
            with self.other_weights(None if version == step else weights), self.routing(batch, micros, version, routing):
                then = self.log_probs(self.model, batch, micros)
            for s in (s for micro in micros for s in micro) if speaks() else ():
                part = np.repeat([v == version for v, _ in batch["versions"][s]], [n for _, n in batch["versions"][s]])
                part = torch.from_numpy(part & (np.asarray(batch["loss_mask"][s]) > 0))
                lr = (then[s] - torch.as_tensor(batch["rollout_logprobs"][s])).double()[part]
                sums += torch.stack([torch.tensor(float(part.sum())).double(), lr.abs().sum(), (lr.exp() - 1 - lr).sum(),
                                     (now[s] - then[s]).double()[part].abs().sum()])
                largest = max([largest, *lr.abs().tolist()])
        sums, largest = sums.to(device()), torch.tensor(largest, dtype=torch.float64, device=device())
        for counted in (sums, routing):
            dist.all_reduce(counted)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        count, mismatch, k3, staleness = sums.tolist()
        if not count:
            return {"parity/coverage": 0.0}
        routed = {"parity/routing_mismatch": (routing[0] / routing[1]).item()} if routing[1] else {}
        return {**routed, "parity/coverage": count / tokens, "parity/mismatch": mismatch / count,
                "parity/mismatch_max": largest.item(), "parity/mismatch_k3": k3 / count, "parity/staleness": staleness / count}

    @contextlib.contextmanager
    def routing(self, batch, micros, version, counts):
        """Adds to counts [2], for a pass over `micros` within the block: the (token, layer) pairs for which router and engine
        chose other sets of experts, and all pairs of which an engine with weights of `version` said what it chose. Of a pair
        one rank of a replica counts: tensor parallel ranks, which with experts are sequence parallel, see other tokens."""
        def compare(router, said, output):
            chosen, (places, experts) = output[1].flatten(0, -2), next(said)
            places = places - self.args.sequence_parallel * mpu.get_tensor_model_parallel_rank() * len(chosen)
            here = (places >= 0) & (places < len(chosen))
            chosen, experts = chosen[places[here]], experts[here, router.layer_number - 1]
            other = (chosen != torch.zeros_like(chosen).scatter(1, experts, True)).any(-1)
            counts.add_(torch.stack([other.sum(), here.sum()]))

        routers = [module for module in self.model.modules() if isinstance(module, TopKRouter)]
        rows, hooks = [self.engine_routing(batch, micro, version) for micro in micros if routers], []
        for router in routers:
            said = iter(rows)
            hooks.append(router.register_forward_hook(lambda router, _, output, said=said: compare(router, said, output)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def engine_routing(self, batch, micro, version):
        """The experts [R, layers, k] that engines with weights of `version` chose, and where in this micro-batch: [R]. The row
        of a response token is that of the token before it, which made its logits."""
        places, experts, start = [], [np.zeros((0, self.hf.num_hidden_layers, self.hf.num_experts_per_tok), np.int64)], 0
        for s in micro:
            tokens, n = len(batch["tokens"][s]), batch["response_lengths"][s]
            versions = np.repeat([v for v, _ in batch["versions"][s]], [count for _, count in batch["versions"][s]])
            for first, count, code in batch["experts"][s] if n else ():
                if versions[first] == version:
                    places += range(start + tokens - n - 1 + first, start + tokens - n - 1 + first + count)
                    experts.append(np.frombuffer(base64.b64decode(code), np.int32).reshape(count, *experts[0].shape[1:]))
            start += tokens
        return torch.tensor(places, dtype=torch.long, device=device()), torch.from_numpy(np.concatenate(experts)).to(device())

    def mean_weight(self, columns):
        """What --rollout-is-batch-normalize divides by: the mean over this update's tokens (or samples) on all ranks. In
        decoupled mode the weights do not depend on the policy that is being trained, so it is known before the first pass."""
        args, sums = self.args, torch.zeros(2, dtype=torch.float64, device=device())
        for c in columns if speaks() else ():
            weights = importance_weights(c["old_logp"] - c["rollout_logp"], c["mask"], c["sample"], args.rollout_is,
                                         *args.rollout_is_bounds)
            sums += weight_sum(weights, c["mask"], c["sample"], args.rollout_is)
        dist.all_reduce(sums)
        return (sums[0] / sums[1].clamp(min=1)).item() or 1.0

    def update(self, batch, micros):
        """One optimizer step over this rank's micro-batches. Returns the global sums behind the metrics."""
        self.watchdog.alive()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        packs = [self.to_pack(batch, micro) for micro in micros]
        columns = [self.to_columns(batch, micro) for micro in micros]
        is_mean = self.mean_weight(columns) if self.args.rollout_is_batch_normalize else 1.0
        logps = {}

        def objective(hidden, i):
            logp, entropy = self.head(self.model, hidden, packs[i], entropy=self.args.entropy_coef != 0)
            logps[i] = logp.detach()
            return policy_objective(self.args, self.policy_loss, logp, entropy, columns[i], is_mean)

        sums = total(model.run([self.model], packs, objective))
        found = by_sample(batch, micros, logps)
        batch["trained_logprobs"] |= {s: found[s] for micro in micros for s in micro}
        if self.critic:
            parts, norm = critic.update(self.critic, packs, columns)
            sums |= {**total(parts), "critic_grad_norm": norm}
        if self.args.rejections and self.args.rs_denominator == "kept":   # known only now: what was kept depends on the policy
            counts = [sums[f"correction/{name}"] for name in ("tokens", "kept_tokens", "seqs", "kept_seqs")]
            scale = kept_scale(self.args.loss_agg_mode, *counts)
            self.model.scale_gradients(scale)
            sums["loss"], sums["pg_loss"] = sums["loss"] * scale, sums["pg_loss"] * scale
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
        """The columns of `policy_objective` for one micro-batch: [N] tensors over its response tokens. A value of a sample
        stands at each of its tokens."""
        lengths = [batch["response_lengths"][s] for s in micro]

        def flat(rows):
            parts = [np.broadcast_to(np.asarray(rows[s], np.float32), n) for s, n in zip(micro, lengths)]
            return torch.from_numpy(np.concatenate(parts)).to(device())

        columns = {name: flat(rows) for name, rows in batch["columns"].items()}       # own ones, for --custom-loss-path
        columns |= {"weight": flat(batch["weights"]), "mask": flat(batch["loss_mask"]), "old_logp": flat(batch["old_logprobs"]),
                    "rollout_logp": flat(batch["rollout_logprobs"]), "advantage": flat(batch["advantages"])}
        if self.args.use_reference:
            columns["ref_logp"] = flat(batch["ref_logprobs"])
        if self.critic:
            columns |= {"old_value": flat(batch["values"]), "return": flat(batch["returns"])}
        starts = np.cumsum([0] + lengths[:-1])
        return columns | {"sample": torch.from_numpy(np.repeat(starts, lengths)).to(device())}

    def head(self, network, hidden, packed, entropy=False):
        self.watchdog.count()
        return model.token_logprobs(network, hidden, packed.labels, self.args.rollout_temperature,
                                    chunk=self.args.log_probs_chunk_size, entropy=entropy)

    def trained_steps(self):
        """Steps in the weights; None: as many as were loaded."""
        return self.steps

    # ---- weights ------------------------------------------------------------------------------------------
    def gpu(self):
        """The id of this rank's device, as CUDA_VISIBLE_DEVICES of an engine beside it names it."""
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def join_engines(self, urls, group):
        with self.watchdog.at("the sync: joining the engines"):
            return self.sender.join(urls, group)

    def leave_engines(self):
        self.sender.leave()

    def prepare_weights(self):
        self.sender.prepare()

    def send_weights(self, updated):
        """updated: a list of the reference, which Ray would wait for if it stood alone."""
        self.cycle_step = None                # the next step begins a cycle of old log-probs, wherever the loop began anew
        with self.watchdog.at("the sync: sending the weights"):
            self.sender.send(*updated)

    def fingerprints(self):
        return self.sender.fingerprints()

    def save(self, folder):
        """Returns the sizes and checksums of this rank's files."""
        with self.watchdog.at("the saving of a checkpoint"):
            path = os.path.join(folder, f"rank_{self.rank:05d}.pt")
            written = rank_state.save(path, self.model, self.optimizer, self.scheduler)
            return written | (critic.save(self.critic, folder, self.rank) if self.critic else {})

    def damaged(self, folder, files):
        """See checkpoint.damaged: each rank reads its share of the files."""
        return checkpoint.damaged(folder, files)

    def load(self, folder):
        rank_state.load(os.path.join(folder, f"rank_{self.rank:05d}.pt"), self.model, self.optimizer, self.scheduler, self.hf)
        if self.critic and not self.args.eval_only:
            critic.load(self.critic, folder, self.rank, self.hf)

    def export(self, folder):
        weight_map.save_hf(self.model, self.hf, self.args.hf_checkpoint, folder)


# ---- batching ---------------------------------------------------------------------------------------------
def update_ranges(batch):
    """The sample indices of each optimizer step."""
    ends = np.cumsum(batch["update_sizes"]).tolist()
    return [range(end - size, end) for end, size in zip(ends, batch["update_sizes"])]


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


def check_advantages(advantages, lengths):
    """The rows of an advantage function as S numpy arrays [] or [n]; ValueError for another shape or what is not finite."""
    rows = [np.asarray(row, np.float64) for row in advantages]
    if len(rows) != len(lengths):
        raise ValueError(f"--custom-advantage-path returned {len(rows)} advantages for {len(lengths)} samples")
    for i, (row, n) in enumerate(zip(rows, lengths)):
        if row.shape not in ((), (n,)) or not np.isfinite(row).all():
            raise ValueError(f"--custom-advantage-path: the advantage of sample {i} must be a finite number, or one for each of "
                             f"its {n} tokens, is {row}")
    return rows


def by_sample(batch, micros, flat):
    """[N] tensors of the micro-batches -> a list over the whole batch of [n] tensors on the CPU (None elsewhere)."""
    found = [None] * len(batch["tokens"])
    for i, micro in enumerate(micros):
        lengths = [batch["response_lengths"][s] for s in micro]
        row = flat[i].cpu() if flat else torch.zeros(sum(lengths))   # other stages never look at them
        for s, part in zip(micro, row.split(lengths)):
            found[s] = part
    return found


# ---- metrics ----------------------------------------------------------------------------------------------
def speaks():
    """Whether this rank holds log-probs and counts: of the ranks that hold the same ones, one does."""
    return mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0


def add_up(name, values):
    return max(values) if name.endswith("_max") else sum(values)


def total(sums):
    """Adds the micro-batches' sums over the data-parallel ranks of the last stage; every rank gets the result."""
    names = None
    if sums and speaks():
        names = sorted(sums[0])
        vector = torch.stack([torch.as_tensor(add_up(name, [s[name] for s in sums])) for name in names])
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if names is None else dict(zip(names, vector.tolist())))
    parts = [part for part in everyone if part is not None]
    return {name: add_up(name, [part[name] for part in parts]) for name in parts[0]}


def step_metrics(updates):
    """Sums of each update -> means over its tokens, averaged over the updates. `first_...` are of the first update: there
    nothing has moved since the old log-probs were taken."""
    whole, prefix = ("loss", "pg_loss", "grad_norm", "value_loss", "critic_grad_norm"), "correction/"
    apart = {name: add_up(name, [u[name] for u in updates]) for name in updates[0] if name.startswith(prefix)}
    correction = correction_metrics({name.removeprefix(prefix): value for name, value in apart.items()})
    updates = [{name: value for name, value in u.items() if not name.startswith(prefix)} for u in updates]
    means = [{name: value if name in whole else value / max(u["tokens"], 1) for name, value in u.items()} for u in updates]
    metrics = {f"train/{name}": sum(m[name] for m in means) / len(means) for name in means[0] if name != "tokens"}
    metrics["train/first_ppo_kl"] = means[0]["ppo_kl"]
    metrics["train/logprob_abs_diff"] = means[0]["logprob_abs_diff"]
    return metrics | {prefix + name: value for name, value in correction.items()}


def device():
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
