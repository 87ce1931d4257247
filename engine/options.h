// The table of options: one line per option drives the flag, the key in --config's file, the line
// of --help, the checks and to_toml(), so that an option cannot exist in one place only.
#pragma once
#include <string>
#include <variant>
#include <vector>

#include "engine/config.h"

namespace torus {

enum class OptionGroup : uint8_t { model, optimizer, machine, output };

struct NumberRange {
    double low, high;
    bool above_low = false, below_high = false;  // the end itself is not allowed
};

struct Option {
    using Member =
        std::variant<std::string Config::*, int64_t Config::*, uint64_t Config::*, int Config::*,
                     double Config::*, bool Config::*, Recompute Config::*, Schedule Config::*,
                     ResumeMode Config::*, AttentionKernels Config::*, CudaGraph Config::*,
                     Exchange Config::*>;
    const char* name;  // "lr-schedule": the flag without dashes, and the key
    OptionGroup group;
    const char* value;  // what --help shows after the flag; empty: a switch that takes no value
    const char* help;
    Member member;
    NumberRange range{0, 0};                // numbers
    std::vector<const char*> allowed = {};  // enums and bools: by value; texts: empty = any text

    bool is_switch() const { return *value == 0; }
};

const std::vector<Option>& options();
const Option* find_option(const std::string& name);  // null when unknown

// Sets the option from its text; `where` ("--lr", "run.toml:3: lr") opens the message of
// Error(usage).
void set_option(const Option&, Config&, const std::string& text, const std::string& where);
std::string show_option(const Option&, const Config&);  // text that set_option reads back exactly

// "; did you mean --lr?" or, when nothing is near, "".
std::string did_you_mean(const std::string& name, const char* dashes);

// Reads a TOML file into `config`; names of the options found are appended to `given`.
void read_config_file(const std::string& path, Config& config, std::vector<std::string>& given);

// Relations between values. Error(usage).
void check_relations(const Config&);

std::string help_text();

}  // namespace torus
