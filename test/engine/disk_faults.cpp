#include "disk_faults.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cstdio>

#include <cerrno>

namespace torus::test {
namespace {

DiskFault fault;  // of this process; the only way for the functions below to know
int64_t seen = 0;
bool armed = false;
std::vector<std::string> calls_made;

void record(const std::string& call, int fd) {
    if (!armed) return;
    char path[512] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    if (::readlink(link.c_str(), path, sizeof path - 1) > 0) calls_made.push_back(call + path);
}

// Counts a call; true when it is the one to hit. Dies here when that is the fault.
bool hit(DiskFault::Calls calls) {
    if (!armed || (fault.calls != DiskFault::Calls::all && fault.calls != calls)) return false;
    if (++seen != fault.at || fault.kind == DiskFault::Kind::none) return false;
    if (fault.kind == DiskFault::Kind::die && !fault.half) ::_exit(died);
    return true;
}

int failed() {
    if (fault.kind == DiskFault::Kind::die) ::_exit(died);
    errno = fault.error;
    return -1;
}

}  // namespace

void arm(const DiskFault& f) {
    fault = f;
    seen = 0;
    calls_made.clear();
    armed = true;
}

int64_t disarm() {
    armed = false;
    return seen;
}

const std::vector<std::string>& trace() { return calls_made; }

}  // namespace torus::test

using namespace torus::test;

extern "C" {

ssize_t write(int fd, const void* data, size_t bytes) {
    const bool to_a_file = fd > 2;
    if (to_a_file) record("write ", fd);
    if (to_a_file && hit(DiskFault::Calls::writes)) {
        if (fault.kind == DiskFault::Kind::lose) {  // acknowledged, never stored
            ::lseek(fd, off_t(bytes), SEEK_CUR);
            return ssize_t(bytes);
        }
        if (fault.half) ::syscall(SYS_write, fd, data, bytes / 2);
        return failed();
    }
    return ::syscall(SYS_write, fd, data, bytes);
}

int fsync(int fd) {
    record("fsync ", fd);
    if (hit(DiskFault::Calls::syncs)) return failed();
    return 0;  // a test cannot cut the power, and a real fsync would only make it slow
}

int rename(const char* from, const char* to) noexcept {
    if (armed) calls_made.push_back(std::string("rename ") + from);
    if (hit(DiskFault::Calls::renames)) return failed();
    return int(::syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to));
}

int mkdir(const char* path, mode_t mode) noexcept {
    if (hit(DiskFault::Calls::all)) return failed();
    return int(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}

int unlinkat(int fd, const char* path, int flags) noexcept {
    if (hit(DiskFault::Calls::all)) return failed();
    return int(::syscall(SYS_unlinkat, fd, path, flags));
}

}  // extern "C"
