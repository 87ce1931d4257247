// Our tensors <-> the parts that files hold: q, k and v are one matrix here and three there,
// GPT-2's linears are (in, out) there, padded vocabulary rows exist only here.
#include <bit>
#include <cstring>

#include "kernels/float16.h"
#include "model/io.h"
#include "model/mapped_file.h"

namespace torus {
namespace {

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

double widen(double x) { return x; }
double widen(float x) { return double(x); }
double widen(Bf16 x) { return double(bf16_to_float(x.bits)); }
double widen(F16 x) { return double(f16_to_float(x.bits)); }

template <class T>
T narrow(double x) {
    if constexpr (std::is_same_v<T, Bf16>) return {float_to_bf16(float(x))};
    if constexpr (std::is_same_v<T, F16>) return {float_to_f16(float(x))};
    if constexpr (std::is_floating_point_v<T>) return T(x);
}

// Calls f with a value of the element type; false when `t` is no float type.
template <class F>
bool with_float_type(DType t, const F& f) {
    switch (t) {
        case DType::f64: f(double{}); return true;
        case DType::f32: f(float{}); return true;
        case DType::bf16: f(Bf16{}); return true;
        case DType::f16: f(F16{}); return true;
        default: return false;
    }
}

// dst (rows, cols) <- src (rows, cols), or src (cols, rows) when transposed; all contiguous. Blocks
// keep both sides of a transposition in cache.
template <class To, class From>
void copy_matrix(To* dst, const From* src, int64_t rows, int64_t cols, bool transposed) {
    const auto convert = [](From x) {
        if constexpr (std::is_same_v<To, From>)
            return x;  // the same bits, NaN payloads too
        else
            return narrow<To>(widen(x));
    };
    if (!transposed) {
#pragma omp parallel for
        for (int64_t i = 0; i < rows * cols; ++i) dst[i] = convert(src[i]);
        return;
    }
    constexpr int64_t block = 32;
#pragma omp parallel for
    for (int64_t r0 = 0; r0 < rows; r0 += block)
        for (int64_t c0 = 0; c0 < cols; c0 += block)
            for (int64_t r = r0; r < std::min(rows, r0 + block); ++r)
                for (int64_t c = c0; c < std::min(cols, c0 + block); ++c)
                    dst[r * cols + c] = convert(src[c * rows + r]);
}

std::string at_layer(const std::string& name, int64_t l) {
    const size_t place = name.find("{l}");
    if (place == std::string::npos) return name;
    return name.substr(0, place) + std::to_string(l) + name.substr(place + 3);
}

Shape part_shape(const ParamSpec& spec, const HfPart& part, bool transposed) {
    if (spec.shape.rank == 1) return {part.rows};
    const int64_t cols = spec.shape[1];
    return transposed ? Shape{cols, part.rows} : Shape{part.rows, cols};
}

// Files saved from the bare model leave out the name of the model within the class with the head:
// "transformer.wte.weight" is "wte.weight" in the published GPT-2.
std::string name_in(const TensorSource& source, const std::string& prefix,
                    const std::string& name) {
    if (source.has(prefix + name)) return prefix + name;
    for (const char* outer : {"transformer.", "model."})
        if (name.starts_with(outer)) {
            std::string bare = prefix + name.substr(std::strlen(outer));
            if (source.has(bare)) return bare;
        }
    fail(Exit::bad_data, source.path(), ": has no tensor \"", prefix, name,
         "\"; the file is of another model than its configuration");
}

}  // namespace

void read_param(const TensorSource& source, const ParamSpec& spec, int64_t l, Tensor dst,
                const std::string& prefix) {
    CHECK(dst.contiguous() && dst.shape == spec.shape, ": ", spec.name, " ", dst.shape.str());
    const int64_t cols = spec.shape.rank == 1 ? 1 : spec.shape[1];
    int64_t row = 0;
    for (const HfPart& part : spec.hf) {
        const std::string name = name_in(source, prefix, at_layer(part.name, l));
        const Tensor src = source.find(name);
        const bool transposed = part.transposed && source.transposed_linears();
        const Shape expected = part_shape(spec, part, transposed);
        require(src.shape == expected, Exit::bad_data, source.path(), ": tensor \"", name, "\" is ",
                src.shape.str(), ", expected ", expected.str());
        const Tensor to = dst.rows(row, part.rows);
        bool known = false;
        CHECK(with_float_type(dst.dtype, [&](auto to_type) {
            using To = decltype(to_type);
            known = with_float_type(src.dtype, [&](auto from_type) {
                using From = decltype(from_type);
                copy_matrix(static_cast<To*>(to.data), static_cast<const From*>(src.data),
                            part.rows, cols, transposed);
            });
        }));
        require(known, Exit::bad_data, source.path(), ": tensor \"", name, "\" is ",
                name_of(src.dtype), ", expected a float type");
        row += part.rows;
    }
    if (row < dst.dim(0)) {  // padded vocabulary rows
        const Tensor rest = dst.rows(row, dst.dim(0) - row);
        std::memset(rest.data, 0, size_t(rest.bytes()));
    }
}

std::vector<HfTensor> hf_tensors(const ParamSpec& spec, int64_t l) {
    std::vector<HfTensor> out;
    for (const HfPart& part : spec.hf)
        out.push_back({at_layer(part.name, l), part_shape(spec, part, part.transposed)});
    return out;
}

void pack_hf_part(const ParamSpec& spec, size_t i, Tensor src, void* dst) {
    CHECK(i < spec.hf.size() && src.contiguous() && src.shape == spec.shape, ": ", spec.name);
    int64_t row = 0;
    for (size_t before = 0; before < i; ++before) row += spec.hf[before].rows;
    const HfPart& part = spec.hf[i];
    const Tensor from = src.rows(row, part.rows);
    const int64_t cols = spec.shape.rank == 1 ? 1 : spec.shape[1];
    CHECK(with_float_type(src.dtype, [&](auto type) {
        using T = decltype(type);
        if (part.transposed)  // the file's (cols, rows) from our (rows, cols)
            copy_matrix(static_cast<T*>(dst), static_cast<const T*>(from.data), cols, part.rows,
                        true);
        else
            std::memcpy(dst, from.data, size_t(from.bytes()));
    }));
}

}  // namespace torus
