// Before the first collective of a run: do all ranks have the same build, configuration, data and
// shapes? Neither MPI nor NCCL notices when they do not; wrong sums or a hang would follow.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "comm/comm.h"

namespace torus {

using Facts = std::vector<std::pair<std::string, std::string>>;  // key, value; in order

// Collective over `host`. Throws Error(mismatch) on every rank when any two ranks differ, naming
// the first key that differs, both values and the ranks that have them.
void handshake(Comm& host, const Facts& facts);

}  // namespace torus
