// Between PyTorch and the C library: PyTorch takes a null pointer for memory, so a failure must be thrown.
//
// Built without PyTorch. The exception that PyTorch makes a torch.OutOfMemoryError of is put together from what the
// loaded libraries export: cualloc_torch_bind is told where that is, tries it once, and says whether it works. Without
// it a std::runtime_error is thrown, which becomes a RuntimeError with the same text.
//
// The hooks that may throw, or take a std::function, are here; the others are the C library's own.
#include "companion.h"

#include <cualloc.h>

#include <cxxabi.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <utility>

struct CUstream_st;

namespace {

using Destroy = void (*)(void *self);

struct Bound {
    // c10::Error::Error(SourceLocation, std::string), and whether its strings are those from before C++11.
    void *construct;
    bool old_strings;
    Destroy destroy;
    std::type_info *type;
    void *methods;
};

Bound bound;
bool is_bound = false;

// More than any version's c10::Error has.
constexpr std::size_t room = 1024;

void construct(const Bound &as, void *self, const char *text) {
    const Source from{"cualloc_torch_alloc", "cualloc", 0};
    if (as.old_strings) return construct_with_old_string(as.construct, self, from, text);
    void (*call)(void *self, Source from, std::string text);
    std::memcpy(&call, &as.construct, sizeof call);
    call(self, from, text);
}

[[noreturn]] void raise_out_of_memory(const Bound &as, const char *text) {
    void *error = abi::__cxa_allocate_exception(room);
    std::memset(error, 0, room);
    try {
        construct(as, error, text);
    } catch (...) {
        abi::__cxa_free_exception(error);
        throw std::runtime_error(text);
    }
    // A c10::OutOfMemoryError is a c10::Error of another type, and nothing else.
    std::memcpy(error, &as.methods, sizeof as.methods);
    abi::__cxa_throw(error, as.type, as.destroy);
}

[[noreturn]] void raise() {
    const char *text = cualloc_last_error();
    if (is_bound && cualloc_last_code() == CUALLOC_OUT_OF_MEMORY) raise_out_of_memory(bound, text);
    throw std::runtime_error(text);
}

// Whether a stream's requests belong to a capture, in PyTorch's words.
using Filter = std::function<bool(CUstream_st *)>;
// c10::MempoolId_t.
using PoolId = std::pair<std::uint64_t, std::uint64_t>;

// A filter that throws, since the driver refuses to say what the stream does, says no.
bool ask(void *filter, void *stream) {
    try {
        return (*static_cast<Filter *>(filter))(static_cast<CUstream_st *>(stream));
    } catch (...) {
        return false;
    }
}

void forget(void *filter) { delete static_cast<Filter *>(filter); }

} // namespace

extern "C" {

// What PyTorch's libraries export: the constructor of c10::Error (and whether it is the one with strings from before
// C++11), and the type and the table of virtual functions of c10::OutOfMemoryError. 1 if an error made of them is thrown,
// is caught and has its text, and so is used from now on. Before the first allocation, once.
std::int32_t cualloc_torch_bind(void *construct, std::int32_t old_strings, void *type, void *table) {
    constexpr const char *text = "CUDA out of memory. (a trial)";
    if (!construct || !type || !table) return 0;
    Bound tried{};
    tried.construct = construct;
    tried.old_strings = old_strings != 0;
    tried.type = static_cast<std::type_info *>(type);
    // A table begins with the offset of the object and its type; its first function destroys.
    tried.methods = static_cast<char *>(table) + 2 * sizeof(void *);
    std::memcpy(&tried.destroy, tried.methods, sizeof tried.destroy);
    try {
        raise_out_of_memory(tried, text);
    } catch (const std::exception &error) {
        is_bound = *abi::__cxa_current_exception_type() == *tried.type && typeid(error) == *tried.type &&
                   std::strstr(error.what(), text) != nullptr;
    } catch (...) {
        is_bound = false;
    }
    if (is_bound) bound = tried;
    return is_bound ? 1 : 0;
}

// cualloc_torch_alloc, and an exception instead of null.
void *cualloc_torch_alloc_or_throw(std::size_t bytes, int device, void *stream) {
    void *memory = cualloc_torch_alloc(bytes, device, stream);
    if (!memory && bytes != 0) raise();
    return memory;
}

// cualloc_torch_record_stream, and an exception if it fails: the memory could be used anew too soon.
void cualloc_torch_record_stream_or_throw(void *memory, void *stream) {
    if (cualloc_torch_record_stream(memory, stream) != CUALLOC_OK) raise();
}

// cualloc_torch_pool_begin, and an exception if it fails. The filter is kept as long as it may be asked.
void cualloc_torch_pool_begin_or_throw(int device, PoolId id, Filter when) {
    auto kept = std::make_unique<Filter>(std::move(when));
    if (cualloc_torch_pool_begin(device, {id.first, id.second}, ask, forget, kept.get()) != CUALLOC_OK) raise();
    kept.release();
}

// cualloc_torch_fraction, and an exception if it fails.
void cualloc_torch_fraction_or_throw(double fraction, int device) {
    if (cualloc_torch_fraction(fraction, device) != CUALLOC_OK) raise();
}

} // extern "C"
