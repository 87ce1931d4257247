// The run's voice. The console line is for people: it drops its least important fields on a narrow
// terminal. The file is for programs: one JSON object a line, "step" first, numbers with 17 digits,
// so that the log of a resumed run can be compared bit for bit with an undisturbed one.
#include "engine/log.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstring>
#include <filesystem>
#include <vector>

#include "kernels/check.h"
#include "kernels/text.h"

namespace torus {
namespace {

__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...) {
    char text[256];
    va_list args;
    va_start(args, pattern);
    std::vsnprintf(text, sizeof text, pattern, args);
    va_end(args);
    return text;
}

std::string json_number(double x) { return std::isfinite(x) ? format("%.17g", x) : "null"; }

std::string rate(double per_s) {
    if (per_s >= 1e6) return format("%.2fM tok/s", per_s / 1e6);
    if (per_s >= 1e3) return format("%.1fk tok/s", per_s / 1e3);
    return format("%.0f tok/s", per_s);
}

std::string milliseconds(double ms) {
    return ms < 10      ? format("%.1f ms", ms)
           : ms < 10000 ? format("%.0f ms", ms)
                        : human_duration(ms / 1000);
}

// Columns of the terminal on stdout; 0 when it is a file or a pipe.
size_t terminal_columns() {
    winsize size{};
    if (!::isatty(STDOUT_FILENO) || ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return 0;
    return size.ws_col;
}

struct Field {
    std::string text;
    int importance;  // higher stays longer
};

std::string join(std::vector<Field> fields, size_t columns) {
    for (;;) {
        std::string line;
        for (const Field& f : fields) line += (line.empty() ? "" : " | ") + f.text;
        if (columns == 0 || line.size() <= columns || fields.size() <= 2) return line;
        fields.erase(std::min_element(
            fields.begin(), fields.end(),
            [](const auto& a, const auto& b) { return a.importance < b.importance; }));
    }
}

std::string console_line(const StepRecord& r) {
    const int width = int(std::to_string(r.steps).size());
    std::vector<Field> fields = {
        {format("step %*lld/%lld", width, static_cast<long long>(r.step),
                static_cast<long long>(r.steps)),
         9},
        {format("loss %.4f", r.loss), 8},
        {format("norm %.2f", r.grad_norm), 4},
        {format("lr %.2e", r.lr), 3},
        {rate(r.tokens_per_s), 6},
    };
    if (r.mfu >= 0) fields.push_back({format("mfu %.1f%%", 100 * r.mfu), 5});
    fields.push_back({milliseconds(r.step_ms), 2});
    if (r.imbalance >= 0) fields.push_back({format("imbalance %.2f", r.imbalance), 1});
    if (r.peak_gib > 0) fields.push_back({format("%.2f GiB", r.peak_gib), 1});
    if (r.eta_s >= 0) fields.push_back({"eta " + human_duration(r.eta_s), 7});
    if (r.loss_scale != 1) fields.push_back({format("scale %.0f", r.loss_scale), 0});
    if (r.update_skipped)
        fields.push_back(
            {format("update skipped: not finite (%lld so far)", static_cast<long long>(r.skipped)),
             10});
    return join(std::move(fields), terminal_columns());
}

std::string json_line(const StepRecord& r) {
    return concat(
        "{\"step\":", r.step, ",\"steps\":", r.steps, ",\"loss\":", json_number(r.loss),
        ",\"grad_norm\":", json_number(r.grad_norm), ",\"lr\":", json_number(r.lr),
        ",\"tokens\":", r.tokens, ",\"loss_scale\":", json_number(r.loss_scale),
        ",\"skipped\":", r.skipped, ",\"update_skipped\":", r.update_skipped ? "true" : "false",
        ",\"tokens_per_s\":", json_number(r.tokens_per_s),
        ",\"mfu\":", r.mfu < 0 ? "null" : json_number(r.mfu),
        ",\"imbalance\":", r.imbalance < 0 ? "null" : json_number(r.imbalance),
        ",\"step_ms\":", json_number(r.step_ms), ",\"peak_gib\":", json_number(r.peak_gib),
        ",\"eta_s\":", r.eta_s < 0 ? "null" : json_number(r.eta_s), "}");
}

// The step of a record, or -1 when the line is not one of ours or is torn.
int64_t step_of(const std::string& line) {
    long long step = -1;
    if (line.empty() || line.back() != '}') return -1;
    return std::sscanf(line.c_str(), "{\"step\":%lld,", &step) == 1 ? int64_t(step) : -1;
}

// Bytes of the records up to step `steps_done`; what follows them is of an interrupted run.
int64_t bytes_to_keep(std::FILE* file, int64_t steps_done) {
    int64_t kept = 0;
    std::string line;
    for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) {
        if (c != '\n') {
            line.push_back(char(c));
            continue;
        }
        const int64_t step = step_of(line);
        if (step < 0 || step > steps_done) break;
        kept += int64_t(line.size()) + 1;
        line.clear();
    }
    return kept;
}

// A log of an earlier training in the same folder stays, as log.1.jsonl, log.2.jsonl, ...
void set_aside(const std::filesystem::path& path) {
    if (!std::filesystem::exists(path) || std::filesystem::file_size(path) == 0) return;
    for (int n = 1;; ++n) {
        const auto old = path.parent_path() / concat("log.", n, ".jsonl");
        if (std::filesystem::exists(old)) continue;
        std::filesystem::rename(path, old);
        return;
    }
}

std::FILE* open_log(const std::string& folder, int64_t steps_done) {
    std::filesystem::create_directories(folder);
    const std::filesystem::path path = std::filesystem::path(folder) / "log.jsonl";
    if (steps_done == 0) set_aside(path);
    std::FILE* file = std::fopen(path.c_str(), "a+");
    if (!file) throw std::runtime_error(std::strerror(errno));
    std::rewind(file);
    const int64_t kept = bytes_to_keep(file, steps_done);
    if (::ftruncate(::fileno(file), off_t(kept)) != 0 || std::fseek(file, 0, SEEK_END) != 0) {
        const int error = errno;
        std::fclose(file);
        throw std::runtime_error(std::strerror(error));
    }
    return file;
}

}  // namespace

Log::Log(const std::string& log_dir, int64_t steps_done) {
    std::signal(SIGPIPE, SIG_IGN);  // a closed pipe is a failed write, not the end of training
    if (log_dir.empty()) return;
    try {
        file_ = open_log(log_dir, steps_done);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "warning: --log-dir: cannot write %s/log.jsonl: %s; no log is kept\n",
                     printable(log_dir).c_str(), e.what());
    }
}

Log::~Log() {
    if (file_) std::fclose(file_);  // every record was flushed when it was written
}

void Log::write(const std::string& line) {
    if (!file_) return;
    if (std::fputs((line + "\n").c_str(), file_) >= 0 && std::fflush(file_) == 0) return;
    std::fprintf(stderr, "warning: the log file fails: %s; no more records are kept\n",
                 std::strerror(errno));
    std::fclose(file_);
    file_ = nullptr;
}

void Log::message(const std::string& text) {
    if (silent_) return;
    if (std::fputs((text + "\n").c_str(), stdout) >= 0 && std::fflush(stdout) == 0) return;
    std::fprintf(stderr, "warning: the console fails: %s; training goes on silently\n",
                 std::strerror(errno));
    silent_ = true;
}

void Log::step(const StepRecord& r) {
    message(console_line(r));
    write(json_line(r));
}

void Log::eval(int64_t step, double val_loss, int64_t tokens) {
    message(format("step %lld | val loss %.4f | perplexity %.2f", static_cast<long long>(step),
                   val_loss, std::exp(val_loss)));
    write(concat("{\"step\":", step, ",\"val_loss\":", json_number(val_loss),
                 ",\"tokens\":", tokens, "}"));
}

void Log::sample(int64_t step, const std::string& text) {
    message(concat("step ", step, " | sample:\n", printable(text)));
}

std::string human_bytes(int64_t bytes) {
    const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (bytes > -1024 && bytes < 1024) return concat(bytes, " B");
    double value = double(bytes);
    size_t unit = 0;
    // 1023.995 would be shown as 1024.00.
    for (; std::fabs(value) >= 1023.995 && unit < 6; ++unit) value /= 1024;
    return format("%.2f %s", value, units[unit]);
}

std::string human_duration(double seconds) {
    if (!(seconds >= 0) || seconds > 1e15) return "?";
    const long long s = std::llround(seconds);
    if (s < 60) return format("%llds", s);
    if (s < 3600) return format("%lldm%02llds", s / 60, s % 60);
    if (s < 86400) return format("%lldh%02lldm", s / 3600, s / 60 % 60);
    return format("%lldd%02lldh", s / 86400, s / 3600 % 24);
}

}  // namespace torus
