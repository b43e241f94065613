#include "log.h"

#include <atomic>
#include <cstdio>
#include <cstring>

namespace trtllm_dspark {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> g_finder{nullptr};
thread_local char t_last_error[1024] = "";

}  // namespace

void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept { g_finder.store(finder); }

void logError(std::string const& message) noexcept {
    std::snprintf(t_last_error, sizeof(t_last_error), "%s", message.c_str());
    nvinfer1::ILogger* logger = nullptr;
    if (nvinfer1::ILoggerFinder* finder = g_finder.load()) {
        try {
            logger = finder->findLogger();
        } catch (...) {
            logger = nullptr;
        }
    }
    if (logger != nullptr) {
        logger->log(nvinfer1::ILogger::Severity::kERROR, t_last_error);
    } else {
        std::fprintf(stderr, "trtllm_dspark plugins: %s\n", t_last_error);
    }
}

char const* lastError() noexcept { return t_last_error; }

}  // namespace trtllm_dspark
