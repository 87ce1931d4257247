// Packed documents: which keys each query may see. A sequence is S consecutive tokens of the data,
// so it may start inside one document and hold several more; the mask rule of the attention
// (first_key[i] <= j <= i) needs only where the document of each token starts.
#include "data/data.h"
#include "kernels/check.h"

namespace torus {

void mask_documents(const int32_t* tokens, int64_t S, int32_t end_of_text, int32_t* first_key) {
    CHECK(S <= 0x7fffffff, " (first_key is an int32)");
    int32_t start = 0;
    for (int64_t i = 0; i < S; ++i) {
        if (tokens[i] == end_of_text) start = int32_t(i);
        first_key[i] = start;
    }
}

}  // namespace torus
