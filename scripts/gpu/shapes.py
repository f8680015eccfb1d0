"""Model directories without weights: configs of the Qwen3 and Qwen2.5 families, and a tokenizer that serves for any of them. What
is timed on them does not depend on what the numbers are: the engine loads dummy weights, the trainer random ones."""

import json
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from plan import known_config


def make_shape(name, folder):
    """Writes FOLDER/NAME, with a few prompts in it: 0.6B, 8B, ... of Qwen3 and 2.5-3B, ... of Qwen2.5, whose KV cache is smaller (see
    plan.SHAPES); 'tiny' is for a rehearsal on the CPU. Returns the path."""
    import make_tiny_model
    from transformers import AutoConfig

    path = os.path.join(folder, name)
    tokenizer = make_tiny_model.build_tokenizer()
    if name == "tiny":
        config = make_tiny_model.build_model(tokenizer, 0).config
        config.architectures = ["Qwen3ForCausalLM"]
    else:
        shape = known_config(f"qwen{name}" if name.startswith("2.5") else f"qwen3-{name}")
        if shape is None:
            raise ValueError(f"there is no shape {name!r}; plan.SHAPES has them all")
        config = AutoConfig.for_model(**shape, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6, eos_token_id=151645,
                                      bos_token_id=151643, dtype="bfloat16",
                                      architectures=[f"{shape['model_type'].title()}ForCausalLM"])
    tokenizer.save_pretrained(path)
    config.save_pretrained(path)
    with open(os.path.join(path, "prompts.jsonl"), "w") as f:
        f.writelines(json.dumps({"prompt": "1+2=", "label": "3"}) + "\n" for _ in range(4096))
    return path


def read_layout(name, flag, parser):
    """'tp2pp2' -> {"tp": 2, "pp": 2, "dp": 1}: how a model is split over training ranks. The parser's error if it is none."""
    if not re.fullmatch(r"((tp|pp|dp)[1-9]\d*)+", name):
        parser.error(f"{flag} {name}: give sizes like tp2pp2 or dp4")
    return {"tp": 1, "pp": 1, "dp": 1} | {kind: int(size) for kind, size in re.findall(r"(..)(\d+)", name)}


def ranks(sizes):
    return sizes["tp"] * sizes["pp"] * sizes["dp"]


def layout_flags(sizes):
    return ["--tensor-model-parallel-size", str(sizes["tp"]), "--pipeline-model-parallel-size", str(sizes["pp"]),
            "--actor-num-gpus-per-node", str(ranks(sizes))]


def random_weights():
    """From now on trainers start from random weights instead of a checkpoint's (in this process and in what it pickles)."""
    import model
    import torch

    def fill(network, hf, path):
        torch.manual_seed(0)               # alike on every data-parallel rank
        for p in network.parameters():
            if p.dim() > 1:
                p.data.normal_(0.0, 0.02)

    model.load_weights = fill
