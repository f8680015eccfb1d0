"""Starts SGLang's HTTP server like `python -m sglang.launch_server FLAGS`, with two additions.

It dies with its owner: the owner holds the other end of stdin, and when that closes the whole process group is killed.
(A parent-death signal would fire when the *thread* that started the server ends.)
It starts in half the time: see `import_sglang`, and `fork_children` in offbeat_engine.py.
"""

import gc
import os
import pkgutil
import shutil
import signal
import sys
import threading

MODELS = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")


def die_with_owner():
    while os.read(0, 4096):
        pass
    shutil.rmtree(os.environ.get("OFFBEAT_SCRATCH", ""), ignore_errors=True)   # the owner cannot do it any more
    os.killpg(0, signal.SIGKILL)


def import_sglang():
    """Imports what the server needs, without collecting garbage among 700,000 new objects, without Megatron (a
    debugging aid of SGLang's would import it), and with the model files of `MODELS` instead of all 150."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        import cpu_stand_ins
        cpu_stand_ins.install()
    sys.modules["megatron"] = None
    gc.disable()
    import sglang.srt.models
    files = [module.name for module in pkgutil.iter_modules(sglang.srt.models.__path__)]
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(sorted(set(files) - set(MODELS))))
    import sglang.srt.entrypoints.http_server   # noqa: F401  run_server would import it late, with collection on
    gc.enable()
    gc.freeze()


def main():
    threading.Thread(target=die_with_owner, daemon=True).start()
    import_sglang()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree
    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
