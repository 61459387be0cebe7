// What the parts of the companion have in common.
#ifndef CUALLOC_COMPANION_H
#define CUALLOC_COMPANION_H

#include <cstdint>

// c10::SourceLocation: where an error comes from.
struct Source {
    const char *function;
    const char *file;
    std::uint32_t line;
};

// Calls c10::Error::Error(SourceLocation, std::string), whose strings are those from before C++11.
__attribute__((visibility("hidden"))) void construct_with_old_string(void *construct, void *self, Source from,
                                                                      const char *text);

#endif
