"""The kernels on a CPU: their PTX, translated to C++ and run by fibers. See README.md.

why_not()            why the emulator cannot be built here; empty where it can
build(only)          builds the library and its Python module, with the kernels that the texts select
emulated(seed=...)   inside, the public functions run the emulated kernels on CPU tensors
"""

from .device import emulated
from .make import MARKED, SAMPLE, build, why_not

__all__ = ["MARKED", "SAMPLE", "build", "emulated", "why_not"]
