// Common to all tests: doctest under names that do not clash with kernels/check.h, and small
// helpers.
#pragma once
#define DOCTEST_CONFIG_NO_SHORT_MACRO_NAMES
#include "doctest/doctest.h"

#define TEST_CASE DOCTEST_TEST_CASE
#define SUBCASE DOCTEST_SUBCASE
#define EXPECT DOCTEST_CHECK
#define EXPECT_EQ DOCTEST_CHECK_EQ
#define EXPECT_THROWS_AS DOCTEST_CHECK_THROWS_AS
#define REQUIRE_TRUE DOCTEST_REQUIRE
#define FAIL_TEST DOCTEST_FAIL
#define CAPTURE DOCTEST_CAPTURE
#define INFO DOCTEST_INFO
#define MESSAGE DOCTEST_MESSAGE
