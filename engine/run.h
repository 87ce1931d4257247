// A run from its configuration to its exit code.
#pragma once
#include "engine/config.h"
#include "kernels/check.h"

namespace torus {

// Plans, verifies, generates or trains, as the configuration says. Throws Error.
Exit run(const Config&);

}  // namespace torus
