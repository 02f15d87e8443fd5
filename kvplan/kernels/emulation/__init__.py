"""The CUDA source on a CPU: built by a C++ compiler with `shim.hpp`, run by `runtime.cpp` in a process of its own."""
