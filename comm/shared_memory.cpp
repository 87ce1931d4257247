#include "comm/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <random>
#include <string>

namespace torus {
namespace {

// A new file of the machine's shared memory, or -1. Its pages are taken now: a write to a page that
// /dev/shm has no room for would kill the process.
int create(const std::string& name, int64_t bytes) {
    const int file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    if (file < 0 || posix_fallocate(file, 0, off_t(bytes)) == 0) return file;
    close(file);
    return -1;
}

}  // namespace

SharedMemory::SharedMemory(Comm& local, int64_t bytes) : bytes_(bytes) {
    Stream none;
    // Groups of one process may be made at the same time by its threads: a process id names too
    // few.
    int64_t number = 0;
    if (local.rank() == 0) {
        std::random_device random;
        number = int64_t(random()) << 31 | int64_t(random() & 0x7fffffff);
    }
    local.broadcast(none, Tensor(&number, DType::i64, {1}), 0);
    const std::string name = concat("/torus-", number);
    int file = local.rank() == 0 ? create(name, bytes) : -1;
    local.barrier(none);
    if (local.rank() != 0) file = shm_open(name.c_str(), O_RDWR, 0600);
    local.barrier(none);
    if (local.rank() == 0) shm_unlink(name.c_str());
    int32_t ok = file >= 0;
    local.all_reduce(none, Tensor(&ok, DType::i32, {1}), Reduce::min);
    shared_ = ok != 0;
    const int flags = shared_ ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void* const data =
        mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, flags, shared_ ? file : -1, 0);
    if (file >= 0) close(file);
    require(data != MAP_FAILED, Exit::out_of_memory, "no memory to share between ranks: ", bytes,
            " bytes");
    data_ = data;
}

SharedMemory::~SharedMemory() { munmap(data_, size_t(bytes_)); }

}  // namespace torus
