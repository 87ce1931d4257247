// Writer of safetensors: the header is known once every tensor was announced, then data streams
// through. A full disk may show only at fsync or close, so both are checked.
#include <cerrno>
#include <cstring>

#include "model/checked_file.h"
#include "model/io.h"
#include "model/strict_json.h"

namespace torus {
namespace {

const char* file_type(DType t) {
    switch (t) {
        case DType::f64: return "F64";
        case DType::f32: return "F32";
        case DType::bf16: return "BF16";
        case DType::f16: return "F16";
        case DType::i64: return "I64";
        case DType::i32: return "I32";
        case DType::u16: return "U16";
        case DType::u8: return "U8";
    }
    fail(Exit::internal, "unknown dtype");
}

}  // namespace

struct SafetensorsWriter::Impl {
    CheckedFile file;
    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    int64_t announced = 0, written = 0;
    bool header_done = false;

    void write_header() {
        if (header_done) return;
        header_done = true;
        std::string text = header.dump();
        text.resize((text.size() + 7) / 8 * 8, ' ');  // the data begins at a multiple of 8
        const uint64_t bytes = text.size();
        file.write(&bytes, 8);
        file.write(text.data(), int64_t(bytes));
    }
};

SafetensorsWriter::SafetensorsWriter(std::string path, std::map<std::string, std::string> metadata)
    : impl_(std::make_unique<Impl>(Impl{CheckedFile(std::move(path))})) {
    if (!metadata.empty()) impl_->header["__metadata__"] = metadata;
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::add(const std::string& name, DType dtype, const Shape& shape) {
    CHECK(!impl_->header_done && !impl_->header.contains(name), ": tensor ", name);
    const int64_t begin = impl_->announced;
    impl_->announced += shape.numel() * size_of(dtype);
    const std::vector<int64_t> dims(shape.dim.begin(), shape.dim.begin() + shape.rank);
    impl_->header[name] = {
        {"dtype", file_type(dtype)}, {"shape", dims}, {"data_offsets", {begin, impl_->announced}}};
}

void SafetensorsWriter::write(const void* data, int64_t bytes) {
    impl_->write_header();
    impl_->written += bytes;
    CHECK(impl_->written <= impl_->announced, ": more data than was announced");
    impl_->file.write(data, bytes);
}

void SafetensorsWriter::finish() {
    impl_->write_header();
    CHECK(impl_->written == impl_->announced, ": ", impl_->written, " bytes written, ",
          impl_->announced, " announced");
    impl_->file.finish();
}

}  // namespace torus
