"""Formulas of loss.py against numbers computed by hand, numpy in float64, and finite differences."""

import argparse
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from loss import (LOSSES, cispo_loss, correction_metrics, correction_sums, gae, grpo_advantages, gspo_loss, importance_weights,
                  kept_scale, kl_estimate, overlong_penalty, policy_objective, ppo_clip_loss, rejection_mask,
                  reinforce_plus_plus_advantages, reinforce_plus_plus_baseline_advantages, rloo_advantages, token_weights,
                  value_loss, weight_sum, whiten)

ARGS = dict(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None, entropy_coef=0.0, use_reference=False, use_kl_loss=False,
            kl_loss_coef=0.0, kl_loss_type="low_var_kl", use_unbiased_kl=False, loss_type="ppo_clip", loss_agg_mode="token-mean",
            policy_old="rollout", rollout_is="none", rollout_is_bounds=(None, math.inf), rejections=[], rs_denominator="kept")
NAN = float("nan")


def namespace(**changes):
    return argparse.Namespace(**{**ARGS, **changes})


def test_torch_alone_is_enough():
    """In a process of its own: nothing of the project, no ray and no megatron come along."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = ("import torch, sys; before = set(sys.modules); import loss; new = set(sys.modules) - before; "
            "print(sorted(name for name in new if '.' not in name))")
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "['loss']\n"


# ---- advantages -------------------------------------------------------------------------------------------
def test_advantages_by_group_id_not_by_position():
    """Groups interleaved and uneven: [1, 0] -> +-1/sqrt(2) of the unbiased std sqrt(1/2); [1, 0, 0] by hand."""
    rewards, groups = [1, 1, 0, 0, 0], [7, 3, 7, 3, 3]
    got = grpo_advantages(rewards, groups)
    std3 = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    want = [0.5 / math.sqrt(0.5), (2 / 3) / std3, -0.5 / math.sqrt(0.5), -(1 / 3) / std3, -(1 / 3) / std3]
    assert got == pytest.approx(want, abs=1e-5)


def test_advantages_without_std_and_of_degenerate_groups():
    assert grpo_advantages([3, 1, 5], [0, 0, 1], std_normalization=False) == [1.0, -1.0, 0.0]
    assert grpo_advantages([1, 1, 1], [0, 0, 0]) == [0.0, 0.0, 0.0]          # no spread: no gradient, and no NaN


def test_samples_of_one_attempt_weigh_as_one_by_hand():
    """Attempt one was right and made two samples, attempt two was wrong: the mean is 1/2, not 2/3. A third group stands alone."""
    rewards, groups, shares = [1.0, 0.0, 1.0, 5.0], [7, 7, 7, -1], [0.5, 1.0, 0.5, 1.0]
    half = math.sqrt(0.5)
    assert grpo_advantages(rewards, groups, True, shares) == pytest.approx([half, -half, half, 0.0], abs=2e-6)
    assert grpo_advantages(rewards, groups, False, shares) == [0.5, -0.5, 0.5, 0.0]
    assert rloo_advantages(rewards, groups, shares) == [1.0, -1.0, 1.0, 0.0]
    masks = [[1], [1], [1], [0]]
    got = reinforce_plus_plus_baseline_advantages(rewards, groups, masks, shares)
    inside = np.array([0.5, -0.5, 0.5])
    want = (inside - inside.mean()) / np.sqrt(inside.var(ddof=1) + 1e-8)
    assert [row.item() for row in got] == pytest.approx([*want, 0.0])


def test_rloo_by_hand_in_uneven_groups():
    """[1, 0, 0]: 1 - 0, 0 - 1/2, 0 - 1/2; [3, 1]: +-2; a group of one has no others."""
    assert rloo_advantages([1, 3, 0, 1, 0, 9], [5, 2, 5, 2, 5, 8]) == pytest.approx([1, 2, -0.5, -2, -0.5, 0])


def test_whitening_counts_tokens_with_mask_1_over_the_whole_batch():
    """Tokens 1, 3, 5 count: mean 3, unbiased variance 4. NaN and outliers at masked tokens do not."""
    got = whiten([[1, 100], [3, 5, NAN]], [[1, 0], [1, 1, 0]])
    assert [row.tolist() for row in got] == [pytest.approx([-1, 0]), pytest.approx([0, 1, 0])]
    assert [row.tolist() for row in whiten([[7.0], [8.0]], [[0], [0]])] == [[0], [0]]
    assert whiten([[7.0], [8.0]], [[1], [0]])[0].tolist() == [0]              # one token has no spread


def test_reinforce_plus_plus_against_numpy():
    """Token returns: the reward at the end minus the KL still to come; tool tokens add none and stop none."""
    g = np.random.default_rng(3)
    lengths, rewards = [4, 1, 6], [1.0, 0.0, 0.3]
    masks = [np.array(m, float) for m in ([1, 0, 1, 1], [1], [1, 1, 0, 0, 1, 1])]
    kl = [g.random(n) for n in lengths]
    returns = [np.array([r - 0.5 * sum(k[i] for i in range(t, len(m)) if m[i]) for t in range(len(m))])
               for r, k, m in zip(rewards, kl, masks)]
    counted = np.concatenate([x[m > 0] for x, m in zip(returns, masks)])
    dirty = [np.where(m > 0, k, np.nan) for k, m in zip(kl, masks)]
    for got, x, m in zip(reinforce_plus_plus_advantages(rewards, masks, dirty, 0.5), returns, masks):
        assert got.numpy() == pytest.approx((x - counted.mean()) / np.sqrt(counted.var(ddof=1) + 1e-8) * m, abs=1e-12)


def test_gae_by_hand_skips_tool_tokens():
    """Values 1, (tool), 2 and reward 3, gamma 1/2, lambda 1/2: delta_2 = 3 - 2, delta_0 = 0 + 2/2 - 1, A_0 = 0 + 1/4."""
    advantages, returns = gae([3.0, 5.0], [[1.0, NAN, 2.0], [4.0]], [[1, 0, 1], [0]], 0.5, 0.5)
    assert [row.tolist() for row in advantages] == [[0.25, 0, 1], [0]]
    assert [row.tolist() for row in returns] == [[1.25, 0, 3], [0]]


def test_gae_against_numpy():
    """The sum of (gamma lambda)^l delta over the counted tokens, as if the others had never been; KL from each of them."""
    g = np.random.default_rng(5)
    lengths, gamma, lam = [5, 1, 9, 4], 0.9, 0.8
    masks = [(g.random(n) > 0.3).astype(float) for n in lengths]
    (values, kl), rewards = ([g.random(n) for n in lengths] for _ in range(2)), g.random(4)
    got, returns = gae(rewards, values, masks, gamma, lam, kl, 0.3)
    for i, m in enumerate(masks):
        v, r = values[i][m > 0], -0.3 * kl[i][m > 0]
        if len(r):
            r[-1] += rewards[i]
        delta = r + gamma * np.append(v[1:], 0)[:len(v)] - v
        want = [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, len(v))) for t in range(len(v))]
        assert got[i][m > 0].numpy() == pytest.approx(want) and not got[i][m == 0].any()
        assert returns[i][m > 0].numpy() == pytest.approx(np.array(want) + v)


@pytest.mark.parametrize("value, old, target, want, clipped", [
    (1.0, 1.0, 3.0, 2.0, 0), (1.5, 1.0, 3.0, 1.62, 1), (1.5, 1.0, 0.0, 1.125, 0)])
def test_value_loss_by_hand(value, old, target, want, clipped):
    """Clipped to 1.2: (1.2 - 3)^2 / 2 = 1.62 counts, being worse than 1.125; where the target is behind, the plain loss does."""
    loss, was = value_loss(double(value), double(old), double(target), 0.2)
    assert loss.item() == pytest.approx(want) and was.item() == clipped
    v = double(0.3, 0.9, -1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: value_loss(x, double(0.2, 0, -1.05), double(1, 2, 0.5), 0.3)[0], v)


def test_reinforce_plus_plus_baseline_against_numpy():
    rewards, groups, masks = np.array([1.0, 0, 0, 2, 4]), np.array([0, 1, 0, 1, 1]), [np.ones(n) for n in (2, 3, 1, 4, 2)]
    centred = np.array([r - rewards[groups == i].mean() for r, i in zip(rewards, groups)])
    tokens = np.repeat(centred, [2, 3, 1, 4, 2])
    want = (centred - tokens.mean()) / tokens.std(ddof=1)
    got = reinforce_plus_plus_baseline_advantages(rewards, groups, masks)
    assert [row.tolist() for row in got] == [pytest.approx([w] * len(m), abs=1e-7) for w, m in zip(want, masks)]


@pytest.mark.parametrize("length, want", [(80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (10, 0.0)])
def test_overlong_penalty_by_hand(length, want):
    """A budget of 100 whose last 20 tokens cost up to 1."""
    assert overlong_penalty(length, 100, 20, 1.0) == pytest.approx(want)
    assert overlong_penalty(length, 100, 20, 0.3) == pytest.approx(0.3 * want)


# ---- aggregation ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode, want", [
    ("token-mean", [[0.2, 0.2, 0.2], [0, 0.2], [0], [0.2]]),
    ("seq-mean-token-mean", [[1 / 9] * 3, [0, 1 / 3], [0], [1 / 3]]),
    ("seq-mean-token-sum-norm", [[1 / 30] * 3, [0, 1 / 30], [0], [1 / 30]]),
])
def test_token_weights(mode, want):
    got = token_weights([[1, 1, 1], [0, 1], [0], [1]], mode, constant=10)
    assert [pytest.approx(row) for row in want] == got


def test_token_weights_of_a_fully_masked_batch_are_zero():
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        assert token_weights([[0, 0], [0]], mode) == [[0, 0], [0]]


# ---- the clipped loss -------------------------------------------------------------------------------------
@pytest.mark.parametrize("ratio, advantage, c, loss, clipped", [
    (1.0, 2.0, None, -2.0, 0),
    (1.5, 2.0, None, -2.56, 1),      # clipped above at 1.28
    (0.5, 2.0, None, -1.0, 0),       # below, but the advantage is positive: the smaller ratio counts
    (0.5, -2.0, None, 1.6, 1),       # clipped below at 0.8
    (1.5, -2.0, None, 3.0, 0),
    (5.0, -2.0, 3.0, 6.0, 1),        # dual clip: at most 3 x 2
    (5.0, 2.0, 3.0, -2.56, 1),       # which does not concern positive advantages
])
def test_ppo_clip_by_hand(ratio, advantage, c, loss, clipped):
    logp = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64)
    got, was = ppo_clip_loss(logp, torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64),
                             0.2, 0.28, c)
    assert got.item() == pytest.approx(loss) and was.item() == clipped


@pytest.mark.parametrize("kind, want", [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5), ("low_var_kl", math.exp(0.5) - 1.5)])
def test_kl_estimates_by_hand(kind, want):
    """log ref - log p = 0.5."""
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-0.5]), kind).item() == pytest.approx(want, abs=1e-6)


# ---- the other losses -------------------------------------------------------------------------------------
def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_gspo_by_hand():
    """Two samples: log ratios (.2, 0) and, with a hole, (-.4, NaN, -.2): ratios e^.1 and e^-.3, clipped to 1 +- .05."""
    sample, mask = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([1, 1, 1, 0, 1])
    logp = double(-1, -2, -3, 0, -4).requires_grad_()
    old = (logp - double(0.2, 0, -0.4, 0, -0.2)).detach()
    advantages = double(1, 1, 1, 0, 1)
    loss, clipped = gspo_loss(logp, old, advantages, mask, sample, 0.05, 0.05)
    assert loss.tolist() == pytest.approx([-1.05, -1.05, -math.exp(-0.3), 0, -math.exp(-0.3)])
    assert clipped.tolist() == [1, 1, 0, 0, 0]
    loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([0, 0, -math.exp(-0.3), 0, -math.exp(-0.3)])


def test_gspo_gradient_is_that_of_the_sequence_form():
    """sum over tokens of (1 / length) x token form = the paper's s x A for a sequence; checked by gradcheck."""
    sample = torch.tensor([0, 0, 0, 3, 3])
    g = torch.Generator().manual_seed(0)
    old, length = -torch.rand(5, generator=g, dtype=torch.float64), double(3, 3, 3, 2, 2)
    logp = (old + 0.05 * torch.randn(5, generator=g, dtype=torch.float64)).requires_grad_()
    whole = lambda x: (gspo_loss(x, old, double(1, 1, 1, -2, -2), torch.ones(5), sample, 0.2, 0.2)[0] / length).sum()
    assert torch.autograd.gradcheck(whole, logp)
    s = [(logp - old)[:3].mean().exp().item(), (logp - old)[3:].mean().exp().item()]
    assert whole(logp).item() == pytest.approx(-s[0] + 2 * s[1])


@pytest.mark.parametrize("ratio, advantage, weight", [(1.1, 2.0, 1.1), (1.5, 2.0, 1.28), (1.5, -2.0, 1.28), (0.5, 2.0, 0.8)])
def test_cispo_by_hand(ratio, advantage, weight):
    """The clip bounds the weight and leaves the gradient, weight x -A, to every token."""
    logp = double(-0.7).requires_grad_()
    loss, clipped = cispo_loss(logp, logp.detach() - math.log(ratio), double(advantage), 0.2, 0.28)
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.7 * weight * advantage)
    assert logp.grad.item() == pytest.approx(-weight * advantage) and clipped.item() == (weight != ratio)


def test_gradcheck_of_the_losses_without_frozen_parts():
    g = torch.Generator().manual_seed(2)
    draw = lambda: -torch.rand(12, generator=g, dtype=torch.float64)
    logp, old, ref, advantages = draw().requires_grad_(), draw(), draw(), draw() + 0.5
    args, c = namespace(eps_clip_c=1.5), {"old_logp": old, "advantage": advantages}
    for loss in (LOSSES["ppo_clip"], LOSSES["reinforce"]):
        assert torch.autograd.gradcheck(lambda x: loss(args, x, c)[0], logp)
    for kind in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind), logp)
        assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind, old), logp)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kl_has_the_gradient_of_the_kl_also_off_policy(kind):
    """The exact expectation over a vocabulary of six under the old policy, against the closed form of KL(p || ref)."""
    g = torch.Generator().manual_seed(4)
    old, ref = (torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    logits = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    want, = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    got, = torch.autograd.grad((old.exp() * kl_estimate(logp, ref, kind, old)).sum(), logits, retain_graph=True)
    plain, = torch.autograd.grad((old.exp() * kl_estimate(logp, ref, kind)).sum(), logits)
    assert torch.allclose(got, want, atol=1e-12) and not torch.allclose(plain, want, atol=1e-2)


def readme_function(name):
    """What the README shows as an example of one's own."""
    with open(os.path.join(os.path.dirname(os.path.dirname(__file__)), "README.md")) as f:
        block, = [b for b in re.findall(r"```python\n(.*?)```", f.read(), re.S) if f"def {name}(" in b]
    scope = {"torch": torch}
    exec(block, scope)
    return scope[name]


def test_the_readme_examples_by_hand():
    """OPO: [1, 0] with 1 and 3 tokens has the baseline 1/4. SAPO at ratio 1: gate 2 / tau, slope 1 whatever tau is."""
    batch = {"rewards": [1.0, 2.0, 0.0], "response_lengths": [1, 5, 3], "group_ids": [4, 6, 4]}
    assert readme_function("opo")(None, batch) == [0.75, 0.0, -0.25]
    logp = double(-1, -1, math.log(2) - 1).requires_grad_()
    loss, noted = readme_function("sapo")(None, logp, {"old_logp": double(-1, -1, -1), "advantage": double(3, -3, 1)})
    assert loss.tolist() == pytest.approx([-6, 6 / 1.05, -4 / (1 + math.exp(-1))]) and noted["gate"][0] == 2
    assert torch.autograd.grad(loss.sum(), logp)[0].tolist()[:2] == pytest.approx([-3, 3])


# ---- off-policy correction --------------------------------------------------------------------------------
LR = double(0, 0.5, -0.5, 1)
ONES, TOGETHER, APART = torch.ones(4), torch.zeros(4, dtype=torch.long), torch.arange(4)


def measure(*arguments):
    return correction_metrics({name: value.item() for name, value in correction_sums(*arguments).items()})


def test_check_vector_of_the_correction():
    """lr = 0, .5, -.5, 1 as one sequence of four tokens, and as four of one; truncation at 2."""
    weights = importance_weights(LR, ONES, TOGETHER, "token", None, 2.0)
    got = measure(LR, ONES, TOGETHER, weights, ONES, 0 * LR)
    want = {"is_weight_mean": 1.313813, "ess": 0.853856, "kl": -0.25, "k3": 0.243383, "chi2_token": 1.868804,
            "chi2_seq": 6.389056, "ppl_ratio": 0.778801, "is_weight_max": 2.0, "masked_token_frac": 0.0, "masked_seq_frac": 0.0}
    assert {name: got[name] for name in want} == pytest.approx(want, abs=1e-6)
    got = measure(LR, ONES, APART, weights, ONES, 0 * LR)
    assert got["chi2_seq"] == pytest.approx(1.868804, abs=1e-6) and got["ppl_ratio"] == pytest.approx(0.905783, abs=1e-6)


def test_perplexities_are_means_over_samples():
    """Rollout log-probs -1, -3 and -2: e^2 for both samples; the trained policy is .5 lower a token in the second only."""
    sample, logp, lr = torch.tensor([0, 0, 2]), double(-1, -3, -2), double(0, 0, -0.5)
    got = measure(lr, torch.ones(3), sample, lr.exp(), torch.tensor([1, 1, 0]), logp)
    assert got["rollout_ppl"] == pytest.approx(math.e ** 2)
    assert got["train_ppl"] == pytest.approx((math.e ** 2 + math.e ** 2.5) / 2)
    assert got["ppl_ratio"] == pytest.approx((1 + math.e ** 0.5) / 2)
    assert got["masked_token_frac"] == pytest.approx(1 / 3) and got["masked_seq_frac"] == pytest.approx(1 / 2)


def test_the_share_of_weights_that_are_zero():
    weights = importance_weights(LR, ONES, APART, "token", 0.7, 2.0)        # 1, 1.65, 0, 0
    assert measure(LR, ONES, APART, weights, ONES, 0 * LR)["is_weight_zero_frac"] == 0.5
    assert measure(LR, torch.tensor([1, 1, 1, 0]), APART, weights, ONES, 0 * LR)["is_weight_zero_frac"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("level, low, high, want", [
    ("token", None, 2.0, [1, math.exp(0.5), math.exp(-0.5), 2]),                 # TIS
    ("token", 0.7, 2.0, [1, math.exp(0.5), 0, 0]),                               # IcePop: zero outside
    ("sequence", None, 2.0, [2] * 4),                                            # e^1 truncated
    ("sequence", None, 5.0, [math.e] * 4),
    ("sequence", 0.5, 2.0, [0] * 4),
])
def test_importance_weights_by_hand(level, low, high, want):
    assert importance_weights(LR, ONES, TOGETHER, level, low, high).tolist() == pytest.approx(want)


def test_weights_are_clamped_and_masked_before_the_exponential():
    lr, mask = double(500, NAN, -500, math.inf), torch.tensor([1, 0, 1, 0])
    got = importance_weights(lr, mask, APART, "token", None, math.inf)
    assert got.tolist() == pytest.approx([math.exp(20), 0, math.exp(-20), 0])
    assert importance_weights(lr, mask, TOGETHER, "sequence", None, math.inf).tolist() == pytest.approx([1, 0, 1, 0])


def test_the_mean_of_the_weights_over_tokens_and_over_samples():
    """Batch normalisation: tokens 1, 3 and 5 have the mean 3, the samples' means 2 and 5 have 3.5."""
    weights, mask, sample = double(1, 3, 0, 5), torch.tensor([1, 1, 0, 1]), torch.tensor([0, 0, 0, 3])
    assert weight_sum(weights, mask, sample, "token").tolist() == [9, 3]
    assert weight_sum(weights, mask, sample, "sequence").tolist() == [7, 2]     # (1 + 3) / 2 + 5
    assert weight_sum(weights, torch.zeros(4), sample, "sequence").tolist() == [0, 0]


@pytest.mark.parametrize("statistic, low, high, want", [
    ("token_k1", 0.5, 1.9, [1, 1, 1, 0]),        # -lr = 0, -.5, .5, -1 between log .5 = -.69 and log 1.9 = .64
    ("token_k1", None, 1.5, [1, 0, 0, 0]),       # hi alone: from -.405 to .405
    ("token_k1", 0, 1.5, [1, 1, 0, 1]),
    ("token_k2", None, 0.2, [1, 1, 1, 0]),       # 0, .125, .125, .5
    ("token_k3", None, 0.12, [1, 0, 1, 0]),      # 0, .1487, .1065, .7183
    ("seq_sum_k1", None, 2.0, [0] * 4),          # -1 is below -.69
    ("seq_mean_k1", None, 1.3, [1] * 4),         # -.25 is above -.262
    ("seq_mean_k1", None, 1.28, [0] * 4),        # but below -.247
    ("seq_mean_k3", None, 0.25, [1] * 4),        # .243383
    ("seq_mean_k3", None, 0.24, [0] * 4),
    ("seq_max_k3", None, 0.72, [1] * 4),         # .718282
    ("seq_max_k3", None, 0.71, [0] * 4),
    ("seq_sum_k2", None, 0.75, [1] * 4),         # 0 + .125 + .125 + .5
    ("seq_sum_k3", None, 0.97, [0] * 4),         # .973531
])
def test_rejection_by_hand(statistic, low, high, want):
    assert rejection_mask(LR, ONES, TOGETHER, statistic, low, high).int().tolist() == want


def test_rejection_looks_at_one_sample_and_its_counted_tokens():
    """-lr: mean (1 + 3) / 2 = 2 over the two counted tokens of the first sample, 0 in the second."""
    lr, mask, sample = double(-1, NAN, -3, 0), torch.tensor([1, 0, 1, 1]), torch.tensor([0, 0, 0, 3])
    keep = lambda high: rejection_mask(lr, mask, sample, "seq_mean_k1", None, high).int().tolist()
    assert keep(math.exp(1.9)) == [0, 0, 0, 1] and keep(math.exp(2.1)) == [1, 1, 1, 1]


# ---- the whole objective ----------------------------------------------------------------------------------
LENGTHS = [3, 1, 7, 2, 5, 4, 1]
EDGES = np.cumsum(LENGTHS)[:-1]


def make_samples(seed=0, spread=0.4):
    """Uneven samples, holes in their masks, the last one fully masked; columns as lists of float64 arrays."""
    g = np.random.default_rng(seed)
    logp = [-2 * g.random(n) - 0.5 for n in LENGTHS]
    mask = [(g.random(n) > 0.25).astype(float) for n in LENGTHS]
    mask[0][0], mask[-1][:] = 1, 0
    near = lambda: [x + spread * g.standard_normal(len(x)) for x in logp]
    return {"logp": logp, "mask": mask, "old_logp": near(), "rollout_logp": near(), "ref_logp": near(),
            "entropy": [g.random(n) for n in LENGTHS],
            "advantage": [np.full(n, a) for n, a in zip(LENGTHS, (1.5, -0.7, 0.4, -2.0, 0.9, 0.3, 1.0))]}


def oracle(args, data, logp, frozen):
    """The loss of the whole batch in plain loops, float64. `frozen` stands for logp where no gradient flows."""
    clip = lambda x: np.clip(x, -20, 20)
    old = data["rollout_logp"] if args.policy_old == "rollout" else data["old_logp"]
    trained = frozen if args.policy_old == "rollout" else old
    weights, kept = [], []
    for p, roll, m in zip(trained, data["rollout_logp"], data["mask"]):
        lr = np.where(m > 0, p - roll, 0)
        w = np.exp(clip(np.full(len(lr), lr.sum()) if args.rollout_is == "sequence" else lr))
        low, high = args.rollout_is_bounds
        w = np.minimum(w, high) if low is None else np.where((w >= low) & (w <= high), w, 0)
        weights.append(w if args.rollout_is != "none" else np.ones(len(lr)))
        stay = m > 0
        for statistic, low, high in args.rejections:
            k = {"k1": -lr, "k2": lr ** 2 / 2, "k3": np.exp(lr) - 1 - lr}[statistic[-2:]]
            inside = k[m > 0] if m.any() else np.zeros(1)
            k = {"token": k, "seq_sum": inside.sum(), "seq_mean": inside.mean(), "seq_max": inside.max()}[statistic[:-3]]
            bounds = (np.log(low or 1 / high), np.log(high)) if statistic.endswith("k1") else (-np.inf, high)
            stay = stay & (k >= bounds[0]) & (k <= bounds[1])
        kept.append(stay)
    mean = 1.0
    if args.batch_normalize:
        inside = [w[m > 0] for w, m in zip(weights, data["mask"])]
        mean = np.mean(np.concatenate(inside) if args.rollout_is == "token" else [w.mean() for w in inside if len(w)])
    counted = kept if args.rs_denominator == "kept" else [m > 0 for m in data["mask"]]
    counts = [m.sum() for m in counted]
    seqs = sum(c > 0 for c in counts)
    total = 0.0
    for i, stay in enumerate(kept):
        scale = {"token-mean": 1 / sum(counts), "seq-mean-token-mean": 1 / (seqs * max(counts[i], 1)),
                 "seq-mean-token-sum-norm": 1 / (seqs * 8)}[args.loss_agg_mode]
        s = np.exp(np.mean((frozen[i] - old[i])[stay])) if stay.any() else 1.0
        for t in np.flatnonzero(stay):
            p, a, r = logp[i][t], data["advantage"][i][t], np.exp(logp[i][t] - old[i][t])
            bound = lambda x: min(max(x, 1 - args.eps_clip), 1 + args.eps_clip_high)
            if args.loss_type == "gspo":
                r = s * np.exp(p - frozen[i][t])
            value = max(-a * r, -a * bound(r))
            if args.loss_type == "cispo":
                value = -a * bound(np.exp(frozen[i][t] - old[i][t])) * p
            if args.loss_type == "reinforce":
                value = -a * p
            value *= weights[i][t] / mean
            d = data["ref_logp"][i][t] - p
            ratio = np.exp(p - old[i][t]) if args.use_unbiased_kl else 1
            total += scale * (value - args.entropy_coef * data["entropy"][i][t] + args.kl_loss_coef * ratio * (np.exp(d) - 1 - d))
    return total


def objective(args, data, cuts):
    """The same by policy_objective, over micro-batches `cuts`, as the trainer does it: (loss, gradient [N], sums)."""
    tensor = lambda name, cut: torch.cat([torch.tensor(data[name][i]) for i in cut])
    weights = token_weights([m.tolist() for m in data["mask"]], args.loss_agg_mode, constant=8)
    old = data["rollout_logp"] if args.policy_old == "rollout" else data["old_logp"]
    table = {**data, "weight": [np.array(w) for w in weights], "old_logp": old}
    packs = []
    for cut in cuts:
        starts = np.cumsum([0] + [LENGTHS[i] for i in cut][:-1])
        columns = {name: torch.cat([torch.tensor(table[name][i]) for i in cut])
                   for name in ("weight", "mask", "old_logp", "rollout_logp", "ref_logp", "advantage")}
        packs.append(columns | {"sample": torch.tensor(np.repeat(starts, [LENGTHS[i] for i in cut]))})
    mean = 1.0
    if args.batch_normalize:
        parts = [weight_sum(importance_weights(c["old_logp"] - c["rollout_logp"], c["mask"], c["sample"], args.rollout_is,
                                               *args.rollout_is_bounds), c["mask"], c["sample"], args.rollout_is) for c in packs]
        mean = (sum(p[0] for p in parts) / sum(p[1] for p in parts)).item()
    total, gradients, sums = 0.0, [None] * len(LENGTHS), []
    for cut, c in zip(cuts, packs):
        logp = tensor("logp", cut).requires_grad_()
        loss, part = policy_objective(args, LOSSES[args.loss_type], logp, tensor("entropy", cut), c, mean)
        loss.backward()
        total += loss.item()
        sums.append(part)
        for i, g in zip(cut, logp.grad.split([LENGTHS[i] for i in cut])):
            gradients[i] = g.numpy()
    sums = {name: (max if name.endswith("_max") else sum)(part[name].item() for part in sums) for name in sums[0]}
    scale = 1.0
    if args.rejections and args.rs_denominator == "kept":
        counts = [sums[f"correction/{name}"] for name in ("tokens", "kept_tokens", "seqs", "kept_seqs")]
        scale = kept_scale(args.loss_agg_mode, *counts)
    return total * scale, np.concatenate([g * scale for g in gradients]), sums


RULES = [("token_k1", 0.5, 1.9), ("seq_mean_k3", None, 0.11)]
CASES = [dict(loss_type=loss, policy_old="recompute", rollout_is=level, rollout_is_bounds=bounds, rejections=rules,
              rs_denominator=denominator, loss_agg_mode=mode, batch_normalize=normalize)
         for loss, level, bounds, rules, denominator, mode, normalize in [
             ("ppo_clip", "token", (None, 1.3), [], "kept", "token-mean", False),
             ("ppo_clip", "token", (0.6, 1.3), RULES, "kept", "seq-mean-token-mean", True),
             ("ppo_clip", "sequence", (None, 1.3), RULES, "original", "token-mean", True),
             ("gspo", "sequence", (None, 2.0), RULES[:1], "kept", "seq-mean-token-mean", False),
             ("gspo", "none", (None, math.inf), [], "kept", "seq-mean-token-mean", False),
             ("cispo", "token", (None, 2.0), RULES, "kept", "token-mean", True),
             ("reinforce", "sequence", (0.3, 3.0), RULES[1:], "kept", "seq-mean-token-sum-norm", True)]]
CASES += [dict(loss_type=loss, rollout_is=level, rollout_is_bounds=bounds, rejections=rules, rs_denominator=denominator,
               loss_agg_mode=mode) for loss, level, bounds, rules, denominator, mode in [
                   ("reinforce", "token", (None, 1.3), RULES, "kept", "token-mean"),
                   ("reinforce", "sequence", (0.3, 3.0), [], "kept", "seq-mean-token-mean"),
                   ("ppo_clip", "none", (None, math.inf), RULES, "kept", "token-mean"),
                   ("ppo_clip", "none", (None, math.inf), RULES, "kept", "seq-mean-token-sum-norm"),
                   ("gspo", "none", (None, math.inf), RULES, "kept", "seq-mean-token-mean"),
                   ("cispo", "none", (None, math.inf), RULES, "original", "seq-mean-token-mean")]]
WHOLE = [list(range(7))]
name_of = lambda case: "-".join([case["loss_type"], case.get("policy_old", "bypass"), case["rollout_is"], case["loss_agg_mode"],
                                 case["rs_denominator"] if case["rejections"] else "all"])


def case_args(case):
    terms = dict(entropy_coef=0.1, use_reference=True, use_kl_loss=True, kl_loss_coef=0.3)
    return namespace(**{"batch_normalize": False, **terms, "use_unbiased_kl": case["loss_type"] == "gspo", **case})


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_objective_equals_plain_loops_and_finite_differences(case):
    """Value and gradient of every loss under every kind of correction, with KL and entropy; some tokens must be rejected."""
    args, data = case_args(case), make_samples()
    loss, gradient, sums = objective(args, data, WHOLE)
    assert loss == pytest.approx(oracle(args, data, data["logp"], data["logp"]), abs=1e-12)
    if args.rejections:
        assert 0 < sums["correction/kept_tokens"] < sums["correction/tokens"] == sum(m.sum() for m in data["mask"])
    flat, at = np.concatenate(data["logp"]), lambda x: oracle(args, data, np.split(x, EDGES), data["logp"])
    for i, step in enumerate(1e-5 * np.eye(len(flat))):
        assert gradient[i] == pytest.approx((at(flat + step) - at(flat - step)) / 2e-5, abs=1e-8)


@pytest.mark.contract
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_any_cut_into_micro_batches_gives_the_same_gradient_and_metrics(case):
    """Seven samples as one micro-batch, as seven, and as two ranks' uneven ones, also where denominators depend on the policy."""
    args, data = case_args(case), make_samples(1)
    loss, whole, sums = objective(args, data, WHOLE)
    for cuts in ([[i] for i in range(7)], [[6, 3], [2, 0], [5, 1, 4]]):
        again, gradient, part = objective(args, data, cuts)
        assert again == pytest.approx(loss, abs=1e-14) and np.abs(gradient - whole).max() < 1e-15
        assert part == pytest.approx(sums, abs=1e-12)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_nan_at_masked_positions_poisons_nothing(case):
    args, data = case_args(case), make_samples()
    loss, gradient, sums = objective(args, data, WHOLE)
    dirty = {name: [np.where(m > 0, x, np.nan) for x, m in zip(rows, data["mask"])] if name != "mask" else rows
             for name, rows in data.items()}
    again, poisoned, part = objective(args, dirty, WHOLE)
    assert again == loss and np.array_equal(poisoned, gradient) and part == sums
    assert np.isfinite(poisoned).all() and not poisoned[np.concatenate(data["mask"]) == 0].any()


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_fully_masked_batch_and_a_fully_rejected_one_contribute_zero(case):
    args, data = case_args(case), make_samples()
    empty = {**data, "mask": [0 * m for m in data["mask"]]}
    args.batch_normalize = False      # its mean is the trainer's, and 1 where nothing counts
    loss, gradient, sums = objective(args, empty, [[0, 1], [2, 3, 4, 5, 6]])
    assert loss == 0 and not gradient.any() and sums["tokens"] == 0
    args.rejections = [("token_k2", None, 1e-12)]
    loss, gradient, sums = objective(args, data, WHOLE)
    assert loss == 0 and not gradient.any() and sums["correction/kept_tokens"] == 0 < sums["tokens"]


def test_on_policy_kl_between_old_and_current_is_exactly_zero():
    data = make_samples()
    data["old_logp"] = data["logp"]
    _, _, sums = objective(case_args(CASES[0]), data, WHOLE)
    assert sums["ppo_kl"] == 0.0 and sums["ratio"] == sums["tokens"]
    assert correction_metrics({}.fromkeys(("tokens", "seqs"), 0)) == {}


def test_an_own_loss_must_have_the_shape_of_its_tokens():
    data, args = make_samples(), case_args(CASES[0])
    LOSSES["wrong"] = lambda args, logp, c: (logp.sum(), {})
    args.loss_type = "wrong"
    try:
        with pytest.raises(ValueError, match=r"--custom-loss-path returned a loss of shape \[\] for 23 tokens"):
            objective(args, data, WHOLE)
    finally:
        del LOSSES["wrong"]
