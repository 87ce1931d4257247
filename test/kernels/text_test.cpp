// Untrusted text on a terminal and in messages.
#include "kernels/text.h"

#include <random>

#include "test/test.h"

using namespace torus;

TEST_CASE("printable: nothing drives a terminal") {
    EXPECT_EQ(printable("a\tb\nc \u00e9\U0001f600"), "a\tb\nc \u00e9\U0001f600");
    EXPECT_EQ(printable("\x1b[31m"), "\\x1b[31m");
    EXPECT_EQ(printable(std::string_view("\0\r\x7f", 3)), "\\x00\\x0d\\x7f");
    EXPECT_EQ(printable("\u009b31m"), "\\xc2\\x9b31m");  // the one-character form of ESC [
    EXPECT_EQ(printable("\xff\xc3("), "\\xff\\xc3(");    // not UTF-8
    EXPECT_EQ(printable("\u202eabc\u2066"), "\\xe2\\x80\\xaeabc\\xe2\\x81\\xa6");  // reordering
    std::mt19937 random(9);
    for (int i = 0; i < 200; ++i) {
        std::string bytes(200, '\0');
        for (char& c : bytes) c = char(random() & 255);
        const std::string out = printable(bytes);
        EXPECT_EQ(printable(out), out);
    }
}

TEST_CASE("excerpt: one line of at most 80 bytes, in quotes") {
    EXPECT_EQ(excerpt("abc"), "\"abc\"");
    EXPECT_EQ(excerpt("a\nb\x1b"), "\"a b\\x1b\"");
    EXPECT_EQ(excerpt(std::string(80, 'x')), "\"" + std::string(80, 'x') + "\"");
    EXPECT_EQ(excerpt(std::string(81, 'x')), "\"" + std::string(80, 'x') + "...\"");
    EXPECT_EQ(clipped(std::string(1000, '\x7f')).size(), size_t(4 * 80 + 3));
    EXPECT_EQ(clipped(std::string(79, 'x') + "\u00e9"), std::string(79, 'x') + "\\xc3...");
}
