"""Model directories without weights: configs of the Qwen3 and Qwen2.5 families, and a tokenizer that serves for any of them. What
is timed on them does not depend on what the numbers are: the engine loads dummy weights, the trainer random ones."""

import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

# hidden, layers, heads, intermediate, tied head, key-value heads; heads are of 128 and there are 151,936 tokens everywhere
SHAPES = {"0.6B": (1024, 28, 16, 3072, True, 8), "1.7B": (2048, 28, 16, 6144, True, 8), "4B": (2560, 36, 32, 9728, True, 8),
          "8B": (4096, 36, 32, 12288, False, 8),
          "2.5-1.5B": (1536, 28, 12, 8960, True, 2), "2.5-3B": (2048, 36, 16, 11008, True, 2)}       # Qwen2.5: a smaller KV cache


def make_shape(name, folder):
    """Writes FOLDER/NAME, with a few prompts in it; 'tiny' is for a rehearsal on the CPU. Returns the path."""
    import make_tiny_model
    from transformers import Qwen2Config, Qwen3Config

    path = os.path.join(folder, name)
    tokenizer = make_tiny_model.build_tokenizer()
    if name == "tiny":
        config = make_tiny_model.build_model(tokenizer, 0).config
        config.architectures = ["Qwen3ForCausalLM"]
    else:
        hidden, layers, heads, inner, tied, kv_heads = SHAPES[name]
        family, kind = (Qwen2Config, "Qwen2") if name.startswith("2.5") else (Qwen3Config, "Qwen3")
        config = family(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                        head_dim=128, intermediate_size=inner, vocab_size=151936, tie_word_embeddings=tied,
                        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6, eos_token_id=151645,
                        bos_token_id=151643, architectures=[f"{kind}ForCausalLM"], dtype="bfloat16")
    tokenizer.save_pretrained(path)
    config.save_pretrained(path)
    with open(os.path.join(path, "prompts.jsonl"), "w") as f:
        f.writelines(json.dumps({"prompt": "1+2=", "label": "3"}) + "\n" for _ in range(4096))
    return path


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
