//! Plugin fields: what a creator accepts, read with type, length and range checks, and written back for serialisation.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace trtllm_dspark {

//! Message names the field, what was expected and what came.
struct FieldError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

//! One attribute of a plugin: a scalar, int32 or float32. Serialised engines hold it under the same name.
struct FieldSpec {
    char const* name;
    bool is_float;
    bool required;
    double fallback;  //!< value when absent and not required
    double low;       //!< smallest accepted value
    double high;      //!< largest accepted value
};

//! The values of a plugin's fields, in the order of its specs.
class Attributes {
public:
    //! Reads `fields` against `specs`.
    //! Throws FieldError for an unknown, repeated, missing, wrongly typed, wrongly sized or out-of-range field.
    static Attributes read(std::vector<FieldSpec> const& specs, nvinfer1::PluginFieldCollection const* fields);

    std::int32_t integer(char const* name) const;
    float real(char const* name) const;
    bool has(char const* name) const noexcept { return find(name) != nullptr; }

    //! Every value as plugin fields that point into this object; valid while it lives and is not moved.
    nvinfer1::PluginFieldCollection const* serialize();

    //! `name=value` pairs, for the engine inspector.
    std::string text() const;

private:
    struct Value {
        FieldSpec spec;
        std::int32_t integer;
        float real;
    };

    Value const* find(char const* name) const noexcept;

    std::vector<Value> values_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

//! `[low, high]` of a spec as text for messages and the contract.
std::string rangeText(FieldSpec const& spec);

}  // namespace trtllm_dspark
