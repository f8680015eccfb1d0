"""An entry script whose engine actors start scripted engines in SGLang's place, on whichever node they are put.

    python tests/scripted_server.py train_async.py [flags of that script]
"""

import importlib
import os
import sys

import ray

sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

import engine
import placement
from args import parse_args

ENGINE = dict(vocab_size=250, lengths="1:2,1:5", unit_seconds=0.05, budget=6)
OPTIONS = [word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))]


class ScriptedServer(engine.Server):
    def start(self):
        engine.server_command = lambda args, model_path, port, rank, host: (
            [sys.executable, os.path.join(os.path.dirname(__file__), "scripted_engine.py"), "--die-with-parent", str(os.getpid()),
             "--host", host, "--port", str(port), *OPTIONS], dict(os.environ))
        return super().start()


if __name__ == "__main__":
    script = sys.argv.pop(1)
    from scripted_server import ScriptedServer as Importable      # not of __main__: the actors import it by its name
    placement.SGLangEngine = ray.remote(num_cpus=0, max_concurrency=2)(Importable)
    placement.run(importlib.import_module(script.removesuffix(".py")).train, parse_args(script=script))
