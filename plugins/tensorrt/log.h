//! Where messages go: TensorRT's logger when it handed one over, and a per-thread copy of the last error.
#pragma once

#include <NvInferRuntime.h>

#include <exception>
#include <new>
#include <string>

namespace trtllm_dspark {

void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept;

//! Logs an error; without a logger it goes to standard error, so that a refusal is never silent.
void logError(std::string const& message) noexcept;

//! Text of this thread's last error; empty when there was none.
char const* lastError() noexcept;

//! Runs `body`; an exception is logged as "<who>: <what>" and becomes `failure`. No exception leaves the library.
template <class Result, class Body>
Result guarded(char const* who, Result failure, Body&& body) noexcept {
    try {
        return body();
    } catch (std::exception const& error) {
        try {
            logError(std::string(who) + ": " + error.what());
        } catch (...) {
        }
    } catch (...) {
        logError(who);
    }
    return failure;
}

}  // namespace trtllm_dspark
