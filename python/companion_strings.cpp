// Errors of a PyTorch whose strings are those from before C++11 (its wheels up to 2.6): compiled with
// _GLIBCXX_USE_CXX11_ABI=0, beside companion.cpp, which is not.
#include "companion.h"

#include <cstring>
#include <string>

void construct_with_old_string(void *construct, void *self, Source from, const char *text) {
    void (*call)(void *self, Source from, std::string text);
    std::memcpy(&call, &construct, sizeof call);
    call(self, from, text);
}
