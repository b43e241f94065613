#include "fields.h"

#include <cmath>
#include <cstring>
#include <sstream>

namespace trtllm_dspark {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

std::string typeText(PluginFieldType type) {
    switch (type) {
        case PluginFieldType::kFLOAT16: return "kFLOAT16";
        case PluginFieldType::kFLOAT32: return "kFLOAT32";
        case PluginFieldType::kFLOAT64: return "kFLOAT64";
        case PluginFieldType::kINT8: return "kINT8";
        case PluginFieldType::kINT32: return "kINT32";
        case PluginFieldType::kINT64: return "kINT64";
        case PluginFieldType::kCHAR: return "kCHAR";
        default: return "type " + std::to_string(static_cast<int>(type));
    }
}

std::string numberText(double value) {
    std::ostringstream out;
    out.precision(9);
    out << value;
    return out.str();
}

std::string namesText(std::vector<FieldSpec> const& specs) {
    std::string text;
    for (FieldSpec const& spec : specs) {
        text += (text.empty() ? "" : ", ") + std::string(spec.name);
    }
    return text;
}

}  // namespace

std::string rangeText(FieldSpec const& spec) { return "[" + numberText(spec.low) + ", " + numberText(spec.high) + "]"; }

Attributes Attributes::read(std::vector<FieldSpec> const& specs, nvinfer1::PluginFieldCollection const* fields) {
    Attributes attributes;
    std::vector<bool> seen(specs.size(), false);
    for (FieldSpec const& spec : specs) {
        attributes.values_.push_back({spec, static_cast<std::int32_t>(spec.fallback), static_cast<float>(spec.fallback)});
    }
    std::int32_t const count = fields == nullptr ? 0 : fields->nbFields;
    for (std::int32_t index = 0; index < count; ++index) {
        PluginField const& field = fields->fields[index];
        std::string const name = field.name == nullptr ? "" : field.name;
        std::size_t position = 0;
        while (position < specs.size() && name != specs[position].name) {
            ++position;
        }
        if (position == specs.size()) {
            throw FieldError("field '" + name + "' is not known; expected " +
                             (specs.empty() ? "no fields" : namesText(specs)));
        }
        FieldSpec const& spec = specs[position];
        if (seen[position]) {
            throw FieldError("field '" + name + "' is given twice");
        }
        seen[position] = true;
        PluginFieldType const expected = spec.is_float ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32;
        if (field.type != expected || field.length != 1 || field.data == nullptr) {
            throw FieldError("field '" + name + "': expected " + typeText(expected) + " x 1, got " +
                             typeText(field.type) + " x " + std::to_string(field.length) +
                             (field.data == nullptr ? " without data" : ""));
        }
        Value& value = attributes.values_[position];
        if (spec.is_float) {
            std::memcpy(&value.real, field.data, sizeof(value.real));
        } else {
            std::memcpy(&value.integer, field.data, sizeof(value.integer));
        }
        double const number = spec.is_float ? static_cast<double>(value.real) : static_cast<double>(value.integer);
        // Written so that NaN fails too.
        if (!(number >= spec.low && number <= spec.high)) {
            throw FieldError("field '" + name + "': expected a value in " + rangeText(spec) + ", got " +
                             numberText(number));
        }
    }
    for (std::size_t position = 0; position < specs.size(); ++position) {
        if (specs[position].required && !seen[position]) {
            throw FieldError("field '" + std::string(specs[position].name) + "' is missing");
        }
    }
    return attributes;
}

Attributes::Value const* Attributes::find(char const* name) const noexcept {
    for (Value const& value : values_) {
        if (std::strcmp(value.spec.name, name) == 0) {
            return &value;
        }
    }
    return nullptr;
}

std::int32_t Attributes::integer(char const* name) const {
    Value const* value = find(name);
    if (value == nullptr || value->spec.is_float) {
        throw FieldError("field '" + std::string(name) + "' is not an integer field of this plugin");
    }
    return value->integer;
}

float Attributes::real(char const* name) const {
    Value const* value = find(name);
    if (value == nullptr || !value->spec.is_float) {
        throw FieldError("field '" + std::string(name) + "' is not a float field of this plugin");
    }
    return value->real;
}

nvinfer1::PluginFieldCollection const* Attributes::serialize() {
    fields_.clear();
    for (Value const& value : values_) {
        if (value.spec.is_float) {
            fields_.emplace_back(value.spec.name, &value.real, PluginFieldType::kFLOAT32, 1);
        } else {
            fields_.emplace_back(value.spec.name, &value.integer, PluginFieldType::kINT32, 1);
        }
    }
    collection_.nbFields = static_cast<std::int32_t>(fields_.size());
    collection_.fields = fields_.data();
    return &collection_;
}

std::string Attributes::text() const {
    std::string text;
    for (Value const& value : values_) {
        text += (text.empty() ? "" : " ") + std::string(value.spec.name) + "=";
        text += value.spec.is_float ? numberText(static_cast<double>(value.real)) : std::to_string(value.integer);
    }
    return text;
}

}  // namespace trtllm_dspark
