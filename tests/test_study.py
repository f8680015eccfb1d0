"""The study of off-policy corrections: the order of its loop, and what it makes of its lines."""

import functools
import json
import sys

import harness
import light
import scripted_engine
import study_offpolicy
import train_sync


def take_the_place_of_sync():
    study_offpolicy.ray = light.RAY
    loop = functools.partial(study_offpolicy.lagged, 2)
    train_sync.train = lambda args, trainers, rollout, tracker, start_step: loop(args, trainers, rollout, tracker)


def test_every_batch_has_exactly_the_lag(tmp_path):
    """Lag 2 on the samples' own versions: batches 0 to 2 are of version 0, then batch i of version i - 2; the version that is
    published is the step's, nothing is generated beyond the last step, and every group is trained."""
    model, engines = harness.make_model(tmp_path / "model"), scripted_engine.start(1, vocab_size=250, lengths="eos:4")
    try:
        light.succeed("train_sync.py", harness.flags(model, tmp_path, "run", [engines[0][1]]), worker=light.TinyWorker,
                      prepare=take_the_place_of_sync)
    finally:
        scripted_engine.stop(engines)
    rows = harness.metrics(tmp_path, "run")
    assert [row["step"] for row in rows] == [row["version"] for row in rows] == list(range(6))
    assert [row["staleness/histogram"].keys() for row in rows] == [{"0"}, {"1"}, {"2"}, {"2"}, {"2"}, {"2"}]
    versions = [{run[0] for group in harness.read_groups(tmp_path / "run" / "samples" / f"step_{step:07d}.npz")
                 for sample in group["samples"] for run in sample["version_runs"]} for step in range(6)]
    assert versions == [{0}, {0}, {0}, {1}, {2}, {3}]
    trained = [r["groups"] for r in harness.read_jsonl(tmp_path / "run" / "ledger.jsonl") if r["event"] == "trained"]
    assert sorted(sum(trained, [])) == list(range(24))


def line(correction, lag, seed, held_out, train=0.5, **changes):
    return {"correction": correction, "lag": lag, "seed": seed, "steps": 60, "lr": 6e-4, "first": 0.3, "train": train,
            "held_out": held_out, **changes}


LINES = [line("tis", 8, 0, 0.625), line("naive", 8, 0, 0.1), line("naive", 0, 0, 0.8), line("sync", 0, 0, 0.7),
         line("naive", 0, 1, 0.9)]


def test_table_and_last_line():
    assert study_offpolicy.table(LINES, "held_out").splitlines() == [
        "| held out | lag 0 | lag 8 |", "| --- | --- | --- |", "| naive | 0.85 (0.80–0.90) | 0.10 |", "| tis |  | 0.62 |",
        "| sync | 0.70 |  |"]
    assert study_offpolicy.last_line(LINES) == "naive lag0 0.85 lag8 0.10 corrected lag8 0.62"
    assert study_offpolicy.last_line(LINES[2:]) == "naive lag0 0.85 lag8 nan corrected lag8 nan"


def test_the_cells_and_their_order():
    """5 corrections x 5 lags x 3 seeds and two loops x 3 seeds, none twice; --quick has those of the last line."""
    every = study_offpolicy.cells(study_offpolicy.parse([]))
    assert len(every) == len(set(every)) == 5 * 5 * 3 + 2 * 3
    assert every[:6] == [(name, 8, 0) for name in ("naive", "bypass", "decoupled", "tis", "masked")] + [("naive", 0, 0)]
    assert ("sync", 0, 2) in every and ("one_step_off", 1, 2) in every
    assert study_offpolicy.cells(study_offpolicy.parse(["--quick"])) == [("naive", 0, 0), ("naive", 8, 0), ("tis", 8, 0)]


def test_cells_that_are_there_are_not_measured_again(tmp_path, monkeypatch, capsys):
    """Of the three quick ones two stand in the file; another learning rate's line, of the third, does not count. The last word
    of the output is the last line."""
    stored = [*LINES, line("naive", 8, 0, 0.99, lr=1e-3)]
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stored if row["correction"] != "tis"))
    todo = []
    monkeypatch.setattr(study_offpolicy, "run", lambda options, cells, add: todo.extend(cells) or add(line("tis", 8, 0, 0.5)))
    monkeypatch.setattr(sys, "argv", ["study", "--quick", "--out", str(tmp_path)])
    study_offpolicy.main()
    assert todo == [("tis", 8, 0)]
    assert capsys.readouterr().out.splitlines()[-1] == "naive lag0 0.80 lag8 0.10 corrected lag8 0.50"
    assert (tmp_path / "study.png").stat().st_size > 10_000
    study_offpolicy.main()
    assert todo == [("tis", 8, 0)]
