//! What a plugin's tensors must look like: names, symbolic shapes and types, as data.
//!
//! From one table follow the accepted type combinations, the output shapes and types, the shape checks before every
//! launch, the error messages, and the text whose hash identifies the contract between engine and plugin library.
#pragma once

#include "fields.h"

#include <NvInferRuntime.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace trtllm_dspark {

//! `(symbol + plus) * (symbol2 + plus2)`; a null symbol stands for the number alone, a null second factor for 1.
struct DimSpec {
    char const* symbol;
    std::int32_t plus = 0;
    char const* symbol2 = nullptr;
    std::int32_t plus2 = 0;
};

//! A tensor's type: one fixed type, or any of a set shared by all tensors of the same group letter.
struct TypeSpec {
    std::vector<nvinfer1::DataType> allowed;
    char group = 0;
};

//! Condition on an integer field: bit min(value, 31) of `values` is set.
struct When {
    char const* field;
    std::uint32_t values;
};
constexpr std::uint32_t kNonZero = ~std::uint32_t{1};

//! One input or output; present when all its conditions hold.
struct TensorSpec {
    char const* name;
    std::vector<DimSpec> dims;
    TypeSpec type;
    std::vector<When> when = {};
    char const* aliases = nullptr;  //!< name of the input whose memory this output shares
};

//! Values of the symbols of a signature. Fixed size: launching a plugin does not touch the heap.
class Symbols {
public:
    std::int64_t const* find(char const* name) const noexcept;
    //! Returns false when `name` already has another value.
    bool bind(char const* name, std::int64_t value) noexcept;
    //! Throws FieldError when `name` has no value.
    std::int64_t operator[](char const* name) const;

private:
    struct Entry {
        char const* name;
        std::int64_t value;
    };
    std::array<Entry, 24> entries_{};
    std::size_t count_ = 0;
};

//! The tensors that are present under given attributes.
struct Signature {
    std::vector<TensorSpec> inputs;
    std::vector<TensorSpec> outputs;
};

//! Thrown when tensors do not fit the signature; the message names the tensor.
struct SignatureError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

Signature presentTensors(std::vector<TensorSpec> const& inputs, std::vector<TensorSpec> const& outputs,
                         Attributes const& attributes);

//! Binds every symbol from the inputs' dims and checks each dim that is known (-1: not yet known).
//! Symbols that name an integer field take its value. Throws SignatureError.
Symbols bindSymbols(Signature const& signature, Attributes const& attributes, nvinfer1::Dims const* const* inputs,
                    std::int32_t numInputs);

//! A dim's value. Throws SignatureError when one of its symbols is unknown.
std::int64_t evaluate(DimSpec const& dim, Symbols const& symbols);

std::string dimText(DimSpec const& dim);
std::string whenText(When const& when);
std::string typeName(nvinfer1::DataType type);
std::string typesText(TypeSpec const& type);

}  // namespace trtllm_dspark
