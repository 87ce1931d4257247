// llm.c's token files: a header of 256 int32 {magic, version, count, 0...}, then `count` ids as
// uint16 (20240520, version 1) or uint32 (20240801, version 7), little-endian. Read with pread, not
// through a mapping: a mapped file that is cut or lost by a network file system while it is read
// kills the process with SIGBUS, pread reports it; at one call a sequence the cost is the same
// (bench_tokenizer prints the rate), reads may run in parallel and offsets are 64 bits.
#include <glob.h>

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "data/data.h"
#include "data/files.h"
#include "kernels/check.h"

namespace torus {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr int64_t header_bytes = 256 * 4;
constexpr int64_t max_count = 0x7fffffff;  // the header's count is an int32
constexpr int64_t chunk = 1 << 14;         // tokens converted at a time

struct Kind {
    int32_t magic, version;
    int width;
};
constexpr std::array<Kind, 2> kinds{{{20240520, 1, 2}, {20240801, 7, 4}}};

}  // namespace

TokenShard::TokenShard(const std::string& path)
    : path_(path), file_(data::File::open_to_read(path)) {
    const int64_t bytes = file_.size(path);
    require(bytes >= header_bytes, Exit::bad_data, path, ": ", bytes,
            " bytes, a token shard has a header of ", header_bytes,
            "; make it again with prepare_data tokenize");
    std::array<int32_t, 3> header{};
    file_.read_at(path, 0, header.data(), sizeof header);
    const auto kind = std::find_if(kinds.begin(), kinds.end(),
                                   [&](const Kind& k) { return k.magic == header[0]; });
    require(kind != kinds.end(), Exit::bad_data, path, ": magic number ", header[0],
            ", a token shard starts with ", kinds[0].magic, " (uint16) or ", kinds[1].magic,
            " (uint32); check that it is a token file");
    require(header[1] == kind->version, Exit::bad_data, path, ": version ", header[1], ", only ",
            kind->version, " is known for this kind; make the shard again");
    require(header[2] > 0, Exit::bad_data, path, ": its header counts ", header[2],
            " tokens, at least 1 is needed; make the shard again");
    width_ = kind->width;
    count_ = header[2];
    const int64_t expected = header_bytes + count_ * width_;
    require(bytes == expected, Exit::bad_data, path, ": ", bytes, " bytes, but ", count_,
            " tokens of ", width_, " bytes make ", expected, (bytes < expected ? " (cut)" : ""),
            "; copy or make the shard again");
}

TokenShard::~TokenShard() = default;
TokenShard::TokenShard(TokenShard&&) noexcept = default;
TokenShard& TokenShard::operator=(TokenShard&&) noexcept = default;

void TokenShard::read(int64_t first, int64_t n, int32_t* out) const {
    CHECK(first >= 0 && n >= 0 && n <= count_ && first <= count_ - n, " (", path_, ")");
    const int64_t offset = header_bytes + first * width_;
    if (width_ == 4) return file_.read_at(path_, offset, out, n * 4);
    std::array<uint16_t, chunk> ids;
    for (int64_t i = 0; i < n; i += chunk) {
        const int64_t m = std::min(chunk, n - i);
        file_.read_at(path_, offset + i * 2, ids.data(), m * 2);
        for (int64_t j = 0; j < m; ++j) out[i + j] = ids[size_t(j)];
    }
}

int64_t TokenShard::max_token() const {
    std::vector<int32_t> ids(size_t(std::min(chunk, count_)));
    uint32_t highest = 0;
    for (int64_t i = 0; i < count_; i += chunk) {
        const int64_t m = std::min(chunk, count_ - i);
        read(i, m, ids.data());
        for (int64_t j = 0; j < m; ++j) highest = std::max(highest, uint32_t(ids[size_t(j)]));
    }
    return highest;
}

struct TokenShardWriter::Impl {
    Impl(std::string where, int64_t vocab_size)
        : path(std::move(where)), vocab(vocab_size), kind(kinds[vocab > 65536]), file(path) {
        const std::array<int32_t, 256> empty{};
        file.write(empty.data(), header_bytes);
    }

    template <class T>
    void write(const std::vector<int32_t>& ids) {
        std::array<T, chunk> out;
        for (size_t i = 0; i < ids.size(); i += chunk) {
            const size_t m = std::min(size_t(chunk), ids.size() - i);
            for (size_t j = 0; j < m; ++j) out[j] = T(ids[i + j]);
            file.write(out.data(), int64_t(m * sizeof(T)));
        }
    }

    std::string path;
    int64_t vocab, count = 0;
    Kind kind;
    data::NewFile file;
};

TokenShardWriter::TokenShardWriter(std::string path, int64_t vocab_size) {
    CHECK(vocab_size > 0 && vocab_size <= max_count);
    impl_ = std::make_unique<Impl>(std::move(path), vocab_size);
}

TokenShardWriter::~TokenShardWriter() = default;

void TokenShardWriter::append(const std::vector<int32_t>& ids) {
    CHECK(impl_ != nullptr, " (append after finish)");
    for (const int32_t id : ids) CHECK(id >= 0 && id < impl_->vocab, " (token ", id, ")");
    impl_->count += int64_t(ids.size());
    require(impl_->count <= max_count, Exit::usage, impl_->path, ": ", impl_->count,
            " tokens, a shard holds at most ", max_count, "; write several smaller shards");
    if (impl_->kind.width == 2) {
        impl_->write<uint16_t>(ids);
    } else {
        impl_->write<uint32_t>(ids);
    }
}

void TokenShardWriter::finish() {
    CHECK(impl_ != nullptr, " (finish twice)");
    require(impl_->count > 0, Exit::bad_data, impl_->path,
            ": no tokens to write; check that the input is not empty");
    const std::array<int32_t, 3> header{impl_->kind.magic, impl_->kind.version,
                                        int32_t(impl_->count)};
    impl_->file.write_at(0, header.data(), sizeof header);
    impl_->file.publish();
    impl_.reset();
}

std::vector<std::string> expand_glob(const std::string& pattern) {
    require(!pattern.empty(), Exit::usage, "an empty file pattern; give a path or a glob");
    glob_t found{};
    const int status = ::glob(pattern.c_str(), GLOB_TILDE | GLOB_BRACE, nullptr, &found);
    std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    ::globfree(&found);
    require(status == 0 || status == GLOB_NOMATCH, Exit::io, pattern,
            ": cannot list the files; check the folder and its permissions");
    std::sort(paths.begin(), paths.end());  // bytewise, whatever the locale says
    paths.erase(std::unique(paths.begin(), paths.end()), paths.end());
    require(!paths.empty(), Exit::missing_input, pattern,
            ": no file matches; check the path (put a glob in quotes)");
    for (const std::string& path : paths) {
        require(!data::is_folder(path), Exit::missing_input, path,
                ": is a folder; give a glob of its files, for example '", path, "/*.bin'");
    }
    return paths;
}

}  // namespace torus
