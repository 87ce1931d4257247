#include "engine/stop_signal.h"

#include <unistd.h>
#include <csignal>
#include <initializer_list>

namespace torus {
namespace {

volatile std::sig_atomic_t received = 0;  // a handler can reach nothing else

void on_signal(int signal) {
    if (received) _exit(128 + signal);
    received = signal;
}

}  // namespace

void watch_signals() {
    struct sigaction action = {};
    action.sa_handler = on_signal;
    for (int s : {SIGTERM, SIGINT, SIGUSR1}) sigaction(s, &action, nullptr);
    std::signal(SIGPIPE, SIG_IGN);
}

int stop_requested() { return received; }

}  // namespace torus
