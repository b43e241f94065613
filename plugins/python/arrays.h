#pragma once
//! Checked views of NumPy arrays and errors that become trtllm_dspark.errors exceptions.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dspark/status.h"

namespace dspark::python {

namespace nb = nanobind;

//! Becomes trtllm_dspark.errors.ShapeError.
struct ShapeFailure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

//! Becomes trtllm_dspark.errors.NativeError.
struct NativeFailure : std::runtime_error {
    NativeFailure(std::string op_name, Code status, std::string const& message)
        : std::runtime_error(op_name + ": " + message), op(std::move(op_name)), code(status) {}
    std::string op;
    Code code;
};

template <class T>
struct TypeName;
template <>
struct TypeName<float> {
    static constexpr char const* value = "float32";
};
template <>
struct TypeName<double> {
    static constexpr char const* value = "float64";
};
template <>
struct TypeName<int64_t> {
    static constexpr char const* value = "int64";
};
template <>
struct TypeName<uint64_t> {
    static constexpr char const* value = "uint64";
};
template <>
struct TypeName<uint32_t> {
    static constexpr char const* value = "uint32";
};
template <>
struct TypeName<bool> {
    static constexpr char const* value = "bool";
};
template <>
struct TypeName<int8_t> {
    static constexpr char const* value = "int8";
};

//! A dimension an argument must have; negative size = any.
struct Dim {
    char const* name;
    int64_t size;
};

inline std::string dtypeName(nb::dlpack::dtype const& dtype) {
    using Kind = nb::dlpack::dtype_code;
    std::string const bits = std::to_string(static_cast<int>(dtype.bits));
    switch (static_cast<Kind>(dtype.code)) {
        case Kind::Int: return "int" + bits;
        case Kind::UInt: return "uint" + bits;
        case Kind::Float: return "float" + bits;
        case Kind::Bool: return "bool";
        default: return "another type";
    }
}

//! Checked, C-contiguous, read-only view of at most four axes; keeps the Python object alive.
template <class T>
struct View {
    nb::object owner;
    T const* data = nullptr;
    std::array<int64_t, 4> shape = {1, 1, 1, 1};
    explicit operator bool() const { return data != nullptr; }
    int64_t size(size_t axis) const { return shape[axis]; }
};

[[noreturn]] inline void failShape(char const* op, char const* name, std::string const& expected,
                                   std::string const& got) {
    throw ShapeFailure(std::string(op) + ": " + name + ": expected " + expected + ", got " + got);
}

inline std::string describe(std::initializer_list<Dim> dims, char const* type) {
    std::string text = "[";
    for (Dim const& dim : dims) {
        if (text.size() > 1) text += ", ";
        text += dim.name;
        if (dim.size >= 0) text += "=" + std::to_string(dim.size);
    }
    return text + "] " + type;
}

inline std::string describe(nb::ndarray<nb::ro> const& array) {
    std::string text = "[";
    for (size_t axis = 0; axis < array.ndim(); ++axis) {
        text += (axis ? ", " : "") + std::to_string(array.shape(axis));
    }
    return text + "] " + dtypeName(array.dtype());
}

inline bool fits(nb::ndarray<nb::ro> const& array, nb::dlpack::dtype dtype, std::initializer_list<Dim> dims) {
    if (array.ndim() != dims.size() || array.dtype() != dtype || array.device_type() != nb::device::cpu::value) return false;
    size_t axis = 0;
    for (Dim const& dim : dims) {
        if (dim.size >= 0 && dim.size != static_cast<int64_t>(array.shape(axis))) return false;
        ++axis;
    }
    return true;
}

//! Check an argument against dtype and shape; what is said about a wrong one costs a right one nothing.
template <class T>
View<T> view(char const* op, char const* name, nb::handle object, std::initializer_list<Dim> dims) {
    static T const empty{};
    nb::ndarray<nb::ro> array;
    if (!nb::ndarray_check(object) || !nb::try_cast(object, array, false)) {
        failShape(op, name, describe(dims, TypeName<T>::value), nb::type_name(object.type()).c_str());
    }
    if (!fits(array, nb::dtype<T>(), dims)) {
        failShape(op, name, describe(dims, TypeName<T>::value), describe(array));
    }
    View<T> result;
    int64_t stride = 1;
    bool contiguous = true;
    for (size_t axis = array.ndim(); axis-- > 0;) {
        result.shape[axis] = static_cast<int64_t>(array.shape(axis));
        if (result.shape[axis] > 1 && array.stride(axis) != stride) contiguous = false;
        stride *= result.shape[axis];
    }
    if (!contiguous && stride != 0) {
        failShape(op, name, describe(dims, TypeName<T>::value) + " C-contiguous",
                  describe(array) + " with gaps (use numpy.ascontiguousarray)");
    }
    result.owner = nb::borrow(object);
    result.data = stride == 0 ? &empty : static_cast<T const*>(array.data());
    return result;
}

//! As view, for an argument that may be None.
template <class T>
View<T> optionalView(char const* op, char const* name, nb::handle object, std::initializer_list<Dim> dims) {
    return object.is_none() ? View<T>{} : view<T>(op, name, object, dims);
}

//! New NumPy array that owns `values`.
template <class T>
nb::object toNumpy(std::vector<T> values, std::initializer_list<size_t> shape) {
    auto* const owned = new std::vector<T>(std::move(values));
    nb::capsule const owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    static T empty{};
    T* const data = owned->empty() ? &empty : owned->data();
    return nb::cast(nb::ndarray<nb::numpy, T>(data, shape.size(), shape.begin(), owner));
}

void registerAdaptive(nb::module_& m);
void registerHeads(nb::module_& m);
void registerDraft(nb::module_& m);
void registerSchedule(nb::module_& m);
void registerAccept(nb::module_& m);
void registerNumerics(nb::module_& m);
void registerRounds(nb::module_& m);

}  // namespace dspark::python
