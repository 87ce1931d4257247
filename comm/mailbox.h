// Small messages between ranks of one machine, in memory that they share: a stream of bytes for
// each ordered pair of ranks, with one writer and one reader. A message takes well below a
// microsecond, between processes as between threads, and no library has a part in it.
#pragma once
#include "comm/shared_memory.h"

namespace torus {

class Mailbox {
public:
    // Collective over `local`, whose ranks are on one machine. Room: the most bytes of one post.
    Mailbox(Comm& local, int64_t room);

    bool works() const { return memory_.shared(); }  // the same on all ranks; false: do not use it
    int64_t room() const { return room_; }

    // Appends these bytes to what `to` takes from this rank; waits while there is no room for them.
    // It is there soon when `to` takes what was posted before without waiting for this rank.
    void post(int to, const void* data, int64_t bytes);
    // The next bytes of `from`, waiting for them. Both throw Error(peer) when a rank has called
    // stop(). A rank that neither posts nor stops is the watchdog's to notice.
    void take(int from, void* data, int64_t bytes);

    // This rank will not go on: whoever waits in this mailbox, now or later, gets an error.
    void stop() noexcept;

private:
    struct Ring;
    Ring& ring(int from, int to) const;
    template <class Ready>
    void wait(Ready ready) const;

    int rank_, size_;
    int64_t room_;
    SharedMemory memory_;
};

}  // namespace torus
