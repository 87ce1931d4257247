// SIGTERM, SIGINT and SIGUSR1 ask a run to finish its step, save and exit 75; a second one ends it
// at once. SIGPIPE is ignored: a closed pipe must not end a training run.
#pragma once

namespace torus {

void watch_signals();
int stop_requested();  // the signal's number, or 0

}  // namespace torus
