"""Formulas of loss.py against numbers computed by hand, numpy in float64, and finite differences."""

import argparse
import math

import numpy as np
import pytest
import torch

from loss import grpo_advantages, kl_estimate, policy_objective, ppo_clip_loss, token_weights

ARGS = dict(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None, entropy_coef=0.0, use_reference=False, use_kl_loss=False,
            kl_loss_coef=0.0, kl_loss_type="low_var_kl")


def namespace(**changes):
    return argparse.Namespace(**{**ARGS, **changes})


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


# ---- the whole objective ----------------------------------------------------------------------------------
def columns(n, seed=0, **changes):
    g = torch.Generator().manual_seed(seed)
    draw = lambda: -torch.rand(n, generator=g, dtype=torch.float64)
    mask = (torch.rand(n, generator=g) > 0.3).double()
    return {"weight": mask * torch.rand(n, generator=g, dtype=torch.float64), "mask": mask, "old_logp": draw(),
            "rollout_logp": draw(), "ref_logp": draw(), "advantage": draw() + 0.5, **changes}


def numpy_objective(args, logp, entropy, c):
    """The same in a plain loop, float64."""
    total = 0.0
    for i in range(len(logp)):
        if c["mask"][i] == 0:
            continue
        r, a = np.exp(logp[i] - c["old_logp"][i]), c["advantage"][i]
        value = max(-a * r, -a * min(max(r, 1 - args.eps_clip), 1 + args.eps_clip_high))
        value -= args.entropy_coef * entropy[i]
        d = c["ref_logp"][i] - logp[i]
        value += args.kl_loss_coef * (np.exp(d) - 1 - d)
        total += value * c["weight"][i]
    return total


def test_objective_equals_a_plain_loop_and_finite_differences():
    args = namespace(entropy_coef=0.1, use_reference=True, use_kl_loss=True, kl_loss_coef=0.3)
    c = columns(40)
    logp = (-torch.rand(40, generator=torch.Generator().manual_seed(5), dtype=torch.float64)).requires_grad_()
    entropy = torch.rand(40, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    loss, _ = policy_objective(args, logp, entropy, c)
    numbers = {name: value.numpy() for name, value in c.items()}
    assert loss.item() == pytest.approx(numpy_objective(args, logp.detach().numpy(), entropy.numpy(), numbers), abs=1e-12)
    loss.backward()
    for i in range(0, 40, 7):
        up, down = logp.detach().numpy().copy(), logp.detach().numpy().copy()
        up[i] += 1e-6
        down[i] -= 1e-6
        slope = (numpy_objective(args, up, entropy.numpy(), numbers) - numpy_objective(args, down, entropy.numpy(), numbers)) / 2e-6
        assert logp.grad[i].item() == pytest.approx(slope, abs=1e-7)


def test_nan_at_masked_positions_poisons_nothing():
    args = namespace(use_reference=True, use_kl_loss=True, kl_loss_coef=0.3)
    c, logp = columns(20), -torch.rand(20, dtype=torch.float64)
    want, _ = policy_objective(args, logp, None, c)
    hole = c["mask"] == 0
    dirty = {name: value.clone() for name, value in c.items()}
    for name in ("old_logp", "rollout_logp", "ref_logp", "advantage"):
        dirty[name][hole] = float("nan")
    poisoned = torch.where(hole, torch.full_like(logp, float("nan")), logp).requires_grad_()
    got, sums = policy_objective(args, poisoned, None, dirty)
    got.backward()
    assert got.item() == want.item()
    assert torch.isfinite(poisoned.grad).all() and poisoned.grad[hole].abs().sum() == 0
    assert all(math.isfinite(value.item()) for value in sums.values())


def test_fully_masked_micro_batch_contributes_zero():
    c = columns(5, mask=torch.zeros(5, dtype=torch.float64), weight=torch.zeros(5, dtype=torch.float64))
    logp = (-torch.rand(5, dtype=torch.float64)).requires_grad_()
    loss, sums = policy_objective(namespace(), logp, None, c)
    loss.backward()
    assert loss.item() == 0 and logp.grad.abs().sum() == 0 and sums["tokens"] == 0


def test_on_policy_kl_between_old_and_current_is_exactly_zero():
    c = columns(30)
    _, sums = policy_objective(namespace(), c["old_logp"].clone(), None, c)
    assert sums["ppo_kl"].item() == 0.0 and sums["ratio"].item() == sums["tokens"].item()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_any_cut_into_micro_batches_gives_the_same_gradient(mode):
    """Six samples as one micro-batch, as six, and as two ranks of uneven micro-batches: the sum of the parts' losses."""
    g = torch.Generator().manual_seed(1)
    lengths = [3, 1, 7, 2, 5, 4]
    masks = [(torch.rand(n, generator=g) > 0.2).double().tolist() for n in lengths]
    weights = token_weights(masks, mode, constant=8)
    table = [{**columns(n, seed=n), "weight": torch.tensor(w, dtype=torch.float64), "mask": torch.tensor(m, dtype=torch.float64)}
             for n, m, w in zip(lengths, masks, weights)]
    start = [-torch.rand(n, generator=g, dtype=torch.float64) for n in lengths]

    def gradient(cuts):
        logps = [x.clone().requires_grad_() for x in start]
        for cut in cuts:
            merged = {name: torch.cat([table[i][name] for i in cut]) for name in table[0]}
            loss, _ = policy_objective(namespace(), torch.cat([logps[i] for i in cut]), None, merged)
            loss.backward()
        return torch.cat([x.grad for x in logps])

    whole = gradient([range(6)])
    for cuts in ([[i] for i in range(6)], [[0, 3], [2], [5, 1, 4]]):
        assert torch.allclose(gradient(cuts), whole, atol=1e-15, rtol=0)
