// The program: parse, run, and turn whatever went wrong into one line and an exit code.
#include <cstdio>
#include <exception>
#include <new>

#include "engine/config.h"
#include "engine/trainer.h"

int main(int argc, char** argv) {
    using torus::Exit;
    try {
        torus::Config config;
        if (!torus::parse_config(argc, argv, config)) return int(Exit::ok);
        return int(torus::run(config));
    } catch (const torus::Error& e) {
        std::fprintf(stderr, "error: %s\n", e.what());
        return int(e.code);
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr,
                     "error: host memory: an allocation failed; use a smaller model or batch\n");
        return int(Exit::out_of_memory);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "error: %s\n", e.what());
        return int(Exit::internal);
    }
}
