"""What a newcomer meets first: the requirement files, the prelude's messages, the two commands, the tiny model.

The scripts run in a copy of their folder with an interpreter that only writes down its arguments.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from args import parse_args
from scripts import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent
FILES = ("requirements-cpu.txt", "requirements.txt")
RECORDER = """#!/usr/bin/env bash
printf '%s\\n' "$PWD" "$@" --end-- >> "$(dirname "$0")/../calls"
"""
OLD_PYTHON = """#!/usr/bin/env bash
case "$*" in *version_info*) exit 1;; --version) echo Python 3.9.2;; esac
"""
PYTHON_WITHOUT_VENV = """#!/usr/bin/env bash
case "$*" in *ensurepip*) exit 1;; --version) echo Python 3.12.3;; esac
"""


# ---------------------------------------------------------------- requirement files

def requirement_lines(file):
    """[(requirement, reason)], with the lines that are installed by --no-deps."""
    lines = [line.removeprefix("#! ") for line in (ROOT / file).read_text().splitlines()]
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    return [(line.partition("#")[0].strip(), line.partition("#")[2].strip()) for line in lines]


@pytest.mark.parametrize("file", FILES)
def test_every_requirement_has_a_reason_and_a_version(file):
    lines = requirement_lines(file)
    assert len(lines) >= 10
    assert [requirement for requirement, reason in lines if len(reason) < 10] == []
    assert [requirement for requirement, _ in lines if "==" not in requirement and requirement != "numpy"] == []


def test_environment_is_what_the_file_says():
    file = FILES[1] if torch.version.cuda else FILES[0]
    pins = dict(requirement.split("==") for requirement, _ in requirement_lines(file) if "==" in requirement)
    assert {name: metadata.version(name) for name in pins} == pins


def test_no_cuda_package_beside_the_cpu_build():
    installed = {distribution.name.lower() for distribution in metadata.distributions()}
    cuda = {name for name in installed if re.match(r"nvidia-|cuda-|flashinfer|sglang-kernel|triton$", name)}
    assert torch.version.cuda or not cuda


def resolve(file, python_version):
    """What a plain installation of `file` would bring to Linux, by the index's metadata: no wheel is fetched."""
    words = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-config",
             "--python", sys.executable, "--python-version", python_version,
             "--python-platform", "x86_64-manylinux_2_35", str(file)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("python_version", ("3.11", "3.13"))
def test_gpu_requirements_resolve_together(python_version):
    result = resolve(ROOT / FILES[1], python_version)
    assert result.returncode == 0, f"{FILES[1]} does not resolve (this test needs the network):\n{result.stderr}"
    packages = result.stdout.splitlines()
    wanted = {requirement for requirement, _ in requirement_lines(FILES[1]) if "==" in requirement}
    assert wanted <= set(packages)
    assert any(package.startswith("nvidia-nccl-cu") for package in packages)


def test_a_contradiction_does_not_resolve(tmp_path):
    file = tmp_path / "contradiction.txt"
    file.write_text("sglang==0.5.18\ntransformers==5.12.0\n")
    result = resolve(file, "3.11")
    assert result.returncode == 1 and "transformers==5.12.1" in result.stderr, result.stderr


# ---------------------------------------------------------------- prelude and commands

def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def project(tmp_path):
    """A copy of the scripts, with an environment whose interpreter writes its folder and arguments to `calls`."""
    root = tmp_path / "a project"                                  # with a space: every path must be quoted
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / FILES[0], root)
    executable(root / ".venv/bin/python", RECORDER)
    return root


def shell(project, command, *words, **env):
    """Runs a bash command of the copy from another folder."""
    elsewhere = project.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("OFFBEAT_")}, **env}
    words = ["bash", *command, *words]
    return subprocess.run(words, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=120)


def prelude(project, **env):
    return shell(project, ["-c", 'source "$1/scripts/prelude.sh"; echo "$ROOT|$PYTHON"', "bash", str(project)], **env)


def calls(project):
    """[(working folder, arguments)] of the interpreter so far."""
    texts = (project / ".venv/calls").read_text().split("\n--end--\n")[:-1]
    return [(folder, words) for folder, *words in (text.split("\n") for text in texts)]


def test_prelude_installs_only_when_the_requirements_changed(project):
    first = prelude(project)
    assert first.stdout.strip() == f"{project}|{project}/.venv/bin/python", first.stderr
    installs = [words for _, words in calls(project) if "install" in words and "--dry-run" not in words]
    assert len(installs) == 2 and "--no-deps" not in installs[0] and "--no-deps" in installs[1]
    lines = (project / ".venv/no-deps.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["sglang==0.5.18", "xgrammar==0.2.1"]
    before = len(calls(project))
    assert prelude(project).returncode == 0 and len(calls(project)) == before
    with open(project / FILES[0], "a") as f:
        f.write("another==1.0    # a reason\n")
    assert prelude(project).returncode == 0 and len(calls(project)) > before


def test_torch_comes_from_its_own_index_only_where_pip_does_not_see_the_cpu_build(project):
    prelude(project)
    assert not [words for _, words in calls(project) if "--extra-index-url" in words]
    executable(project / ".venv/bin/python", RECORDER + '[[ "$*" != *--dry-run* ]]\n')
    (project / ".venv/installed.sha256").unlink()
    prelude(project, OFFBEAT_TORCH_INDEX="https://mirror.invalid/cpu")
    extra = [words for _, words in calls(project) if "--extra-index-url" in words]
    assert len(extra) == 1 and extra[0][-1] == "https://mirror.invalid/cpu"


@pytest.mark.parametrize("text, message", [
    (OLD_PYTHON, r"version 3\.11 or newer with venv is needed;.*python3 is Python 3\.9\.2"),
    (PYTHON_WITHOUT_VENV, r"python3 has no venv module .*apt-get install python3-venv"),
    ("#!/bin/sh\nexit 127\n", r"none was found on PATH"),
])
def test_an_unusable_python_is_named(project, tmp_path, text, message):
    shutil.rmtree(project / ".venv")
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        executable(tmp_path / "bin" / name, text)
    result = prelude(project, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert result.returncode == 1 and re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


def test_too_little_memory_is_named(project, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:        4011234 kB\nMemFree:          100000 kB\n")
    result = prelude(project, OFFBEAT_MEMINFO=str(tmp_path / "meminfo"))
    assert result.returncode == 1 and result.stderr == "setup: too little memory: 8 GB are needed, 4 GB are there\n"


def test_no_network_is_named(project):
    shutil.rmtree(project / ".venv")
    nowhere = "http://127.0.0.1:9/simple"
    result = prelude(project, OFFBEAT_PYTHON=sys.executable, OFFBEAT_TORCH_INDEX=nowhere, PIP_INDEX_URL=nowhere,
                     PIP_RETRIES="0", PIP_CONFIG_FILE="/dev/null", PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="")
    assert result.returncode == 1 and "setup: no network: pip cannot reach" in result.stderr, result.stderr
    assert not (project / ".venv/installed.sha256").exists()


def test_test_command_hands_pytest_its_arguments(project):
    result = shell(project, [str(project / "scripts/test.sh")], "tests/test_x.py", "-k", "one or two")
    assert result.returncode == 0, result.stderr
    assert calls(project)[-1] == (str(project), ["-m", "pytest", "tests/test_x.py", "-k", "one or two"])


def test_quickstart_hands_its_flags_on(project, tiny_model, monkeypatch):
    (project / "models").mkdir()
    (project / "models/tiny-seed7").symlink_to(tiny_model)
    result = shell(project, [str(project / "scripts/quickstart.sh")], "--seed", "7", "--lr", "0", "--run-name", "mine")
    assert result.returncode == 0, result.stderr
    (_, make), (folder, train) = calls(project)[-2:]
    assert make == [f"{project}/scripts/make_tiny_model.py", f"{project}/models/tiny-seed7", "--seed", "7"]
    assert train[0] == f"{project}/train_async.py" and train[-6:] == ["--seed", "7", "--lr", "0", "--run-name", "mine"]
    assert folder == str(project.parent / "elsewhere")             # the user's relative paths mean what the user sees
    args = parse_args(train[1:])
    assert (args.seed, args.lr, args.run_dir) == (7, 0.0, f"{project}/runs/mine")
    assert args.over_sampling_batch_size == args.rollout_batch_size
    assert args.num_rollout % args.eval_interval == 0


def test_quickstart_refuses_a_seed_that_is_none(project):
    result = shell(project, [str(project / "scripts/quickstart.sh")], "--seed=x")
    assert result.returncode == 1 and "--seed needs a whole number, is 'x'" in result.stderr


def test_no_script_ends_processes_by_name():
    for path in [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci/run"]:
        assert not re.search(r"pkill|killall|ray stop", path.read_text()), path


# ---------------------------------------------------------------- tiny model

def test_tokenizer_takes_any_text_and_one_token_per_character(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "12+34=46\n héé\t{}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12+34=")) == 6
    messages = [{"role": "user", "content": "1+1="}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_rows_are_right_held_out_and_follow_the_seed():
    train, held_out = make_tiny_model.make_rows(3)
    for row in train + held_out:
        assert eval(row["prompt"].rstrip("=")) == int(row["label"]) >= 0
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert len(train) + len(held_out) == 3775 and len(held_out) == make_tiny_model.EVAL_ROWS
    assert make_tiny_model.make_rows(3)[1] == held_out != make_tiny_model.make_rows(4)[1]


def test_a_finished_tiny_model_is_kept_and_a_foreign_folder_refused(tmp_path):
    settings = {"seed": 1}
    assert not make_tiny_model.is_complete(tmp_path / "new", settings)
    (tmp_path / "tiny_model.json").write_text(json.dumps(settings))
    assert make_tiny_model.is_complete(tmp_path, settings)
    assert not make_tiny_model.is_complete(tmp_path, {"seed": 2})
    (tmp_path / "tiny_model.json").rename(tmp_path / "notes.txt")
    with pytest.raises(SystemExit, match="name a new folder"):
        make_tiny_model.is_complete(tmp_path, settings)
