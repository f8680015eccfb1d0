"""scripts/report.py on made-up runs, and its page in a real browser (Chromium; scripts/test.sh installs it)."""

import html
import json
import os
import random
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import harness
from batch import save_groups
from buffer import Group, Sample

import report

NASTY = "</script><img src=x onerror=\"document.documentElement.dataset.hacked='yes'\"><!-- é 😀\u2028"
LONE = "half a pair: \ud83d"
STEP_SECONDS, GROUPS, MEMBERS = 10.0, 10, 10


# ---- a run as the scripts leave it ------------------------------------------------------------------------
def make_groups(draw, tokenizer, step):
    """GROUPS x MEMBERS samples, with the trainer's log-probs beside them. Each was begun by one version and ended by the next. The
    first group of step 0 is long."""
    groups, trained = [], []
    for g in range(GROUPS):
        a, b = draw.randrange(100), draw.randrange(100)
        prompt = f"{a}+{b}="
        samples = [Sample(step * GROUPS + g, i, g, prompt, str(a + b), tokenizer.encode(prompt)) for i in range(MEMBERS)]
        for sample in samples:
            right = draw.random() < 0.5
            text = f" {a} and {b} are" * (draw.randint(3, 60) if step or g else 300) + f" {a + b if right else a + b + 1}."
            tokens = tokenizer.encode(text)
            logprobs = [-draw.expovariate(3) for _ in tokens]
            half = len(tokens) // 2
            sample.append(tokens[:half], logprobs[:half], max(0, step - 2))
            sample.append(tokens[half:], logprobs[half:], max(0, step - 1))
            sample.status, sample.reward, sample.response = "completed", float(right), text
            trained += [logprob + draw.gauss(0, 0.02) for logprob in logprobs]
        groups.append(Group(step * GROUPS + g, g, 0, samples))
    return groups, np.array(trained, np.float32)


def make_run(folder, model, steps, files=None, nasty=False):
    """A one-step-off run of so many steps on two engines. files: batches that really differ; the others are links to them."""
    from transformers import AutoTokenizer
    tokenizer, draw = AutoTokenizer.from_pretrained(model), random.Random(0)
    os.makedirs(os.path.join(folder, "samples"))
    file = lambda step: os.path.join(folder, "samples", f"step_{step:07d}.npz")
    trainer = lambda step: file(step).replace(".npz", ".trainer.npy")
    args = {"script": "train_async.py", "hf_checkpoint": str(model), "without_engines": False, "rollout_num_gpus": 2,
            "world_size": 2, "policy_old": "rollout", "partial_rollout": False, "fully_async": False,
            "over_sampling_batch_size": GROUPS, "rollout_batch_size": GROUPS, "flags": {"lr": 1e-6, "seed": 1, "load": None}}
    with open(os.path.join(folder, "args.json"), "w") as f:
        json.dump(args, f)
    rows, batches, ledger = [], [], []
    for step in range(steps):
        if step < (files or steps):
            groups, trained = make_groups(draw, tokenizer, step)
            if nasty and step == steps - 1:
                sample = groups[0].samples[0]
                groups[0].samples[0] = again = Sample(sample.group_id, 0, 0, LONE + NASTY, LONE, sample.prompt_tokens)
                ids = tokenizer.encode(NASTY)
                again.append(ids, [-0.5] * len(ids), step - 1)
                again.status, again.reward, again.response = "completed", 1.0, NASTY + LONE
                trained = np.concatenate([np.full(len(ids), -1.5, np.float32), trained[len(sample.response_tokens):]])
            save_groups(file(step), groups)
            np.save(trainer(step), trained)
            batches.append([group.effort["tokens"] for group in groups])
        else:
            os.link(file(step % files), file(step))
            os.link(trainer(step % files), trainer(step))
        lengths, start = batches[step % len(batches)], 1000.0 + STEP_SECONDS * step
        for g in range(GROUPS):
            group, engine = step * GROUPS + g, g % 2
            ledger += [(start, "draw", {"group": group, "row": g, "epoch": step}),
                       (start, "submit", {"group": group, "engine": engine}),
                       (start + 4 + g / 2, "finish", {"group": group, "tokens": lengths[g], "seconds": [1.0] * MEMBERS,
                                                      "generated": start + 3.5 + g / 2})]
        ids = [step * GROUPS + g for g in range(GROUPS)]
        ledger += [(start + 9, "batch", {"step": step, "groups": ids}), (start + 10, "trained", {"step": step, "groups": ids})]
        tokens = sum(map(sum, lengths))
        rows.append({"step": step, "version": step, "rollout/reward": 0.2 + 0.6 * step / steps,
                     "rollout/response_len": tokens / 100, "rollout/response_len_max": max(map(max, lengths)),
                     "rollout/truncated": 0.0, "rollout/tokens": tokens,
                     "staleness/histogram": {"0": tokens // 4, "1": tokens - tokens // 4}, "staleness/mean": 0.75,
                     "perf/step_time": STEP_SECONDS, "perf/wait_prev_gen": 2.0, "perf/train_time": 7.0,
                     "perf/log_probs_time": 0.5, "perf/lone_generate_time": 9.0, "perf/generate_time": 9.0,
                     "sync/time": 0.75, "sync/pause_time": 0.25,
                     "sync/version": step, "train/loss": (-1) ** step / (step + 1), "perf/train_idle_share": 0.3,
                     "perf/rollout_idle_share": 0.1, "length_bias/trained": 0.98, "length_bias/lag": 1.5,
                     **({"parity/mismatch": 0.01} if step % 2 else {}),
                     "spans": {"wait": [[start, start + 2]], "sync": [[start + 2, start + 2.75]],
                               "train": [[start + 2.75, start + 9.75], [start + 2.75, start + 9.5]]}})
    with open(os.path.join(folder, "metrics.jsonl"), "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    with open(os.path.join(folder, "eval.jsonl"), "w") as f:
        f.writelines(json.dumps({"version": v, "sums/reward": v / steps}) + "\n" for v in range(0, steps + 1, max(1, steps // 5)))
    with open(os.path.join(folder, "ledger.jsonl"), "w") as f:
        f.writelines(json.dumps({"seq": i + 1, "time": at, "event": event, **fields}) + "\n"
                     for i, (at, event, fields) in enumerate(sorted(ledger, key=lambda record: record[0])))
    return str(folder)


# ---- what is on the page ----------------------------------------------------------------------------------
def test_the_numbers_of_a_page(tiny_model, tmp_path):
    run = report.read_run(make_run(tmp_path / "run", tiny_model, 6))
    assert run["steps"] == 6 and run["curves"]["x"] == [0, 1, 2, 3, 4, 5]
    assert run["curves"]["rollout/reward"] == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert run["curves"]["parity/mismatch"] == [None, 0.01] * 3
    assert run["evals"] == {"sums/reward": [[v, pytest.approx(v / 6, rel=1e-4)] for v in range(7)]}
    assert run["flags"] == {"lr": "1e-06", "seed": "1"}
    assert [column[:2] for column in run["lag"]] == [[i, i] for i in range(6)]
    assert run["lag"][3][2] == {"0": pytest.approx(0.25, abs=1e-3), "1": pytest.approx(0.75, abs=1e-3)}
    groups = harness.read_groups(tmp_path / "run" / "samples" / "step_0000003.npz")
    lengths = sorted(len(s["response_tokens"]) for group in groups for s in group["samples"])
    first, last, low, middle, high, longest = run["lengths"][3]
    assert (first, last, longest) == (3, 3, lengths[-1]) and middle == (lengths[49] + lengths[50]) / 2
    assert lengths[9] <= low <= lengths[10] and lengths[89] <= high <= lengths[90]
    clock = run["clock"]
    assert clock["parts"] == {"wait": 2.0, "sync": 0.75, "train": 7.0, "save": 0.0, "other": 0.25} and clock["step"] == 10.0
    # a synchronous step: 9 s of generation, 7 of training, 0.5 of sync, 0.25 of the rest
    assert clock["speed"]["sync"] == 16.75 and clock["speed"]["hidden generation"] == 6.75
    picture = run["last_steps"]
    assert picture["steps"] == [[step, 10.0 * step] for step in range(6)] and picture["seconds"] == 59.75
    assert [lane[:2] for lane in picture["lanes"]] == [["engine", 0], ["engine", 1], ["rank", 0], ["rank", 1]]
    assert picture["lanes"][0][3][:8] == [[0.0, 1], [0.0, 2], [0.0, 3], [0.0, 4], [0.0, 5], [3.5, 4], [4.5, 3], [5.5, 2]]
    assert picture["lanes"][0][2] == [["reward", 7.5 + at, 8.0 + at] for at in range(0, 60, 10)]      # group 8: 7.5 .. 8 s
    assert picture["lanes"][3][2][:3] == [["wait", 0.0, 2.0], ["sync", 2.0, 2.75], ["train", 2.75, 9.5]]


@pytest.fixture(scope="module")
def long_run(tiny_model, tmp_path_factory):
    """What the page shows of 1,000 steps with 100,000 samples."""
    return report.read_run(make_run(tmp_path_factory.mktemp("long") / "run", tiny_model, 1000, files=4))


def test_long_runs_are_thinned_by_means(long_run):
    run = long_run
    assert run["steps"] == 1000 and len(run["curves"]["x"]) == 500 and run["curves"]["x"][:2] == [0.5, 2.5]
    assert run["curves"]["rollout/reward"][0] == pytest.approx(0.2003) and run["curves"]["parity/mismatch"][0] == 0.01
    assert len(run["lag"]) == 112 and run["lag"][0][:2] == [0, 8] and run["lag"][-1][:2] == [999, 999]      # nine to a column
    samples = run["samples"]
    assert samples["recorded"] == 1000 and [step for step, _, _ in samples["steps"]] == [i * 999 // 39 for i in range(40)]
    assert sum(len(s["tokens"]) for _, _, groups in samples["steps"] for g in groups for s in g["samples"]) < 700_000


def test_samples_are_whole_and_cut_where_they_are_long(tiny_model, tmp_path):
    folder = make_run(tmp_path / "run", tiny_model, 2)
    run, groups = report.read_run(folder), harness.read_groups(tmp_path / "run" / "samples" / "step_0000001.npz")
    trained = np.load(tmp_path / "run" / "samples" / "step_0000001.trainer.npy")
    places = np.cumsum([0] + [len(s["response_tokens"]) for group in groups for s in group["samples"]])
    (_, _, long), (_, count, shown) = run["samples"]["steps"]
    assert count == GROUPS and shown[0]["why"] == "longest answer of the step" and len({g["id"] for g in shown}) == len(shown)
    assert shown[0]["id"] == max(groups, key=lambda g: max(len(s["response_tokens"]) for s in g["samples"]))["group_id"]
    for g in shown:
        original = groups[g["id"] - GROUPS]
        assert g["prompt"] == original["samples"][0]["prompt"] and g["size"] == MEMBERS and len(g["samples"]) == report.MEMBERS
        for i, sample in enumerate(g["samples"]):
            want = original["samples"][i]
            at = places[(g["id"] - GROUPS) * MEMBERS + i]
            assert "".join(sample["tokens"]) == want["response"] and len(sample["tokens"]) == sample["length"]
            assert sample["engine"] == pytest.approx(want["rollout_logprobs"], abs=1e-4)
            assert sample["runs"] == want["version_runs"]
            assert sample["trainer"] == pytest.approx(trained[at:at + sample["length"]], abs=1e-4) and sample["cut"] is None
    sample = long[0]["samples"][0]
    assert sample["length"] > 2500 and sample["cut"] == [1500, sample["length"] - 501]
    assert len(sample["tokens"]) == len(sample["engine"]) == len(sample["trainer"]) == 2000


def test_further_samples_of_an_attempt_have_their_own_log_probs(tmp_path):
    """Two attempts and a further sample of the first: by hand, each token's difference is that of its own sample."""
    samples = [Sample(5, index, 0, "", "", [7], part=part) for index, part in ((0, 0), (1, 0), (0, 1))]
    for sample, engine in zip(samples, ([-1.0, -2.0, -3.0], [-4.0, -5.0], [-6.0, -7.0])):
        sample.append([9] * len(engine), engine, 0)
    groups, path = [Group(5, 0, 0, samples)], str(tmp_path / "step.npz")
    np.save(path.replace(".npz", ".trainer.npy"), np.array([-1.5, -2.5, -3.5, -4.5, -5.5, -6.5, -7.5], np.float32))
    trained = report.trainer_logprobs(path, groups)
    assert report.pick_groups(groups, trained, 0, 100) == [(groups[0], "longest answer of the step")]
    shown = report.show_group(groups[0], trained, "", lambda ids: list(map(str, ids)))
    assert [s["trainer"] for s in shown["samples"]] == [[-1.5, -2.5, -3.5], [-4.5, -5.5], [-6.5, -7.5]]


def test_a_character_of_several_tokens_stands_at_its_last(tiny_model):
    from transformers import AutoTokenizer
    ids = AutoTokenizer.from_pretrained(tiny_model).encode("aé😀b")
    assert report.token_pieces(str(tiny_model))(ids) == ["a", "", "é", "", "", "", "😀", "b"]
    assert report.token_pieces("no/such/folder")([5, 7]) == ["[5]", "[7]"]


def test_the_longest_and_the_most_different_come_first(tiny_model, tmp_path):
    draw = random.Random(1)
    from transformers import AutoTokenizer
    groups, trained = make_groups(draw, AutoTokenizer.from_pretrained(tiny_model), 1)
    rows, at = {}, 0
    for s in (s for group in groups for s in group.samples):
        rows[s.group_id, s.index, 0] = np.array(s.rollout_logprobs)
    rows[17, 3, 0] = rows[17, 3, 0] + 0.25
    length = 10 + max(range(GROUPS), key=lambda g: max(groups[g].response_lengths))
    picked = report.pick_groups(groups, rows, 0, 10 ** 6)
    assert [(g.group_id, why.split()[0]) for g, why in picked[:2]] == [(length, "longest"), (17, "largest")] and length != 17
    assert len(picked) == GROUPS and {why for _, why in picked[2:]} == {"at random"}
    assert [g.group_id for g, _ in report.pick_groups(groups, rows, 0, 1)] == [length]        # even where none fits
    assert [g.group_id for g, _ in report.pick_groups(groups, {}, 0, 1)] == [length]


def test_what_is_not_a_run_says_so(tmp_path):
    for what, said in (("empty", "is not the folder of a run"), ("new", "not one step is finished yet")):
        os.makedirs(tmp_path / what)
        if what == "new":
            (tmp_path / what / "args.json").write_text("{}")
            (tmp_path / what / "metrics.jsonl").write_text("")
        got = subprocess.run([sys.executable, os.path.join(harness.ROOT, "scripts", "report.py"), str(tmp_path / what)],
                             capture_output=True, text=True, timeout=120)
        assert got.returncode == 1 and got.stderr.splitlines()[-1].startswith("error: ") and said in got.stderr


# ---- in a browser -----------------------------------------------------------------------------------------
# Runs through every step, group and colour of the sample browser, and moves the pointer over every chart.
WALK = """<script nonce="offbeat">
  const [run, step, group, color] = document.querySelectorAll("section:last-of-type select");
  const next = document.querySelectorAll("button")[1], text = where => document.querySelector(where).textContent;
  let seen = 0, nasty = 0;
  for (const by of ["difference", "none", "version"]) { color.value = by; color.onchange(); }
  step.value = 0; step.onchange();
  for (; ; seen++) {
    nasty += text(".prompt").includes("onerror=") && text(".response").includes("</" + "script><img");
    if (next.disabled) break;
    next.onclick();
  }
  document.querySelectorAll("svg").forEach(svg => svg.onpointermove && svg.onpointermove({ offsetX: 100 }));
  const token = document.querySelector(".response span"); token.onpointerenter();
  const told = document.body.appendChild(document.createElement("div"));
  told.id = "walk";
  told.textContent = [seen, nasty, text(".detail")].join("|");
</script></body>"""


def browse(path, folder):
    """The DOM of a page after its scripts have run, as text, from a browser of its own."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert browser, "no browser: apt-get install chromium (scripts/test.sh does it where it may)"
    got = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                          "--disable-background-networking", "--disable-component-update", "--disable-sync",
                          f"--user-data-dir={folder}", "--window-size=1280,900", "--dump-dom", f"file://{path}"],
                         capture_output=True, text=True, timeout=60)
    assert got.returncode == 0 and "<main" in got.stdout, got.stderr[-2000:]
    root = re.search(r"<html[^>]*>", got.stdout).group()
    assert "data-error" not in root, root
    return got.stdout, int(re.search(r'data-ready="(\d+)"', root).group(1))


@pytest.mark.drill
def test_the_page_in_a_browser(tiny_model, tmp_path, monkeypatch, capsys):
    """Two runs, 4 and 3 steps. No error in any script, no text that became HTML, curves and samples are there; and nothing is
    fetched: the page's own policy forbids it, and would report it as an error."""
    runs = [make_run(tmp_path / name, tiny_model, steps, nasty=True) for name, steps in (("a", 4), ("b <i>", 3))]
    monkeypatch.setattr(sys, "argv", ["report.py", *runs])
    report.main()
    page = capsys.readouterr().out.splitlines()[-1]
    assert page == str(tmp_path / "report_a_b <i>.html") and not os.path.exists(tmp_path / "a" / "report.html")
    text = open(page, encoding="utf-8").read()
    assert not re.search(r"https?://(?!www\.w3\.org)", text) and "<img" not in text and "default-src 'none'" in text
    assert json.load(open(tmp_path / "a" / "timeline.json"))[0]["ph"] == "M"
    with open(page, "w", encoding="utf-8") as f:
        f.write(text.replace("</body>", WALK))
    dom, _ = browse(page, tmp_path / "browser")
    seen, nasty, told = html.unescape(re.search(r'<div id="walk">(.*?)</div>', dom).group(1)).split("|", 2)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text).group(1))
    assert int(seen) + 1 == sum(len(groups) for _, _, groups in data["runs"][0]["samples"]["steps"])
    assert re.match(r"token 0: version \d+, lag \d · log-prob of the engine −?-?\d", told)
    shown = dom[dom.index("<main"):dom.index("</main>")]
    assert "hacked" not in re.search(r"<html[^>]*>", dom).group() and "<img" not in shown and "b &lt;i&gt;" in shown
    reward = re.search(r'<b title="reward">.*?</svg>', shown, re.S).group()
    assert len(re.findall(r'<path d="M[\d.]+ [\d.]+L', reward)) == 2        # a curve for each run
    assert shown.count('class="sample"') == report.MEMBERS and shown.count("<figure>") > 12
    group = next(g for g in data["runs"][0]["samples"]["steps"][-1][2] if g["why"].startswith("largest"))
    assert nasty == "1" and (group["prompt"], group["label"]) == (LONE + NASTY, LONE)
    assert "".join(group["samples"][0]["tokens"]) == NASTY


def test_where_a_page_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report.default_output(["runs/a/"]) == "runs/a/report.html"
    assert report.default_output(["runs/a/", "old/b"]) == str(tmp_path / "runs" / "report_a_b.html")
    assert report.default_output(["runs/a"] + [f"runs/{i}" for i in range(60)]) == str(tmp_path / "runs" / "report_a_and_60_more.html")


def test_a_thousand_steps_open_at_once(long_run, tmp_path):
    """1,000 steps with 100,000 samples: laid out within 3 s of the browser's start of loading."""
    page = tmp_path / "report.html"
    report.write_page(str(page), [long_run])
    dom, milliseconds = browse(page, tmp_path / "browser")
    print(f"{os.path.getsize(page) / 1e6:.1f} MB, laid out after {milliseconds} ms")
    assert milliseconds < 3000 and "evenly spread over the 1,000 that were recorded" in dom
