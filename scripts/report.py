"""One page about a run, or about several compared: report.html, which needs no network and nothing
beside it.

    python scripts/report.py runs/NAME               writes runs/NAME/report.html
    python scripts/report.py runs/NAME runs/OTHER    writes runs/report_NAME_OTHER.html

and each RUN/timeline.json.

The page is scripts/report.html with the runs' data in it, as JSON. What is too much for a page is
thinned out here, and the page says so: curves are means over equal bins of steps, samples those of
some steps (see `pick_groups`). A run that still goes on, or was killed, is shown as far as it went.
"""

import argparse
import functools
import json
import os
import random
import statistics
import sys
import time
from types import SimpleNamespace

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from args import samples_path
from batch import load_groups
from buffer import Ledger
from tracking import advice, parts, read_rows, read_spans, speed, write_timeline

POINTS, COLUMNS = 500, 120                 # of a curve; of the pictures of lags and lengths
LAST_STEPS, LANES = 8, 16                  # of the picture of the last steps; engines, and ranks, in it
SAMPLE_STEPS, MEMBERS = 40, 8              # steps whose samples are shown, at most; samples of a group
TOKENS, HEAD, TAIL = 400_000, 1500, 500    # of all samples together; first and last ones of a longer response


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--output", metavar="FILE", help="the page (default: RUN/report.html; of several runs, "
                                                              "report_NAME_NAME.html beside the first RUN)")
    options = parser.parse_args()
    output = os.path.abspath(options.output or default_output(options.runs))
    try:
        runs = [read_run(folder) for folder in options.runs]
        write_page(output, runs)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(output)


def default_output(folders):
    """A comparison lies beside the runs, and leaves the page of each of them alone."""
    if len(folders) == 1:
        return os.path.join(folders[0], "report.html")
    first, *others = map(os.path.abspath, folders)
    names = "_".join(map(os.path.basename, [first, *others]))
    if len(names) > 100:                   # a file's name has a limit
        names = f"{os.path.basename(first)[:100]}_and_{len(others)}_more"
    return os.path.join(os.path.dirname(first), f"report_{names}.html")


def write_page(path, runs):
    """The template with the data. A text may hold </script>, or half of a surrogate pair: so no '<' is left in the JSON, and it
    is ASCII. The page itself writes texts as text, never as HTML."""
    with open(os.path.join(ROOT, "scripts", "report.html"), encoding="utf-8") as f:
        template = f.read()
    data = json.dumps({"runs": runs, "made": time.strftime("%Y-%m-%d %H:%M")}, separators=(",", ":")).replace("<", "\\u003c")
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write(template.replace("{DATA}", data))
    os.replace(path + ".tmp", path)


def read_run(folder):
    """All that the page shows of a run. ValueError where there is nothing to show."""
    file = lambda name: os.path.join(folder, name)
    if not (os.path.exists(file("args.json")) and os.path.exists(file("metrics.jsonl"))):
        raise ValueError(f"{folder} is not the folder of a run: it has no args.json and metrics.jsonl")
    with open(file("args.json")) as f:
        args = json.load(f)
    rows, evals = read_rows(file("metrics.jsonl")), read_rows(file("eval.jsonl")) if os.path.exists(file("eval.jsonl")) else []
    if not rows:
        raise ValueError(f"{folder}: not one step is finished yet")
    records = Ledger.surviving(file("ledger.jsonl")) if os.path.exists(file("ledger.jsonl")) else []
    last_steps = {}
    if records:
        write_timeline(folder)
        last_steps = picture(*read_spans(folder), rows)
    flags = {name: str(value) for name, value in sorted(args["flags"].items())
             if name != "run_name" and value not in (None, [], False)}
    return {"name": os.path.basename(os.path.abspath(folder)), "script": args["script"], "flags": flags,
            "steps": len(rows), "curves": curves(rows), "evals": eval_curves(evals), "lag": lag_columns(rows),
            "lengths": length_columns(rows, records), "last_steps": last_steps, "clock": clock(args, rows),
            "samples": pick_samples(folder, args, [row["step"] for row in rows])}


# ---- curves -----------------------------------------------------------------------------------------------
def bins(rows, most):
    """Cuts rows into at most so many runs of equally many, the last perhaps shorter."""
    size = -(-len(rows) // most)
    return [rows[i:i + size] for i in range(0, len(rows), size)]


def short(value):
    return float(f"{value:.5g}")


def mean(values):
    values = [value for value in values if value is not None and np.isfinite(value)]
    return short(statistics.fmean(values)) if values else None


def curves(rows):
    """{"x": [steps], metric: [values]}; None where a step has no value of it."""
    cut = bins(rows, POINTS)
    names = {name for row in rows for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}
    return {"x": [mean(row["step"] for row in part) for part in cut],
            **{name: [mean(row.get(name) for row in part) for part in cut] for name in sorted(names)}}


def eval_curves(evals):
    """{"SET/metric": [[version, value], ...]}"""
    order = lambda name: (name.split("/")[0], not name.endswith("/reward"), name)      # the reward first
    names = sorted({name for row in evals for name in row if "/" in name}, key=order)
    return {name: [[row["version"], short(row[name])] for row in evals if name in row] for name in names}


def lag_columns(rows):
    """[[first step, last step, {lag: share of tokens}], ...]"""
    columns = []
    for part in bins(rows, COLUMNS):
        tokens = {}
        for lag, count in (item for row in part for item in row["staleness/histogram"].items()):
            tokens[lag] = tokens.get(lag, 0) + count
        columns.append([part[0]["step"], part[-1]["step"], {lag: short(n / sum(tokens.values())) for lag, n in tokens.items()}])
    return columns


def length_columns(rows, records):
    """[[first step, last step, 10th percentile, median, 90th percentile, longest], ...] of the answers trained on."""
    ended = {record["group"]: record["tokens"] for record in records if record["event"] == "finish"}
    batches = {record["step"]: record["groups"] for record in records if record["event"] == "batch"}
    columns = []
    for part in bins(rows, COLUMNS):
        tokens = [n for row in part for group in batches.get(row["step"], ()) for n in ended.get(group, ())]
        if tokens:
            columns.append([part[0]["step"], part[-1]["step"], *map(short, np.quantile(tokens, (0.1, 0.5, 0.9, 1.0)))])
    return columns


# ---- the clock --------------------------------------------------------------------------------------------
def clock(args, rows):
    """Seconds of a step by part, as means without the first step, which warms up; the speed report of an asynchronous run."""
    namespace, counted = SimpleNamespace(**args), rows[1:] or rows
    average = lambda name: mean(row.get(name) for row in counted)
    total = lambda name: sum(row[name] for row in counted)
    found = {"parts": {part: mean(parts(row)[part] for row in counted) for part in parts(rows[0])},
             "step": average("perf/step_time"), "tokens_per_second": short(total("rollout/tokens") / total("perf/step_time")),
             "lag": average("staleness/mean"), "train_idle": average("perf/train_idle_share"),
             "rollout_idle": average("perf/rollout_idle_share")}
    if args["without_engines"]:
        return found
    found["advice"] = advice(namespace, rows)
    if args["script"] != "train_sync.py":
        found["speed"] = {name: short(value) for name, value in speed(namespace, rows).items()}
    return found


def picture(spans, groups, rows):
    """The last steps: seconds since the first of them.

    {"steps": [[step, start], ...], "seconds": width, "lanes": [[side, number, [[name, start, end], ...], [[time, groups being
    generated], ...]], ...], "engines": how many there are, "ranks": same}
    """
    shown = [row for row in rows if "spans" in row][-LAST_STEPS:]
    if not shown:
        return {}
    edges = [[row["step"], min(start for part in row["spans"].values() for start, _ in part)] for row in shown]
    first, last = edges[0][1], max(end for part in shown[-1]["spans"].values() for _, end in part)
    place = lambda at: round(min(max(at, first), last) - first, 4)
    numbers = {side: sorted({span[1] for span in spans if span[0] == side}) for side in ("engine", "rank")}
    lanes = []
    for side, number in ((side, number) for side in numbers for number in numbers[side][:LANES]):
        own = [[name, place(start), place(end)] for s, n, name, start, end, _ in spans
               if (s, n) == (side, number) and name != "generate" and end > first and start < last]
        turns = [(place(at), turn) for engine, _, start, generated, _, _ in groups
                 if (side, number) == ("engine", engine) and generated > first and start < last
                 for at, turn in ((start, 1), (generated, -1))]
        load = []
        for at, turn in sorted(turns):
            load.append([at, turn + (load[-1][1] if load else 0)])
        lanes.append([side, number, own, load])
    return {"steps": [[step, place(start)] for step, start in edges], "seconds": place(last), "lanes": lanes,
            "engines": len(numbers["engine"]), "ranks": len(numbers["rank"])}


# ---- samples ----------------------------------------------------------------------------------------------
def pick_samples(folder, args, steps):
    """Samples of up to SAMPLE_STEPS steps, evenly spread over those that were recorded.

    {"recorded": steps with samples, "steps": [[step, groups of it, [group, ...]], ...]}; see `show_group`.
    """
    path = lambda step: samples_path(folder).format(step=step)
    recorded = [step for step in steps if os.path.exists(path(step))]
    count = min(SAMPLE_STEPS, len(recorded))
    picked = [recorded[i * (len(recorded) - 1) // max(count - 1, 1)] for i in range(count)]
    pieces, shown = token_pieces(args["hf_checkpoint"]), []
    for step in picked:
        groups = load_groups(path(step))
        trained = trainer_logprobs(path(step), groups)
        shown.append([step, len(groups), [show_group(group, trained, why, pieces)
                                          for group, why in pick_groups(groups, trained, step, TOKENS // count)]])
    return {"recorded": len(recorded), "steps": shown}


def trainer_logprobs(path, groups):
    """{(group id, sample's index, its part): log-probs of its response by the trainer}, {} where they are not recorded."""
    file = path.replace(".npz", ".trainer.npy")
    if not os.path.exists(file):
        return {}
    flat, found, at = np.load(file), {}, 0
    for sample in (sample for group in groups for sample in group.samples):
        found[sample.group_id, sample.index, sample.part] = flat[at:at + len(sample.response_tokens)]
        at += len(sample.response_tokens)
    return found


def pick_groups(groups, trained, step, budget):
    """[(group, why)]: the one with the longest answer, the one with the largest difference of log-probs, then groups at random,
    which tell what is usual, as long as they fit into a budget of tokens; the first one in any case."""
    def difference(group):
        return max(np.abs(np.array(s.rollout_logprobs) - trained[s.group_id, s.index, s.part]).max(initial=0.0)
                   for s in group.samples)

    at_random = random.Random(step).sample(groups, len(groups))
    order = [(max(groups, key=lambda group: max(group.response_lengths)), "longest answer of the step")]
    order += [(max(groups, key=difference), "largest log-prob difference of the step")] if trained else []
    picked = []
    for group, why in order + [(group, "at random") for group in at_random]:
        cost = sum(min(length, HEAD + TAIL) for length in group.response_lengths[:MEMBERS])
        if all(group is not other for other, _ in picked) and (cost <= budget or not picked):
            picked.append((group, why))
            budget -= cost
    return picked


def show_group(group, trained, why, pieces):
    """{"id", "row", "epoch", "why", "prompt", "label", "size", "samples": [{"reward", "status", "length", "runs": [[version,
    tokens]], "tokens": [text], "engine": [log-prob], "trainer": [log-prob] or None, "cut": [first, last] token left out or None,
    "tools": indices of tokens that were not sampled}]}"""
    samples = []
    for s in group.samples[:MEMBERS]:
        length = len(s.response_tokens)
        cut = [HEAD, length - TAIL - 1] if length > HEAD + TAIL else None
        keep = lambda values: [round(float(v), 4) for v in (values if cut is None else [*values[:HEAD], *values[length - TAIL:]])]
        tokens = s.response_tokens if cut is None else s.response_tokens[:HEAD] + s.response_tokens[length - TAIL:]
        samples.append({"reward": s.reward, "status": s.status, "length": length, "runs": s.version_runs, "cut": cut,
                        "tools": [i for i, mask in enumerate(s.loss_mask) if not mask], "tokens": pieces(tokens),
                        "engine": keep(s.rollout_logprobs),
                        "trainer": keep(trained[s.group_id, s.index, s.part]) if trained else None})
    return {"id": group.group_id, "row": group.row, "epoch": group.epoch, "why": why, "prompt": group.samples[0].prompt,
            "label": str(group.samples[0].label), "size": len(group.samples), "samples": samples}


def token_pieces(checkpoint):
    """-> a function from ids to the text that each adds. A character of several tokens stands at its last one. Where the
    tokenizer is gone the ids themselves are shown."""
    try:
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, ValueError):
        return lambda ids: [f"[{i}]" for i in ids]

    decode = functools.cache(lambda *ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def pieces(ids):
        found, pending = [], []
        for token in ids:
            pending.append(token)
            text = decode(*pending)
            whole = not text.endswith("\ufffd") or len(pending) == 4       # UTF-8 has at most four bytes
            found.append(text if whole else "")
            pending = [] if whole else pending
        return found

    return pieces


if __name__ == "__main__":
    main()
