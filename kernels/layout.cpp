// Offsets by first fit: with lifetimes as intervals this is the usual "storage assignment" problem;
// placing the largest first is within a few per cent of the best here and easy to check by eye.
#include "kernels/layout.h"

#include <algorithm>

namespace torus {

void Layout::add(const std::string& name, DType dtype, const Shape& shape, Life life) {
    CHECK(!has(name), ": layout already has ", name);
    const int64_t raw = shape.numel() * size_of(dtype);
    const int64_t bytes = (raw + alignment - 1) / alignment * alignment;
    index_[name] = int(slots_.size());
    slots_.push_back({name, dtype, shape, life, bytes});
    assigned_ = false;
}

void Layout::add_all(const std::string& prefix, const Layout& other) {
    for (const Slot& s : other.slots()) add(prefix + s.name, s.dtype, s.shape, s.life);
}

const Layout::Slot& Layout::at(std::string_view name) const {
    const auto it = index_.find(name);
    CHECK(it != index_.end(), ": layout has no tensor ", name);
    assign();
    return slots_[it->second];
}

void Layout::assign() const {
    if (assigned_) return;
    total_ = 0;
    std::vector<Slot*> temporary, placed;
    const Life always;
    for (Slot& s : slots_) {
        if (s.life.first == always.first && s.life.last == always.last) {
            s.offset = total_;
            total_ += s.bytes;
        } else {
            temporary.push_back(&s);
        }
    }
    const int64_t base = total_;
    std::stable_sort(temporary.begin(), temporary.end(),
                     [](const Slot* a, const Slot* b) { return a->bytes > b->bytes; });
    for (Slot* s : temporary) {
        // Walk the neighbours that live at the same time in order of offset; take the first gap.
        int64_t offset = base;
        for (const Slot* p : placed) {
            if (!p->life.meets(s->life)) continue;
            if (offset + s->bytes <= p->offset) break;
            offset = std::max(offset, p->offset + p->bytes);
        }
        s->offset = offset;
        total_ = std::max(total_, offset + s->bytes);
        placed.insert(
            std::upper_bound(placed.begin(), placed.end(), s,
                             [](const Slot* a, const Slot* b) { return a->offset < b->offset; }),
            s);
    }
    assigned_ = true;
}

int64_t Layout::bytes() const {
    assign();
    return total_;
}

std::map<std::string, int64_t> Layout::bytes_by_owner() const {
    std::map<std::string, int64_t> sums;
    for (const Slot& s : slots_) sums[s.name.substr(0, s.name.find('/'))] += s.bytes;
    return sums;
}

Tensor Layout::tensor(std::string_view name, void* base) const {
    const Slot& s = at(name);
    return Tensor(static_cast<char*>(base) + s.offset, s.dtype, s.shape);
}

Arena::Arena(Device& device, Memory memory, Layout layout)
    : layout_(std::move(layout)), buffer_(device, memory, layout_.bytes()) {}

Tensor Arena::operator[](std::string_view name) const {
    return layout_.tensor(name, buffer_.data());
}

void TensorMap::set(std::string_view name, const Tensor& t) {
    for (const auto& [n, _] : items_) CHECK(n != name, ": tensor map already has ", name);
    items_.emplace_back(name, t);
}

Tensor TensorMap::find(std::string_view name) const {
    for (const auto& [n, t] : items_)
        if (n == name) return t;
    return {};
}

Tensor TensorMap::operator[](std::string_view name) const {
    const Tensor t = find(name);
    CHECK(t, ": no tensor named ", name);
    return t;
}

}  // namespace torus
