"""Import stand-ins for three packages that SGLang imports on a CPU and never calls there for a dense language model:
sgl_kernel and triton (GPU kernels), torchvision (its PyPI wheel is a CUDA build that fails beside a CPU torch).

Every name in them is a class: it can be imported, inherited from, asked for attributes, used as a decorator or in an
annotation. Launching a kernel, or calling anything of sgl_kernel, raises.
"""

import importlib.machinery
import sys
import types

VERSIONS = {"sgl_kernel": "0.0.0", "triton": "3.7.0", "torchvision": "0.28.0"}


def install():
    """Ahead of real packages of these names, which may be there and broken."""
    sys.meta_path.insert(0, Finder())


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in VERSIONS:
            return importlib.machinery.ModuleSpec(name, Finder, is_package=True)

    @staticmethod
    def create_module(spec):
        return Module(spec.name)

    @staticmethod
    def exec_module(module):
        if module.__name__ in VERSIONS:
            module.__version__ = VERSIONS[module.__name__]
        if module.__name__ == "triton":   # plain arithmetic that is called at import
            module.cdiv = lambda a, b: -(-a // b)
            module.next_power_of_2 = lambda n: 1 << max(0, n - 1).bit_length()


class Module(types.ModuleType):
    def __getattr__(self, name):
        return stand_in(self.__name__, name)


def stand_in(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (), {"__module__": owner})


class Anything(type):
    """The class of the stand-ins."""

    def __getattr__(cls, name):
        return stand_in(f"{cls.__module__}.{cls.__name__}", name)

    def __call__(cls, *args, **kwargs):
        if cls.__module__.startswith("sgl_kernel"):
            raise RuntimeError(f"{cls.__module__}.{cls.__name__} was called, and is not there on a CPU")
        return stand_in(cls.__module__, f"{cls.__name__}()")   # a decorator, or what one returns

    def __getitem__(cls, grid):
        def launch(*args, **kwargs):
            raise RuntimeError(f"{cls.__module__}.{cls.__name__} was launched, and is not there on a CPU")
        return launch

    def __iter__(cls):
        return iter(())

    def __contains__(cls, item):
        return False
