"""How a batch is cut into ranks and micro-batches, and that the cut does not matter."""

import itertools
import random

import pytest

from trainer import balance, pack, split_to


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
