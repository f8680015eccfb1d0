"""Advantages, policy losses, KL. Plain torch: imports neither ray nor megatron.

Everything per token is flat: [N] values of N response tokens, sample after sample, however they were packed. A loss is a
sum over tokens of weight x value, and the weights (`token_weights`) carry the denominators of the whole global batch. So
the gradient cannot depend on how samples were cut into micro-batches and ranks: it is the same sum in another order.
"""

import torch


# ---- advantages -------------------------------------------------------------------------------------------
def grpo_advantages(rewards, group_ids, std_normalization=True):
    """Reward minus the mean of its own group, divided by the group's standard deviation (unbiased, plus 1e-6).

    rewards: [S] floats; group_ids: [S] ints, in any order and in groups of any size. A group of one has advantage 0.
    Returns [S] floats. GRPO: arXiv 2402.03300, eq. of section 4.1.2; without the division: Dr. GRPO, arXiv 2503.20783.
    """
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    group_ids = torch.as_tensor(group_ids)
    for group in group_ids.unique():
        member = group_ids == group
        centred = rewards[member] - rewards[member].mean()
        if std_normalization and len(centred) > 1:
            centred = centred / (rewards[member].std() + 1e-6)
        advantages[member] = centred
    return advantages.tolist()


ADVANTAGES = {"grpo": grpo_advantages}


# ---- aggregation ------------------------------------------------------------------------------------------
def token_weights(masks, mode, constant=1.0):
    """Weights w such that sum(w x token loss) over the global batch is the wanted mean.

    masks: S lists of 0/1, one for each sample of the *global* batch. Returns S lists of floats.
    token-mean: 1 / all tokens (DAPO, arXiv 2503.14476); seq-mean-token-mean: 1 / (S' x tokens of the sample) (GRPO);
    seq-mean-token-sum-norm: 1 / (S' x constant) (Dr. GRPO). S' counts the samples that have a token in the loss.
    A batch without any token in the loss has weights 0.
    """
    counts = [sum(mask) for mask in masks]
    total, samples = sum(counts), sum(count > 0 for count in counts)
    if mode == "token-mean":
        scales = [1 / total if total else 0.0] * len(masks)
    elif mode == "seq-mean-token-mean":
        scales = [1 / (samples * count) if count else 0.0 for count in counts]
    elif mode == "seq-mean-token-sum-norm":
        scales = [1 / (samples * constant) if samples else 0.0] * len(masks)
    else:
        raise ValueError(f"unknown aggregation {mode!r}")
    return [[m * scale for m in mask] for mask, scale in zip(masks, scales)]


# ---- policy loss ------------------------------------------------------------------------------------------
def ppo_clip_loss(logp, old_logp, advantages, eps_clip, eps_clip_high, eps_clip_c=None):
    """PPO's clipped surrogate for each token: max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high)), r = e^(logp - old).

    All [N]; returns (loss [N], clipped [N] 0/1: the clipped branch is the one that counts). PPO: arXiv 1707.06347, eq. 7;
    a higher upper clip: DAPO, arXiv 2503.14476; eps_clip_c: dual clip, the loss of a negative advantage is at most
    -A c (arXiv 1912.09729, eq. 5).
    """
    ratio = log_ratio(logp, old_logp).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if eps_clip_c is not None:
        ceiling = -advantages * eps_clip_c
        too_big = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(too_big, ceiling, loss), clipped | too_big
    return loss, clipped.to(loss.dtype)


def log_ratio(logp, other):
    """logp - other, clamped to +-20 so that its exponential stays finite."""
    return (logp - other).clamp(-20, 20)


def kl_estimate(logp, ref_logp, kind):
    """Estimate of KL(policy || reference) for each token, from the policy's own samples. [N] -> [N].

    With d = ref - logp: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d (also `low_var_kl`). http://joschu.net/blog/kl-approx.html
    """
    d = log_ratio(ref_logp, logp)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind in ("k3", "low_var_kl"):
        return d.exp() - 1 - d
    raise ValueError(f"unknown KL estimator {kind!r}")


def policy_objective(args, logp, entropy, columns):
    """The loss of one micro-batch and the sums behind its metrics.

    logp [N] (with gradient); entropy [N] or None; columns: dict of [N] tensors weight, mask, advantage, old_logp,
    rollout_logp and, with a reference, ref_logp. Where mask is 0 the other columns may hold anything, NaN included: they are
    zeroed before any exponential, since NaN x 0 is NaN. Returns (loss scalar, dict of scalar sums over masked tokens).
    """
    mask = columns["mask"] > 0
    keep = lambda x: torch.where(mask, x, torch.zeros_like(x))
    logp = keep(logp)
    old_logp, rollout_logp = keep(columns["old_logp"]), keep(columns["rollout_logp"])
    pg, clipped = ppo_clip_loss(logp, old_logp, keep(columns["advantage"]), args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    total = pg
    sums = {"pg_loss": pg * columns["weight"], "clip_frac": clipped, "ppo_kl": old_logp - logp,
            "ratio": log_ratio(logp, old_logp).exp(), "logprob_abs_diff": (logp - rollout_logp).abs()}
    if entropy is not None:
        total = total - args.entropy_coef * keep(entropy)
        sums["entropy"] = keep(entropy)
    if args.use_reference:
        kl = kl_estimate(logp, keep(columns["ref_logp"]), args.kl_loss_type)
        sums["kl"] = kl
        if args.use_kl_loss:
            total = total + args.kl_loss_coef * kl
    loss = (total * columns["weight"]).sum()
    sums = {name: keep(value).detach().double().sum() for name, value in sums.items()}
    return loss, {**sums, "loss": loss.detach().double(), "tokens": mask.sum().double()}
