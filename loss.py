"""Advantages, policy losses, KL, off-policy correction. Plain torch: imports neither ray nor megatron.

Everything per token is flat: [N] values of N response tokens, sample after sample, however they were packed. A loss is a
sum over tokens of weight x value, and the weights (`token_weights`) carry the denominators of the whole global batch. So
the gradient cannot depend on how samples were cut into micro-batches and ranks: it is the same sum in another order.

`sample` [N] says which tokens belong together: each holds the position of its sample's first token. Samples are never split
over micro-batches, so a sum over a sample (`segment_sum`) needs no communication. `mask` [N] is 1 where the loss counts.
"""

import math

import torch


# ---- rewards and advantages -------------------------------------------------------------------------------
def overlong_penalty(length, max_len, buffer_len, factor):
    """min(-(length - (max_len - buffer_len)) / buffer_len x factor, 0): what a response of `length` tokens loses of its
    reward. DAPO's soft overlong punishment, arXiv 2503.14476, eq. 13."""
    return min(-(length - (max_len - buffer_len)) / buffer_len * factor, 0.0)


def group_mean(values, group_ids, shares=None):
    """([S] mean of each sample's group, [S] size of its group), float64. group_ids: [S] ints in any order; shares: [S] weights,
    1 / k for the k samples of one attempt, which so counts once (None: 1)."""
    ids, member = torch.as_tensor(group_ids).unique(return_inverse=True)
    w = torch.ones(len(member), dtype=torch.float64) if shares is None else torch.as_tensor(shares, dtype=torch.float64)
    add = lambda x: torch.zeros(len(ids), dtype=torch.float64).index_add(0, member, x)
    count = add(w)
    return (add(w * torch.as_tensor(values, dtype=torch.float64)) / count)[member], count[member]


def grpo_advantages(rewards, group_ids, std_normalization=True, shares=None):
    """Reward minus the mean of its own group, divided by the group's standard deviation (unbiased, plus 1e-6).

    rewards: [S] floats; group_ids: [S] ints, in any order and in groups of any size; shares: see group_mean. A group of one has
    advantage 0.
    Returns [S] floats. GRPO: arXiv 2402.03300, eq. of section 4.1.2; without the division: Dr. GRPO, arXiv 2503.20783.
    """
    mean, n = group_mean(rewards, group_ids, shares)
    centred = torch.as_tensor(rewards, dtype=torch.float64) - mean
    if std_normalization:
        variance = group_mean(centred.square(), group_ids, shares)[0] * n / (n - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-6)
    return centred.tolist()


def rloo_advantages(rewards, group_ids, shares=None):
    """Reward minus the mean of the *others* of its group: n / (n - 1) x (reward - mean). [S] floats; 0 in a group of one.
    RLOO: arXiv 2402.14740."""
    mean, n = group_mean(rewards, group_ids, shares)
    return ((torch.as_tensor(rewards, dtype=torch.float64) - mean) * n / (n - 1).clamp(min=1)).tolist()


def reinforce_plus_plus_advantages(rewards, masks, kl=None, kl_coef=0.0):
    """The return of each token, whitened: A_t = reward - kl_coef x (sum of KL from t to the end), no baseline of the group.

    rewards: [S] floats; masks, kl: S rows of [n]; KL at masked tokens (tools) does not count. Returns S tensors [n].
    REINFORCE++: arXiv 2501.03262.
    """
    masks = [torch.as_tensor(mask, dtype=torch.float64) for mask in masks]
    kl = kl if kl is not None else [torch.zeros_like(mask) for mask in masks]
    returns = []
    for reward, mask, row in zip(rewards, masks, kl):
        row = torch.where(mask > 0, torch.as_tensor(row, dtype=torch.float64), 0.0)
        returns.append(reward - kl_coef * row.flip(0).cumsum(0).flip(0))
    return whiten(returns, masks)


def reinforce_plus_plus_baseline_advantages(rewards, group_ids, masks, shares=None):
    """Reward minus the mean of its group, for each token, whitened. Returns S tensors [n]. arXiv 2501.03262."""
    mean, _ = group_mean(rewards, group_ids, shares)
    centred = torch.as_tensor(rewards, dtype=torch.float64) - mean
    return whiten([value.expand(len(mask)) for value, mask in zip(centred, masks)], masks)


def gae(rewards, values, masks, gamma=1.0, lam=1.0, kl=None, kl_coef=0.0):
    """(S rows [n] of advantages, S rows of returns = advantages + values). The reward comes with the last token of mask 1, KL is
    taken from each; masked tokens (tools) are skipped, as if they were not there, and have 0.

    rewards: [S] floats; values, masks, kl: S rows [n]. GAE: arXiv 1506.02438, eq. 16.
    """
    pad = lambda rows: torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row, dtype=torch.float64) for row in rows])   # [n, S]
    m = pad(masks) > 0
    v, penalty = torch.where(m, pad(values), 0.0), torch.where(m, pad(kl), 0.0) if kl is not None else 0.0 * m
    last = m & (m.flip(0).cumsum(0).flip(0) == 1)
    r = last * torch.as_tensor(rewards, dtype=torch.float64) - kl_coef * penalty
    advantage, value_after, rows = torch.zeros_like(v[0]), torch.zeros_like(v[0]), []
    for t in reversed(range(len(m))):
        advantage = torch.where(m[t], r[t] + gamma * value_after - v[t] + gamma * lam * advantage, advantage)
        value_after = torch.where(m[t], v[t], value_after)
        rows.append(advantage * m[t])
    advantages = torch.stack(rows[::-1])
    cut = lambda x: [column[:len(mask)] for column, mask in zip(x.T, masks)]
    return cut(advantages), cut(advantages + v)


def whiten(values, masks):
    """(x - mean) / sqrt(variance + 1e-8) with mean and unbiased variance over all tokens with mask 1; 0 elsewhere.
    values, masks: S rows of [n], of the whole batch. Returns S tensors [n], float64."""
    flat, mask = (torch.cat([torch.as_tensor(row, dtype=torch.float64) for row in rows]) for rows in (values, masks))
    inside = flat[mask > 0]
    if len(inside) < 2:
        return [torch.zeros(len(row), dtype=torch.float64) for row in masks]
    white = (flat - inside.mean()) * (inside.var() + 1e-8).rsqrt()
    return list(torch.where(mask > 0, white, 0.0).split([len(row) for row in masks]))


# f(args, batch) -> S floats, or S rows [n]; the same as --custom-advantage-path. batch: see TrainWorker.add_columns
ADVANTAGES = {
    "grpo": lambda args, b: grpo_advantages(b["rewards"], b["group_ids"], not args.disable_grpo_std_normalization,
                                              b["shares"]),
    "ppo": lambda args, b: whiten(b["gae"], b["loss_mask"]),
    "rloo": lambda args, b: rloo_advantages(b["rewards"], b["group_ids"], b["shares"]),
    "reinforce_plus_plus": lambda args, b: reinforce_plus_plus_advantages(b["scores"], b["loss_mask"], b["kl"], args.kl_coef),
    "reinforce_plus_plus_baseline": lambda args, b: reinforce_plus_plus_baseline_advantages(b["rewards"], b["group_ids"],
                                                                                           b["loss_mask"], b["shares"]),
}


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


def kept_weights(weight, mask, kept, sample, mode):
    """`weight` [N] after a rejection whose denominators count kept tokens only, as far as one micro-batch can know them: the
    tokens of each sample. The rest, known when all micro-batches are through, is `kept_scale`."""
    if mode == "seq-mean-token-mean":
        weight = weight * segment_sum(mask.to(weight.dtype), sample) / segment_sum(kept.to(weight.dtype), sample).clamp(min=1)
    return weight * kept


def kept_scale(mode, tokens, kept_tokens, seqs, kept_seqs):
    """What the accumulated gradient is multiplied by, so that its denominator counts what was kept in the whole batch."""
    before, after = (tokens, kept_tokens) if mode == "token-mean" else (seqs, kept_seqs)
    return before / after if after else 0.0


def segment_sum(values, sample):
    """[N]: for each token the sum of `values` over the tokens of its sample."""
    return torch.zeros_like(values).index_add(0, sample, values)[sample]


# ---- policy losses: [N] -> (loss [N], clipped [N] 0/1: where the clip takes the gradient or bounds the weight) ------------
def ppo_clip_loss(logp, old_logp, advantages, eps_clip, eps_clip_high, eps_clip_c=None):
    """PPO's clipped surrogate for each token: max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high)), r = e^(logp - old).

    All [N]. PPO: arXiv 1707.06347, eq. 7; a higher upper clip: DAPO, arXiv 2503.14476; eps_clip_c: dual clip, the loss of a
    negative advantage is at most -A c (arXiv 1912.09729, eq. 5).
    """
    return clipped_surrogate(log_ratio(logp, old_logp).exp(), advantages, eps_clip, eps_clip_high, eps_clip_c)


def gspo_loss(logp, old_logp, advantages, mask, sample, eps_clip, eps_clip_high):
    """PPO's surrogate with one ratio for a sequence, s = e^(mean over its tokens of logp - old), in the token form
    sg[s] x e^logp / sg[e^logp]: its value is s, its gradient s x that of logp. GSPO: arXiv 2507.18071, eq. 5 to 7 and 14."""
    m = mask.to(logp.dtype)
    mean = segment_sum((logp - old_logp).detach() * m, sample) / segment_sum(m, sample).clamp(min=1)
    ratio = (mean.clamp(-20, 20) + logp - logp.detach()).exp()
    return clipped_surrogate(ratio, advantages, eps_clip, eps_clip_high)


def cispo_loss(logp, old_logp, advantages, eps_clip, eps_clip_high):
    """-A sg[clip(r, 1 - eps_clip, 1 + eps_clip_high)] logp: the clip bounds the weight and takes no token's gradient away.
    CISPO: arXiv 2506.13585, eq. 4 and 5; the paper has no lower bound: eps_clip 1."""
    ratio = log_ratio(logp, old_logp).exp().detach()
    weight = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -advantages * weight * logp, (weight != ratio).to(logp.dtype)


def reinforce_loss(logp, advantages):
    """-A logp; off-policy weights (--rollout-is) multiply it from outside. Williams 1992."""
    return -advantages * logp, torch.zeros_like(logp)


def clipped_surrogate(ratio, advantages, eps_clip, eps_clip_high, eps_clip_c=None):
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if eps_clip_c is not None:
        ceiling = -advantages * eps_clip_c
        too_big = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(too_big, ceiling, loss), clipped | too_big
    return loss, clipped.to(loss.dtype)


# f(args, logp [N] with gradient, c: columns) -> (loss [N], clipped [N]); --custom-loss-path returns (loss [N], {name: [N]})
LOSSES = {
    "ppo_clip": lambda args, logp, c: ppo_clip_loss(logp, c["old_logp"], c["advantage"], args.eps_clip, args.eps_clip_high,
                                                    args.eps_clip_c),
    "gspo": lambda args, logp, c: gspo_loss(logp, c["old_logp"], c["advantage"], c["mask"], c["sample"], args.eps_clip,
                                            args.eps_clip_high),
    "cispo": lambda args, logp, c: cispo_loss(logp, c["old_logp"], c["advantage"], args.eps_clip, args.eps_clip_high),
    "reinforce": lambda args, logp, c: reinforce_loss(logp, c["advantage"]),
}


def value_loss(values, old_values, returns, value_clip):
    """The critic's loss for each token: max((v - R)^2, (clip(v, old +- value_clip) - R)^2) / 2, and where the clip counts.
    All [N]. PPO's reference implementation, https://github.com/openai/baselines."""
    plain = (values - returns).square()
    bounded = (values.clamp(old_values - value_clip, old_values + value_clip) - returns).square()
    return torch.maximum(plain, bounded) / 2, (bounded > plain).to(values.dtype)


# ---- KL ---------------------------------------------------------------------------------------------------
def log_ratio(logp, other):
    """logp - other, clamped to +-20 so that its exponential stays finite."""
    return (logp - other).clamp(-20, 20)


def kl_estimate(logp, ref_logp, kind, old_logp=None):
    """Estimate of KL(policy || reference) for each token, from the policy's own samples. [N] -> [N].

    With d = ref - logp: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d (also `low_var_kl`). http://joschu.net/blog/kl-approx.html
    With old_logp, of the policy that sampled, the estimate is multiplied by e^(logp - old): its gradient is then that of the
    KL, for k1 and k3, also off-policy (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    d = log_ratio(ref_logp, logp)
    if kind == "k1":
        value = -d
    elif kind == "k2":
        value = d.square() / 2
    elif kind in ("k3", "low_var_kl"):
        value = d.exp() - 1 - d
    else:
        raise ValueError(f"unknown KL estimator {kind!r}")
    return value if old_logp is None else value * log_ratio(logp, old_logp).exp()


# ---- off-policy correction --------------------------------------------------------------------------------
# lr [N] = log of (trained policy / rollout policy): the old policy's in decoupled mode, the current one's, detached, in bypass
def importance_weights(lr, mask, sample, level, low, high):
    """[N] weights e^lr, 0 where masked. level "sequence": e^(sum of lr over the sample), for each of its tokens.

    low None: truncated at `high` (TIS, https://fengyao.notion.site/off-policy-rl); else 0 outside [low, high] (IcePop,
    arXiv 2510.18855). Exponents are clamped to +-20.
    """
    lr = torch.where(mask > 0, lr, 0.0)
    weights = (segment_sum(lr, sample) if level == "sequence" else lr).clamp(-20, 20).exp()
    weights = weights.clamp(max=high) if low is None else weights * ((weights >= low) & (weights <= high))
    return torch.where(mask > 0, weights, 0.0)


def weight_sum(weights, mask, sample, level):
    """(sum, count) [2] behind the mean weight of --rollout-is-batch-normalize: over tokens, or over samples."""
    part = mask > 0 if level == "token" else first_tokens(mask, sample)
    per_sample = segment_sum(weights, sample) / segment_sum((mask > 0).to(weights.dtype), sample).clamp(min=1)
    return torch.stack([(weights if level == "token" else per_sample)[part].double().sum(), part.double().sum()])


def first_tokens(mask, sample):
    """[N] bool: one token of each sample that has any in the loss."""
    return (sample == torch.arange(len(sample), device=sample.device)) & (segment_sum((mask > 0).long(), sample) > 0)


def rejection_mask(lr, mask, sample, statistic, low, high):
    """[N] bool, True where a token stays. statistic: LEVEL_KIND with LEVEL token (rejects tokens), seq_sum, seq_mean or
    seq_max (reject whole samples) and KIND k1 = -lr, k2 = lr^2 / 2, k3 = e^lr - 1 - lr.

    k1 must lie between log low and log high (low None: 1 / high), k2 and k3 at or below `high`. seq_mean_k1 is the geometric
    mean of the ratios. https://richardli.xyz/rl-collapse
    """
    level, _, kind = statistic.rpartition("_")
    lr = torch.where(mask > 0, lr, 0.0)
    value = {"k1": -lr, "k2": lr.square() / 2, "k3": lr.clamp(-20, 20).exp() - 1 - lr}[kind]
    if level == "seq_max":
        value = torch.zeros_like(value).scatter_reduce(0, sample, value, "amax")[sample]
    elif level != "token":
        value = segment_sum(value, sample)
        if level == "seq_mean":
            value = value / segment_sum((mask > 0).to(value.dtype), sample).clamp(min=1)
    if kind != "k1":
        return value <= high
    low = 1 / high if low is None else low
    return (value >= (math.log(low) if low else -math.inf)) & (value <= math.log(high))


def correction_sums(lr, mask, sample, weights, kept, rollout_logp):
    """The sums over one micro-batch behind `correction_metrics`: scalars, float64; they add up over micro-batches and ranks,
    except weight_max. weights: [N] of importance_weights; kept: [N] what is left of mask after rejection."""
    lr, rollout_logp = (torch.where(mask > 0, x, 0.0).double() for x in (lr, rollout_logp))
    m, kept, weights = (mask > 0).double(), (kept > 0).double(), weights.double()
    one, count = first_tokens(mask, sample), segment_sum(m, sample).clamp(min=1)
    mean_lr, mean_logp = segment_sum(lr, sample) / count, segment_sum(rollout_logp, sample) / count
    safe = lr.clamp(-20, 20)
    tokens = {"tokens": m, "kept_tokens": kept, "lr": lr, "k3": safe.exp() - 1 - lr, "square": (2 * safe).exp() * m,
              "weight": weights, "weight_square": weights.square(), "zero_weight": m * (weights == 0)}
    seqs = {"seqs": torch.ones_like(m), "kept_seqs": (segment_sum(kept, sample) > 0).double(),
            "seq_square": (2 * segment_sum(lr, sample).clamp(-20, 20)).exp(), "rollout_ppl": (-mean_logp).exp(),
            "train_ppl": (-mean_logp - mean_lr).exp(), "ppl_ratio": (-mean_lr).clamp(-20, 20).exp()}
    sums = {name: value.sum() for name, value in tokens.items()} | {name: value[one].sum() for name, value in seqs.items()}
    return sums | {"weight_max": weights.max() if len(weights) else m.sum()}


def correction_metrics(sums):
    """How far the two policies are apart, over the tokens (t) and samples (s) of a batch: kl = mean_t(-lr), k3, chi2 =
    mean(ratio^2) - 1, effective sample size 1 / mean_t((w / mean w)^2) in (0, 1], perplexities (means over samples) and their
    ratio mean_s(e^-mean(lr)), the shares that rejection masked, and the weights. {} for a batch without a token in the loss."""
    c, t, s = sums, sums["tokens"], sums["seqs"]
    if not t:
        return {}
    return {"kl": -c["lr"] / t, "k3": c["k3"] / t, "chi2_token": c["square"] / t - 1, "chi2_seq": c["seq_square"] / s - 1,
            "ess": c["weight"] ** 2 / (t * c["weight_square"]) if c["weight_square"] else 0.0,
            "is_weight_mean": c["weight"] / t, "is_weight_max": c["weight_max"], "is_weight_zero_frac": c["zero_weight"] / t,
            "rollout_ppl": c["rollout_ppl"] / s, "train_ppl": c["train_ppl"] / s, "ppl_ratio": c["ppl_ratio"] / s,
            "masked_token_frac": 1 - c["kept_tokens"] / t, "masked_seq_frac": 1 - c["kept_seqs"] / s}


# ---- the whole objective ----------------------------------------------------------------------------------
def policy_objective(args, policy_loss, logp, entropy, columns, is_mean=1.0):
    """The loss of one micro-batch and the sums behind its metrics.

    policy_loss: of LOSSES, or an own one; logp [N] (with gradient); entropy [N] or None; columns: dict of [N] tensors weight,
    mask, sample, advantage, old_logp, rollout_logp, with a reference ref_logp, and own ones. Where mask is 0 they may hold
    anything, NaN included: they are zeroed before any exponential, since NaN x 0 is NaN. is_mean divides the importance
    weights. Returns (loss scalar, dict of scalar sums over masked tokens, those of the correction under "correction/...").
    """
    mask, sample = columns["mask"] > 0, columns["sample"]
    keep = lambda x: torch.where(mask, x, torch.zeros_like(x))
    c = {name: keep(column) for name, column in columns.items()} | {"sample": sample}
    logp = keep(logp)

    # the trained policy against the rollout policy: weights, and tokens that leave the loss with all its terms
    lr = (logp.detach() if args.policy_old == "rollout" else c["old_logp"]) - c["rollout_logp"]
    is_weight = importance_weights(lr, mask, sample, args.rollout_is, *args.rollout_is_bounds)
    kept = mask
    for rule in args.rejections:
        kept = kept & rejection_mask(lr, mask, sample, *rule)
    weight = kept_weights(c["weight"], mask, kept, sample, args.loss_agg_mode if args.rs_denominator == "kept" else None)
    correction = correction_sums(lr, mask, sample, is_weight, kept, c["rollout_logp"])

    pg, noted = policy_loss(args, logp, c | {"mask": kept.to(logp.dtype)})
    if pg.shape != logp.shape:
        raise ValueError(f"--custom-loss-path returned a loss of shape {list(pg.shape)} for {len(logp)} tokens")
    pg = keep(pg) if args.rollout_is == "none" else keep(pg) * is_weight / is_mean
    total = pg
    sums = {"pg_loss": pg * weight, "ppo_kl": c["old_logp"] - logp, "ratio": log_ratio(logp, c["old_logp"]).exp(),
            "logprob_abs_diff": (logp - c["rollout_logp"]).abs(), **(noted if isinstance(noted, dict) else {"clip_frac": noted})}
    if entropy is not None:
        total = total - args.entropy_coef * keep(entropy)
        sums["entropy"] = keep(entropy)
    if args.use_reference:
        sums["kl"] = kl_estimate(logp, c["ref_logp"], args.kl_loss_type)
        if args.use_kl_loss:
            old = c["old_logp"] if args.use_unbiased_kl else None
            total = total + args.kl_loss_coef * kl_estimate(logp, c["ref_logp"], args.kl_loss_type, old)
    loss = (total * weight).sum()
    sums = {name: keep(value).detach().double().sum() for name, value in sums.items()}
    return loss, {**sums, "loss": loss.detach().double(), "tokens": mask.sum().double(),
                  **{f"correction/{name}": value for name, value in correction.items()}}
