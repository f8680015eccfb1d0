"""SGLang plugin, found through the entry point in offbeat_engine.dist-info."""

import multiprocessing
import os


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", start_children_by_fork, HookType.AFTER)


def start_children_by_fork(result, *args, **kwargs):
    """Scheduler and detokenizer share the parent's imports (6 s each on two cores). Not with CUDA, which forbids it."""
    multiprocessing.set_start_method("fork", force=True)
