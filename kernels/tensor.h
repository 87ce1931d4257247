// Tensor: a non-owning view of typed memory, host or device. Shape and strides are in elements; the
// last dimension is always dense (stride 1), the others may have a pitch: q, k and v are views into
// one packed QKV matrix. A default-constructed Tensor is "absent" and tests false.
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels/check.h"

namespace torus {

enum class DType : uint8_t { f64, f32, bf16, f16, i64, i32, u16, u8 };

constexpr int64_t size_of(DType t) {
    switch (t) {
        case DType::f64:
        case DType::i64: return 8;
        case DType::f32:
        case DType::i32: return 4;
        case DType::bf16:
        case DType::f16:
        case DType::u16: return 2;
        case DType::u8: return 1;
    }
    return 0;
}

constexpr const char* name_of(DType t) {
    switch (t) {
        case DType::f64: return "fp64";
        case DType::f32: return "fp32";
        case DType::bf16: return "bf16";
        case DType::f16: return "fp16";
        case DType::i64: return "int64";
        case DType::i32: return "int32";
        case DType::u16: return "uint16";
        case DType::u8: return "uint8";
    }
    return "?";
}

struct Shape {
    static constexpr int max_rank = 5;
    std::array<int64_t, max_rank> dim{};
    int rank = 0;

    Shape() = default;
    Shape(std::initializer_list<int64_t> dims) {
        CHECK(dims.size() <= max_rank);
        for (int64_t d : dims) {
            CHECK(d >= 0);
            dim[rank++] = d;
        }
    }
    // From the end when negative.
    int64_t operator[](int i) const {
        const int at = i < 0 ? rank + i : i;
        CHECK(at >= 0 && at < rank, ": dimension ", i, " of ", rank);
        return dim[at];
    }
    int64_t numel() const {
        int64_t n = 1;
        for (int i = 0; i < rank; ++i) n *= dim[i];
        return n;
    }
    bool operator==(const Shape& o) const {
        if (rank != o.rank) return false;
        for (int i = 0; i < rank; ++i)
            if (dim[i] != o.dim[i]) return false;
        return true;
    }
    std::string str() const {
        std::string s = "(";
        for (int i = 0; i < rank; ++i) s += (i ? ", " : "") + std::to_string(dim[i]);
        return s + ")";
    }
};

struct Tensor {
    void* data = nullptr;
    DType dtype = DType::f32;
    Shape shape;
    std::array<int64_t, Shape::max_rank> stride{};  // elements

    Tensor() = default;
    Tensor(void* data, DType dtype, const Shape& shape) : data(data), dtype(dtype), shape(shape) {
        int64_t step = 1;
        for (int i = shape.rank - 1; i >= 0; --i) {
            stride[i] = step;
            step *= shape.dim[i];
        }
    }

    explicit operator bool() const { return data != nullptr; }
    int rank() const { return shape.rank; }
    int64_t dim(int i) const { return shape[i]; }
    int64_t numel() const { return shape.numel(); }
    int64_t bytes() const { return numel() * size_of(dtype); }
    int64_t pitch(int i) const { return stride[i < 0 ? shape.rank + i : i]; }

    bool contiguous() const {
        int64_t step = 1;
        for (int i = shape.rank - 1; i >= 0; --i) {
            if (shape.dim[i] != 1 && stride[i] != step) return false;
            step *= shape.dim[i];
        }
        return true;
    }

    template <class T>
    T* as() const {
        CHECK(sizeof(T) == size_t(size_of(dtype)), ": tensor of ", name_of(dtype));
        return static_cast<T*>(data);
    }

    // The same elements under another shape; only for contiguous tensors.
    Tensor view(const Shape& s) const {
        CHECK(contiguous() && s.numel() == numel(), ": ", shape.str(), " -> ", s.str());
        return Tensor(data, dtype, s);
    }
    // Rows [begin, begin + count) of dimension `axis`.
    Tensor slice(int axis, int64_t begin, int64_t count) const {
        CHECK(axis < shape.rank && begin >= 0 && count >= 0 && begin + count <= shape.dim[axis],
              ": slice ", begin, "+", count, " of axis ", axis, " of ", shape.str());
        Tensor t = *this;
        t.data = static_cast<char*>(data) + begin * stride[axis] * size_of(dtype);
        t.shape.dim[axis] = count;
        return t;
    }
    Tensor rows(int64_t begin, int64_t count) const { return slice(0, begin, count); }
};

}  // namespace torus
