"""How a batch is cut into ranks and micro-batches, and that the cut does not matter."""

import itertools
import random

import pytest

from trainer import balance, check_advantages, pack, split_to, step_metrics


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_cut_is_complete_balanced_and_within_budget(ranks):
    draw = random.Random(ranks)
    for _ in range(50):
        lengths = {i: draw.randint(1, 100) for i in range(0, 4 * ranks * draw.randint(1, 5))}
        shares = balance(lengths, ranks)
        assert sorted(itertools.chain(*shares)) == sorted(lengths)
        assert {len(share) for share in shares} == {len(lengths) // ranks}
        tokens = [sum(lengths[i] for i in share) for share in shares]
        assert max(tokens) - min(tokens) <= max(lengths.values())
        packs = [pack(share, lengths, 128, 1) for share in shares]
        count = max(map(len, packs))
        for share, bins in zip(shares, packs):
            cut = split_to(bins, count)
            assert len(cut) == count and all(cut), "an empty micro-batch"
            assert sorted(itertools.chain(*cut)) == sorted(share)
            assert all(sum(lengths[i] for i in micro) <= 128 for micro in cut)


def test_first_fit_longest_first_by_hand():
    lengths = {0: 6, 1: 5, 2: 4, 3: 3, 4: 2}
    assert pack([0, 1, 2, 3, 4], lengths, 10, 1) == [[0, 2], [1, 3, 4]]
    assert pack([0, 1, 2, 3, 4], lengths, None, 2) == [[0, 1], [2, 3], [4]]
    assert split_to([[0, 2], [1, 3, 4]], 3) == [[0, 2], [1], [3, 4]]


def test_metrics_of_two_updates_by_hand():
    """Means over each update's tokens, then over the updates; the correction over the tokens of both, and its largest weight."""
    first = dict.fromkeys(("k3", "square", "seq_square", "rollout_ppl", "train_ppl", "ppl_ratio", "zero_weight"), 0.0)
    first |= dict(tokens=2, kept_tokens=1, seqs=1, kept_seqs=1, lr=-1.0, weight=3.0, weight_square=5.0, weight_max=2.0)
    second = {**first, **dict(tokens=6, kept_tokens=6, lr=3.0, weight=5.0, weight_square=11.0, weight_max=1.5)}
    updates = [{"loss": loss, "tokens": c["tokens"], "ppo_kl": kl, "ratio": c["tokens"], "logprob_abs_diff": 1.0, "grad_norm": 1.0,
                **{f"correction/{name}": value for name, value in c.items()}}
               for c, loss, kl in ((first, 1.0, 0.0), (second, 2.0, 3.0))]
    got = step_metrics(updates)
    want = {"train/loss": 1.5, "train/ppo_kl": 0.25, "train/first_ppo_kl": 0.0, "correction/kl": -0.25,
            "correction/is_weight_mean": 1.0, "correction/is_weight_max": 2.0, "correction/ess": 64 / (8 * 16),
            "correction/masked_token_frac": 1 / 8}
    assert {name: got[name] for name in want} == pytest.approx(want)


@pytest.mark.parametrize("rows, text", [
    ([1.0], "returned 1 advantages for 2 samples"), ([1.0, float("nan")], "of sample 1 must be"),
    ([[1.0, 2.0], [1.0]], "one for each of its 3 tokens"), ([1.0, [[1.0]]], "of sample 1 must be")])
def test_what_an_advantage_function_must_not_return(rows, text):
    with pytest.raises(ValueError, match=text):
        check_advantages(rows, [3, 1])
    assert [row.tolist() for row in check_advantages([0.5, [2]], [3, 1])] == [0.5, [2.0]]
