"""The CUDA kernels on machines without a GPU: an emulated device (driver.cpp, compiler.cpp), cases that run on it, and
mutants of the kernels that the cases must find."""
