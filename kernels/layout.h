// Layout: a table of named tensors with lifetimes -> offsets and exact bytes, computed before
// anything is allocated. Arena: one Buffer cut by a Layout. Names are "owner/tensor"; the plan's
// table sums by owner. Two tensors share memory exactly when their lifetimes do not meet.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/device.h"
#include "kernels/tensor.h"

namespace torus {

// Phases [first, last] of a step in which a tensor holds data; the default is "always". The phase
// numbers mean whatever the layout's user says they mean.
struct Life {
    int first = 0;
    int last = 1 << 30;
    bool meets(const Life& o) const { return first <= o.last && o.first <= last; }
};

class Layout {
public:
    static constexpr int64_t alignment = 256;

    struct Slot {
        std::string name;
        DType dtype;
        Shape shape;
        Life life;
        int64_t bytes;  // rounded up to the alignment
        int64_t offset = -1;
    };

    // Throws when the name is taken. Tensors of zero elements are allowed and take no bytes.
    void add(const std::string& name, DType dtype, const Shape& shape, Life life = {});
    // Adds every slot of `other` with `prefix` in front of its name.
    void add_all(const std::string& prefix, const Layout& other);

    bool has(std::string_view name) const { return index_.find(name) != index_.end(); }
    const Slot& at(std::string_view name) const;  // throws when unknown
    const std::vector<Slot>& slots() const { return slots_; }

    int64_t bytes() const;  // of the arena: the highest end of any slot
    std::map<std::string, int64_t> bytes_by_owner() const;  // sums of slots, before sharing
    Tensor tensor(std::string_view name, void* base) const;

private:
    void assign() const;  // offsets: slots that always live first, in order; then first fit by size
    mutable std::vector<Slot> slots_;
    std::map<std::string, int, std::less<>> index_;
    mutable int64_t total_ = 0;
    mutable bool assigned_ = false;
};

class Arena {
public:
    Arena() = default;
    Arena(Device& device, Memory memory, Layout layout);
    Tensor operator[](std::string_view name) const;  // throws when unknown
    bool has(std::string_view name) const { return layout_.has(name); }
    const Layout& layout() const { return layout_; }
    void* data() const { return buffer_.data(); }
    int64_t bytes() const { return buffer_.bytes(); }

private:
    Layout layout_;
    Buffer buffer_;
};

// A small set of named tensors: the weights of one layer, its activations. Unknown names throw;
// `find` gives an absent Tensor instead.
class TensorMap {
public:
    void set(std::string_view name, const Tensor& t);
    Tensor operator[](std::string_view name) const;
    Tensor find(std::string_view name) const;
    const std::vector<std::pair<std::string, Tensor>>& all() const { return items_; }

private:
    std::vector<std::pair<std::string, Tensor>> items_;  // in order of insertion; short, so linear
};

}  // namespace torus
