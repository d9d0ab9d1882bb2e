"""The CUDA kernels on machines without a GPU: an emulated device (driver.cpp, compiler.cpp), cases that run on it, and
planted bugs that the cases must catch."""
