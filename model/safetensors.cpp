// Reader of safetensors: 8 bytes of header length N, N bytes of JSON, then the data of all tensors
// without gaps. The file is untrusted, so each statement of the header is checked against the
// others and against the file's size before any of it is used; the data is then a view into the
// mapping.
#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <optional>

#include "kernels/text.h"
#include "model/io.h"
#include "model/mapped_file.h"
#include "model/strict_json.h"

namespace torus {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little, "file formats here are little-endian");

constexpr int64_t max_header = 100'000'000;
constexpr size_t max_name = 512;

struct FileType {
    const char* name;
    int64_t bytes;
    std::optional<DType> type;  // absent: known to the format, of no use here
};
constexpr FileType file_types[] = {
    {"F64", 8, DType::f64}, {"F32", 4, DType::f32},
    {"F16", 2, DType::f16}, {"BF16", 2, DType::bf16},
    {"I64", 8, DType::i64}, {"I32", 4, DType::i32},
    {"U16", 2, DType::u16}, {"U8", 1, DType::u8},
    {"BOOL", 1, {}},        {"I8", 1, {}},
    {"I16", 2, {}},         {"U32", 4, {}},
    {"U64", 8, {}},         {"F8_E4M3", 1, {}},
    {"F8_E5M2", 1, {}},
};

struct Entry {
    const FileType* type;
    Shape shape;
    int64_t begin, end;  // within the data
};

class SafetensorsFile final : public TensorSource {
public:
    explicit SafetensorsFile(const std::string& path) : file_(path) {
        require(file_.size() >= 8, Exit::bad_data, path, ": ", file_.size(),
                " bytes, a safetensors file has at least 8; it was cut or is another format");
        uint64_t header = 0;
        std::memcpy(&header, file_.data(), 8);
        require(header >= 2 && header <= uint64_t(max_header), Exit::bad_data, path,
                ": header length at byte 0 is ", header, ", allowed is 2 to ", max_header);
        require(int64_t(header) <= file_.size() - 8, Exit::bad_data, path, ": header of ", header,
                " bytes in a file of ", file_.size(), "; it was cut");
        data_ = file_.data() + 8 + header;
        data_bytes_ = file_.size() - 8 - int64_t(header);
        require(file_.data()[8] == '{', Exit::bad_data, path, ": header does not begin with '{'");
        // a header has three levels: the object, a tensor, its shape or offsets
        read_header(
            parse_strict({file_.data() + 8, size_t(header)}, path,
                         {.depth = 3, .items = 1'000'000, .list = 16, .key_bytes = max_name}));
        check_coverage();
    }

    std::vector<std::string> names() const override {
        std::vector<std::string> out;
        for (const auto& [name, entry] : entries_) out.push_back(name);
        return out;
    }
    bool has(const std::string& name) const override { return entries_.contains(name); }
    std::string path() const override { return file_.path(); }

    Tensor find(const std::string& name) const override {
        const auto it = entries_.find(name);
        require(it != entries_.end(), Exit::bad_data, path(), ": has no tensor ", excerpt(name));
        const Entry& e = it->second;
        require(e.type->type.has_value(), Exit::bad_data, path(), ": tensor ", excerpt(name),
                " is of type ", e.type->name, ", which this program does not use");
        const char* bytes = data_ + e.begin;
        if (reinterpret_cast<uintptr_t>(bytes) % uintptr_t(e.type->bytes) != 0) {
            std::vector<char>& copy = aligned_[name];  // the format does not promise alignment
            if (copy.empty()) copy.assign(bytes, data_ + e.end);
            bytes = copy.data();
        }
        return Tensor(const_cast<char*>(bytes), *e.type->type, e.shape);
    }

private:
    void read_header(const json& header) {
        for (const auto& [name, value] : header.items()) {
            if (name == "__metadata__") {
                check_metadata(value);
                continue;
            }
            entries_.emplace(name, read_entry(name, value));
        }
    }

    void check_metadata(const json& value) const {
        require(value.is_object(), Exit::bad_data, path(), ": __metadata__ is not an object");
        for (const auto& [key, text] : value.items())
            require(text.is_string(), Exit::bad_data, path(), ": __metadata__ ", excerpt(key),
                    " is not a string");
    }

    Entry read_entry(const std::string& name, const json& value) const {
        const auto bad = [&](const auto&... what) {
            fail(Exit::bad_data, path(), ": tensor ", excerpt(name), ": ", what...);
        };
        if (!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
            !value.contains("shape") || !value.contains("data_offsets"))
            bad("needs exactly dtype, shape and data_offsets");
        const json &dtype = value["dtype"], &shape = value["shape"];
        const json& offsets = value["data_offsets"];
        if (!dtype.is_string()) bad("dtype is not a string");
        const auto type = std::find_if(std::begin(file_types), std::end(file_types),
                                       [&](const FileType& t) { return dtype == t.name; });
        if (type == std::end(file_types))
            bad("unknown dtype ", excerpt(dtype.get_ref<const std::string&>()));
        if (!shape.is_array() || shape.size() > size_t(Shape::max_rank))
            bad("shape is not a list of at most ", Shape::max_rank, " sizes");
        if (!offsets.is_array() || offsets.size() != 2) bad("data_offsets is not a pair");

        Entry e{&*type, {}, read_size(offsets[0]), read_size(offsets[1])};
        if (e.begin < 0 || e.end < e.begin || e.end > data_bytes_)
            bad("data_offsets ", offsets.dump(), " are not a range within the ", data_bytes_,
                " bytes of data");
        int64_t bytes = type->bytes;
        for (const json& dim : shape) {
            const int64_t d = read_size(dim);
            if (d < 0 || __builtin_mul_overflow(bytes, d, &bytes))
                bad("shape ", clipped(shape.dump()), " is not one of a tensor in memory");
            e.shape.dim[size_t(e.shape.rank++)] = d;
        }
        if (bytes != e.end - e.begin)
            bad("shape ", e.shape.str(), " of ", type->name, " takes ", bytes,
                " bytes, data_offsets span ", e.end - e.begin);
        return e;
    }

    // -1 when it is not a non-negative integer of 63 bits.
    static int64_t read_size(const json& value) {
        if (!value.is_number_unsigned()) return -1;
        const uint64_t n = value.get<uint64_t>();
        return n > uint64_t(INT64_MAX) ? -1 : int64_t(n);
    }

    // Tensors must tile the data: a gap can hide bytes, an overlap can make a small file expand.
    void check_coverage() const {
        std::vector<std::pair<const std::string*, const Entry*>> order;
        for (const auto& [name, entry] : entries_) order.emplace_back(&name, &entry);
        std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
            return std::pair(a.second->begin, a.second->end) <
                   std::pair(b.second->begin, b.second->end);
        });
        int64_t at = 0;
        for (const auto& [name, entry] : order) {
            require(entry->begin == at, Exit::bad_data, path(), ": tensor ", excerpt(*name),
                    " begins at byte ", entry->begin, " of the data, expected ", at,
                    entry->begin < at ? " (overlap)" : " (gap)");
            at = entry->end;
        }
        require(at == data_bytes_, Exit::bad_data, path(), ": ", data_bytes_,
                " bytes of data, the header describes ", at, "; the file is not what it says");
    }

    MappedFile file_;
    const char* data_ = nullptr;
    int64_t data_bytes_ = 0;
    std::map<std::string, Entry> entries_;
    mutable std::map<std::string, std::vector<char>> aligned_;
};

// model.safetensors.index.json: {"weight_map": {tensor: shard file}}.
class ShardedFile final : public TensorSource {
public:
    explicit ShardedFile(const std::string& path) : path_(path) {
        const json index = read_json_file(path);
        require(
            index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(),
            Exit::bad_data, path, ": has no object \"weight_map\"");
        const std::filesystem::path folder = std::filesystem::path(path).parent_path();
        for (const auto& [name, shard] : index["weight_map"].items()) {
            require(shard.is_string(), Exit::bad_data, path, ": weight_map ", excerpt(name),
                    " is not a file name");
            const std::string& file = shard.get_ref<const std::string&>();
            require(is_basename(file), Exit::bad_data, path, ": shard ", excerpt(file),
                    " is not a plain file name; shards lie next to the index");
            auto& source = shards_[file];
            if (!source) source = std::make_unique<SafetensorsFile>((folder / file).string());
            require(source->has(name), Exit::bad_data, path, ": tensor ", excerpt(name),
                    " is not in ", clipped(file));
            where_[name] = source.get();
        }
        for (const auto& [file, source] : shards_)
            for (const std::string& name : source->names())
                require(where_.contains(name) && where_[name] == source.get(), Exit::bad_data, path,
                        ": tensor ", excerpt(name), " of ", clipped(file), " is not in the index");
    }
    std::vector<std::string> names() const override {
        std::vector<std::string> out;
        for (const auto& [name, source] : where_) out.push_back(name);
        return out;
    }
    bool has(const std::string& name) const override { return where_.contains(name); }
    std::string path() const override { return path_; }
    Tensor find(const std::string& name) const override {
        const auto it = where_.find(name);
        require(it != where_.end(), Exit::bad_data, path_, ": has no tensor ", excerpt(name));
        return it->second->find(name);
    }

private:
    static bool is_basename(const std::string& file) {
        return !file.empty() && file != "." && file != ".." &&
               file.find_first_of(std::string("/\\\0", 3)) == std::string::npos;
    }

    std::string path_;
    std::map<std::string, std::unique_ptr<SafetensorsFile>> shards_;
    std::map<std::string, SafetensorsFile*> where_;
};

}  // namespace

std::unique_ptr<TensorSource> open_safetensors(const std::string& path) {
    if (path.ends_with(".json")) return std::make_unique<ShardedFile>(path);
    return std::make_unique<SafetensorsFile>(path);
}

}  // namespace torus
