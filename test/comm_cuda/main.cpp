// Where no GPU can be used there is nothing to test: the same main as the kernels' CUDA tests.
#include "test/cuda/main.cpp"
