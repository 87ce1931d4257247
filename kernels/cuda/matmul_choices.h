// The algorithms that --tune-matmul has chosen, and the file that keeps them: a line that names
// library and GPU, then one line per product: key, algorithm, its milliseconds and those of the
// library's first choice (0: there was no memory to time them).
#pragma once
#include <array>
#include <map>
#include <optional>
#include <string>

#include "kernels/cuda/matmul_search.h"

namespace torus::cuda {

// All that the choice of an algorithm depends on.
using ProductKey = std::array<int64_t, 14>;

ProductKey key_of(const Product& p);

// A product of this key. Its addresses have the alignments of the key and point nowhere.
Product product_of(const ProductKey& key);

// What the file has; none when there is no such file or it is of another library or GPU. Throws
// Error(bad_data) on a broken line.
std::optional<std::map<ProductKey, Choice>> read_choices(const std::string& file,
                                                         const std::string& device);

// Both throw Error(io). The first leaves nothing of what was in the file.
void start_choices(const std::string& file, const std::string& device);
void append_choice(const std::string& file, const ProductKey& key, const Choice& choice);

}  // namespace torus::cuda
