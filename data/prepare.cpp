// Text in, shards out: each .txt or .jsonl file is tokenized once into the cache folder, under a
// name that holds a hash of everything the ids depend on, so that a changed file or tokenizer can
// never be served an old shard. A shard appears complete or not at all, so several processes may do
// this at the same time.
#include <filesystem>

#include "data/data.h"
#include "data/documents.h"
#include "data/files.h"
#include "kernels/check.h"

namespace torus {
namespace {

namespace fs = std::filesystem;

constexpr const char* rules = "1";  // raise it when the same text would give other ids

std::string cache_path(const std::string& path, const Tokenizer& tokenizer,
                       const std::string& cache_dir) {
    std::error_code error;
    const fs::path whole = fs::canonical(path, error);
    require(!error, Exit::missing_input, path, ": cannot open: ", error.message(),
            "; check the path");
    const auto size = fs::file_size(whole, error);
    require(!error, Exit::bad_data, path, ": not a regular file; give the path of a file");
    const auto time = fs::last_write_time(whole, error);
    require(!error, Exit::io, path, ": cannot read its time: ", error.message(),
            "; check the disk");
    const std::string key = concat(rules, "\n", whole.string(), "\n", size, "\n",
                                   time.time_since_epoch().count(), "\n", tokenizer.fingerprint());
    return concat(cache_dir, "/", whole.stem().string(), "-", data::hex(data::hash_bytes(key)),
                  ".bin");
}

bool is_good_shard(const std::string& path) {
    if (!data::is_file(path)) return false;
    try {
        TokenShard shard(path);
        return true;
    } catch (const Error&) {
        return false;  // left by a full disk or an older program: made again
    }
}

}  // namespace

std::vector<std::string> prepare_data(const std::string& glob, const Tokenizer& tokenizer,
                                      const std::string& cache_dir) {
    std::vector<std::string> shards;
    for (const std::string& path : expand_glob(glob)) {
        if (fs::path(path).extension() == ".bin") {
            shards.push_back(path);
            continue;
        }
        require(data::is_text_file(path), Exit::usage, path,
                ": unknown kind of file, allowed are .bin, .txt and .jsonl; choose another glob");
        const std::string shard = cache_path(path, tokenizer, cache_dir);
        if (!is_good_shard(shard)) {
            data::make_folders(cache_dir);
            TokenShardWriter writer(shard, tokenizer.vocab_size());
            bool any = false;
            data::tokenize_files({path}, tokenizer, [&](const std::vector<int32_t>& ids) {
                writer.append(ids);
                any = true;
            });
            require(any, Exit::bad_data, path,
                    ": holds no text; leave it out or check that it is the file you meant");
            writer.finish();
        }
        shards.push_back(shard);
    }
    return shards;
}

}  // namespace torus
