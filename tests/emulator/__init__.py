"""The kernels on a CPU: their PTX, translated to C++ and run by fibers. See docs/emulator.md."""
