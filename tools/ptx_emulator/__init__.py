"""The kernels on a CPU: their PTX, translated to C++ and run by fibers. See tools/ptx_emulator/README.md."""
