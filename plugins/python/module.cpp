//! Module definition, error translation and what the parts share.

#include <atomic>

#include <nanobind/stl/string.h>

#include "types.h"

namespace dspark::python {

namespace {

std::atomic<host::Kernels const*> g_kernels{host::kernelsOf(host::bestLevel())};

nb::object errorClass(char const* name) { return nb::module_::import_("trtllm_dspark.errors").attr(name); }

void translate(std::exception_ptr const& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (ShapeFailure const& e) {
        PyErr_SetString(errorClass("ShapeError").ptr(), e.what());
    } catch (NativeFailure const& e) {
        nb::object const error_class = errorClass("NativeError");
        nb::object const error =
            error_class(e.what(), nb::arg("op") = e.op, nb::arg("code") = static_cast<int>(e.code));
        PyErr_SetObject(error_class.ptr(), error.ptr());
    }
}

}  // namespace

host::Kernels const* kernels() { return g_kernels.load(std::memory_order_relaxed); }

host::FilterScratch* scratch() {
    static thread_local host::FilterScratch per_thread;
    return &per_thread;
}

std::shared_ptr<float> BufferPool::take(size_t count) {
    std::unique_ptr<float[]> data;
    size_t size = count;
    {
        std::lock_guard<std::mutex> const lock(mutex_);
        for (size_t i = 0; i < free_.size(); ++i) {
            if (free_[i].count < count) continue;
            size = free_[i].count;
            data = std::move(free_[i].data);
            free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
            break;
        }
        if (!data) free_.clear();  // what is left is too small for this batch: make room
    }
    if (!data) data.reset(new float[count]);
    std::weak_ptr<BufferPool> const home = weak_from_this();
    return {data.release(), [home, size](float* p) {
                std::unique_ptr<float[]> returned(p);
                if (std::shared_ptr<BufferPool> const pool = home.lock()) {
                    std::lock_guard<std::mutex> const lock(pool->mutex_);
                    if (pool->free_.size() < 2) pool->free_.push_back({size, std::move(returned)});
                }
            }};
}

Acceptance acceptanceOf(char const* op, std::string const& name) {
    if (name == "greedy") return Acceptance::kGreedy;
    if (name == "rejection") return Acceptance::kRejection;
    if (name == "coupled") return Acceptance::kCoupled;
    throw NativeFailure(op, Code::kBadArgument,
                        "acceptance must be 'greedy', 'rejection' or 'coupled', got '" + name + "'");
}

void checkRange(char const* op, char const* name, int64_t const* values, int64_t count, int64_t low, int64_t high) {
    for (int64_t i = 0; i < count; ++i) {
        if (values[i] >= low && values[i] < high) continue;
        throw NativeFailure(op, Code::kBadArgument,
                            std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(values[i]) +
                                ", expected " + std::to_string(low) + " <= value < " + std::to_string(high));
    }
}

NB_MODULE(_core, m) {
    m.doc() = "The DSpark algorithms, native (interface in _core.pyi, definition in docs/core_numerics.md).";
    nb::set_leak_warnings(false);
    nb::register_exception_translator(translate);
    m.attr("STATUS_OK") = static_cast<int>(kRowOk);
    m.attr("STATUS_NAN_LOGITS") = static_cast<int>(kRowNan);
    m.attr("STATUS_NO_FINITE_LOGITS") = static_cast<int>(kRowNoFinite);
    m.def("simd_level", [] { return std::string(kernels()->name); });
    m.def(
        "set_simd_level",
        [](std::string const& level) {
            host::SimdLevel wanted = host::SimdLevel::kPortable;
            if (level == "avx512") {
                wanted = host::SimdLevel::kAvx512;
            } else if (level == "avx2") {
                wanted = host::SimdLevel::kAvx2;
            } else if (level != "portable") {
                throw NativeFailure("set_simd_level", Code::kBadArgument,
                                    "level must be 'portable', 'avx2' or 'avx512', got '" + level + "'");
            }
            host::Kernels const* const chosen = host::kernelsOf(wanted);
            if (!chosen) {
                throw NativeFailure("set_simd_level", Code::kBadArgument, "this machine has no " + level);
            }
            g_kernels.store(chosen, std::memory_order_relaxed);
        },
        nb::arg("level"));
    registerHeads(m);
    registerDraft(m);
    registerSchedule(m);
    registerAccept(m);
    registerNumerics(m);
    registerAdaptive(m);
    registerRounds(m);
}

}  // namespace dspark::python
