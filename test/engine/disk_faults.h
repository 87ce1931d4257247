// A disk that fails on demand. disk_faults.cpp defines write, fsync, rename, mkdir and unlinkat for
// the whole test program (its definitions come before the C library's); they do their work (but
// fsync, which returns at once) unless a fault is armed. So the product needs no hooks, and faults
// hit exactly the calls it makes.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace torus::test {

struct DiskFault {
    enum class Kind { none, die, fail, lose };
    Kind kind = Kind::none;
    int64_t at = 0;     // the call that is hit: 1 = the first from now on
    int error = 0;      // fail: errno
    bool half = false;  // die, fail: a write stores half of its bytes first
    enum class Calls { all, writes, syncs, renames } calls = Calls::all;  // which are counted
};

constexpr int died = 86;  // exit status of Kind::die

void arm(const DiskFault&);
int64_t disarm();  // how many calls were counted since arm()
// The calls since arm(), in order: "write PATH", "fsync PATH", "rename FROM".
const std::vector<std::string>& trace();

}  // namespace torus::test
