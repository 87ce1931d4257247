// The CUDA tests' own main: where no GPU can be used there is nothing to test, and the exit code
// says "skipped" (4), not "passed". Large cases run only with --no-skip.
#define DOCTEST_CONFIG_IMPLEMENT
#define DOCTEST_CONFIG_NO_SHORT_MACRO_NAMES
#include <cstdio>

#include "doctest/doctest.h"
#include "kernels/kernels.h"

int main(int argc, char** argv) {
    const std::string reason = torus::cuda_unavailable_reason();
    if (!reason.empty()) {
        std::printf("skipped: %s\n", reason.c_str());
        return 4;
    }
    return doctest::Context(argc, argv).run();
}
