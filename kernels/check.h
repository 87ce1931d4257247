// Errors: one exception type with an exit code and a one-line message that ends in the next action.
// CHECK states what must hold about our own code (exit 70); fail() and require() report what the
// user or the machine got wrong, with the exit code that scripts can rely on (sysexits numbering).
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace torus {

enum class Exit : int {
    ok = 0,
    usage = 64,          // unknown flag, bad number, impossible combination
    bad_data = 65,       // a file is there but broken: shard, checkpoint, tokenizer, config
    missing_input = 66,  // a file or folder is not there
    internal = 70,       // a CHECK failed, or training met a non-finite value it cannot skip
    out_of_memory = 71,  // the plan does not fit the device or the host
    no_device = 71,      // no GPU that works: the machine lacks what the run needs, as above
    io = 74,             // a write failed: disk full, read error
    preempted = 75,      // stopped on a signal with a good checkpoint; submit again
    peer = 76,           // another rank or a collective failed
    permission = 77,     // an output folder cannot be written
    mismatch = 78,       // configuration differs from the checkpoint's, or between ranks
};

struct Error : std::runtime_error {
    Error(Exit code, const std::string& message) : std::runtime_error(message), code(code) {}
    Exit code;
};

// concat("a", 1, 'b') == "a1b"; the only formatting helper (fmt does not build under nvcc here).
template <class... Args>
std::string concat(const Args&... args) {
    std::ostringstream out;
    (out << ... << args);
    return out.str();
}

template <class... Args>
[[noreturn]] void fail(Exit code, const Args&... args) {
    throw Error(code, concat(args...));
}

// Throws Error(code) with the message unless `ok`.
template <class... Args>
void require(bool ok, Exit code, const Args&... args) {
    if (!ok) fail(code, args...);
}

}  // namespace torus

// Always on, also with NDEBUG. Extra arguments are appended to the message.
#define CHECK(cond, ...)                                                                 \
    do {                                                                                 \
        if (!(cond))                                                                     \
            ::torus::fail(::torus::Exit::internal, __FILE__, ":", __LINE__, ": ", #cond, \
                          " does not hold", ##__VA_ARGS__);                              \
    } while (0)
