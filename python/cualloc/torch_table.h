// A comparison of PyTorch's allocator class with the one that torch_allocator.cpp was compiled with.
#pragma once

#include <cxxabi.h>
#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <memory>
#include <string>

namespace {

// A table of virtual functions, as far as it and the functions are exported.
struct Table {
    void *const *slots = nullptr;
    std::size_t count = 0;

    explicit Table(const char *name, void *library) : slots(static_cast<void *const *>(dlsym(library, name))) {
        Dl_info found;
        const ElfW(Sym) *symbol = nullptr;
        void **where = reinterpret_cast<void **>(const_cast<ElfW(Sym) **>(&symbol));
        if (slots && dladdr1(slots, &found, where, RTLD_DL_SYMENT) && symbol) count = symbol->st_size / sizeof(void *);
    }

    // Name and types of a function, without its class; empty if it is not exported.
    std::string function(std::size_t at) const {
        Dl_info found;
        if (!dladdr(slots[at], &found) || !found.dli_sname || found.dli_saddr != slots[at]) return {};
        int status = 0;
        const std::unique_ptr<char, void (*)(void *)> name(
            abi::__cxa_demangle(found.dli_sname, nullptr, nullptr, &status), &std::free);
        if (status != 0) return {};
        const std::string text = name.get();
        const std::size_t colons = text.substr(0, text.find('(')).rfind("::");
        return text.substr(colons == std::string::npos ? 0 : colons + 2);
    }
};

// Compares the tables of the loaded PyTorch's class and of the subclass, given by its symbol, which has the slots of the
// class that it was compiled with. Returns the first difference; empty without one, or if PyTorch does not export its table.
std::string find_mismatch(const char *subclass) {
    Dl_info here;
    if (!dladdr(reinterpret_cast<void *>(&find_mismatch), &here)) return {};
    // Names are looked up in this library and those that it is linked with.
    const std::unique_ptr<void, int (*)(void *)> self(dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD), &dlclose);
    const Table base("_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE", self.get());
    const Table own(subclass, self.get());
    if (base.count == 0 || own.count == 0) return {};
    if (base.count != own.count) {
        return "expected a table of " + std::to_string(own.count) + " virtual functions, found " +
               std::to_string(base.count);
    }
    // Behind the offset and the type.
    for (std::size_t at = 2; at < base.count; at++) {
        const std::string expected = own.function(at), found = base.function(at);
        const bool named = !expected.empty() && !found.empty();
        if (named && expected[0] != '~' && found[0] != '~' && expected != found) {
            return "expected the virtual function " + expected + ", found " + found;
        }
    }
    return {};
}

} // namespace
