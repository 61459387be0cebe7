// PyTorch's error for lack of memory, as its libraries export it, and a caller that catches it.
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

namespace c10 {

struct SourceLocation {
    const char *function;
    const char *file;
    std::uint32_t line;
};

class Error : public std::exception {
  public:
    Error(SourceLocation from, std::string text);
    const char *what() const noexcept override;

  private:
    std::string text;
    std::string from;
};

Error::Error(SourceLocation from, std::string text) : text(std::move(text)), from(from.function) {}

const char *Error::what() const noexcept { return text.c_str(); }

class OutOfMemoryError : public Error {
    using Error::Error;
};

} // namespace c10

extern "C" {

using Allocate = void *(*)(std::size_t, int, void *);

// 0 if memory was given, 1 for PyTorch's error, 2 for another exception; the text of either.
int fake_allocate(Allocate allocate, std::size_t bytes, int device, char *text, std::size_t room) {
    try {
        return allocate(bytes, device, nullptr) ? 0 : 3;
    } catch (const c10::OutOfMemoryError &error) {
        std::strncpy(text, error.what(), room - 1);
        return 1;
    } catch (const std::exception &error) {
        std::strncpy(text, error.what(), room - 1);
        return 2;
    }
}

// Has the compiler write the table of functions.
void fake_throw() { throw c10::OutOfMemoryError({"", "", 0}, ""); }

}
