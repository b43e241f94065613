//! Keeps a secret off a command line: before main(), "{file:PATH}" in an argument of tritonserver becomes the file's text.
//! tritonserver takes its control key from its arguments only, and every user of a machine can read those (ps).
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <unistd.h>

namespace {

constexpr char kOpen[] = "{file:";

//! Whether this process is a tritonserver: a shell script of that name starts the real one with the same arguments.
bool isTritonserver() {
    char path[PATH_MAX];
    ssize_t const length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length <= 0) return false;
    path[length] = '\0';
    char const* const slash = std::strrchr(path, '/');
    return slash != nullptr && std::strcmp(slash + 1, "tritonserver") == 0;
}

[[noreturn]] void fail(std::string const& path) {
    std::fprintf(stderr, "trtllm-dspark: cannot read %s\n", path.c_str());
    _exit(4);
}

std::string contents(std::string const& path) {
    std::FILE* const file = std::fopen(path.c_str(), "r");
    if (file == nullptr) fail(path);
    char buffer[4096];
    std::size_t const length = std::fread(buffer, 1, sizeof buffer, file);
    std::fclose(file);
    if (length == 0) fail(path);
    return std::string(buffer, length);
}

//! glibc hands main's arguments to constructors, and main gets the same array of pointers afterwards.
__attribute__((constructor)) void replaceArguments(int argc, char** argv, char**) {
    if (!isTritonserver()) return;
    unsetenv("LD_PRELOAD");  // not for its children
    for (int i = 1; i < argc; ++i) {
        char const* const argument = argv[i];
        char const* const open = std::strstr(argument, kOpen);
        char const* const close = open == nullptr ? nullptr : std::strchr(open, '}');
        if (close == nullptr) continue;
        std::string const path(open + std::strlen(kOpen), close);
        std::string const text = std::string(argument, open) + contents(path) + (close + 1);
        argv[i] = strdup(text.c_str());  // lives as long as the process
    }
}

}  // namespace
