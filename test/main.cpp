#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
// The project's CHECK is not doctest's: tests use the DOCTEST_ names' short forms from test/test.h.
#define DOCTEST_CONFIG_NO_SHORT_MACRO_NAMES
#include "doctest/doctest.h"
