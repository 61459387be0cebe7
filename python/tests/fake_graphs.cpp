// What PyTorch passes when a capture begins, as its libraries do: a pair and a std::function by value.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <utility>

struct CUstream_st;

namespace {

using Stream = CUstream_st *;
using Filter = std::function<bool(Stream)>;
using PoolId = std::pair<std::uint64_t, std::uint64_t>;
using Begin = void (*)(int device, PoolId id, Filter filter);
using Info = int (*)(Stream stream, int *status, std::uint64_t *id, void *, void *, void *);

Info info = nullptr;
std::atomic<int> filters{0};

// Counts the filters that there are, which have one each.
struct Token {
    Token() { filters++; }
    Token(const Token &) { filters++; }
    ~Token() { filters--; }
};

struct Graph {
    std::uint64_t capture = UINT64_MAX;
    bool alive = true;
};

} // namespace

extern "C" {

void fake_driver(Info of) { info = of; }

int fake_filters() { return filters; }

Graph *fake_graph_new() { return new Graph; }

// Stays, so that a filter which is asked later is found out.
void fake_graph_delete(Graph *graph) { graph->alive = false; }

// 0, or 1 and the text of an exception.
int fake_graph_begin(Graph *graph, Begin begin, int device, std::uint64_t first, std::uint64_t second, char *text,
                     std::size_t room) {
    Token token;
    try {
        begin(device, PoolId(first, second), [graph, token](Stream stream) {
            int status = 0;
            std::uint64_t id = 0;
            if (!graph->alive) std::terminate();
            if (info(stream, &status, &id, nullptr, nullptr, nullptr) != 0) throw std::runtime_error("cannot be asked");
            return status == 1 && id == graph->capture;
        });
    } catch (const std::exception &error) {
        std::strncpy(text, error.what(), room - 1);
        return 1;
    }
    return 0;
}

int fake_graph_captures(Graph *graph, Stream stream) {
    int status = 0;
    return info(stream, &status, &graph->capture, nullptr, nullptr, nullptr);
}

}
