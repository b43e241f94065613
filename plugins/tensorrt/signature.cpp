#include "signature.h"

#include <cstring>

namespace trtllm_dspark {
namespace {

std::string factorText(char const* symbol, std::int32_t plus) {
    if (symbol == nullptr) {
        return std::to_string(plus);
    }
    return plus == 0 ? std::string(symbol) : std::string(symbol) + "+" + std::to_string(plus);
}

std::int64_t factorValue(char const* symbol, std::int32_t plus, Symbols const& symbols) {
    return symbol == nullptr ? plus : symbols[symbol] + plus;
}

bool isPlainSymbol(DimSpec const& dim) { return dim.symbol != nullptr && dim.plus == 0 && dim.symbol2 == nullptr; }

bool isPresent(TensorSpec const& spec, Attributes const& attributes) {
    for (When const& when : spec.when) {
        std::int32_t const value = attributes.integer(when.field);
        if ((when.values >> (value < 31 ? value : 31) & 1u) == 0) {
            return false;
        }
    }
    return true;
}

}  // namespace

std::int64_t const* Symbols::find(char const* name) const noexcept {
    for (std::size_t index = 0; index < count_; ++index) {
        if (std::strcmp(entries_[index].name, name) == 0) {
            return &entries_[index].value;
        }
    }
    return nullptr;
}

bool Symbols::bind(char const* name, std::int64_t value) noexcept {
    if (std::int64_t const* known = find(name)) {
        return *known == value;
    }
    if (count_ == entries_.size()) {
        return false;
    }
    entries_[count_++] = {name, value};
    return true;
}

std::int64_t Symbols::operator[](char const* name) const {
    std::int64_t const* value = find(name);
    if (value == nullptr) {
        throw SignatureError("dimension '" + std::string(name) + "' is not known");
    }
    return *value;
}

Signature presentTensors(std::vector<TensorSpec> const& inputs, std::vector<TensorSpec> const& outputs,
                         Attributes const& attributes) {
    Signature signature;
    for (TensorSpec const& spec : inputs) {
        if (isPresent(spec, attributes)) {
            signature.inputs.push_back(spec);
        }
    }
    for (TensorSpec const& spec : outputs) {
        if (isPresent(spec, attributes)) {
            signature.outputs.push_back(spec);
        }
    }
    return signature;
}

Symbols bindSymbols(Signature const& signature, Attributes const& attributes, nvinfer1::Dims const* const* inputs,
                    std::int32_t numInputs) {
    if (numInputs != static_cast<std::int32_t>(signature.inputs.size())) {
        std::string names;
        for (TensorSpec const& spec : signature.inputs) {
            names += (names.empty() ? "" : ", ") + std::string(spec.name);
        }
        throw SignatureError("expected " + std::to_string(signature.inputs.size()) + " inputs (" + names + "), got " +
                             std::to_string(numInputs));
    }
    Symbols symbols;
    for (std::int32_t input = 0; input < numInputs; ++input) {
        TensorSpec const& spec = signature.inputs[static_cast<std::size_t>(input)];
        nvinfer1::Dims const& dims = *inputs[input];
        if (dims.nbDims != static_cast<std::int32_t>(spec.dims.size())) {
            throw SignatureError(std::string(spec.name) + ": expected " + std::to_string(spec.dims.size()) +
                                 " dimensions, got " + std::to_string(dims.nbDims));
        }
        for (std::size_t axis = 0; axis < spec.dims.size(); ++axis) {
            DimSpec const& dim = spec.dims[axis];
            if (!isPlainSymbol(dim) || dims.d[axis] < 0) {
                continue;
            }
            bool const isField = attributes.has(dim.symbol);
            bool const fits = isField ? dims.d[axis] == attributes.integer(dim.symbol)
                                      : symbols.bind(dim.symbol, dims.d[axis]);
            if (!fits) {
                std::int64_t const expected = isField ? attributes.integer(dim.symbol) : symbols[dim.symbol];
                throw SignatureError(std::string(spec.name) + ": dimension " + std::to_string(axis) + " is " +
                                     dim.symbol + " = " + std::to_string(expected) + ", got " +
                                     std::to_string(dims.d[axis]));
            }
        }
    }
    for (std::vector<TensorSpec> const* specs : {&signature.inputs, &signature.outputs}) {
        for (TensorSpec const& spec : *specs) {
            for (DimSpec const& dim : spec.dims) {
                for (char const* symbol : {dim.symbol, dim.symbol2}) {
                    if (symbol != nullptr && attributes.has(symbol)) {
                        symbols.bind(symbol, attributes.integer(symbol));
                    }
                }
            }
        }
    }
    for (std::int32_t input = 0; input < numInputs; ++input) {
        TensorSpec const& spec = signature.inputs[static_cast<std::size_t>(input)];
        for (std::size_t axis = 0; axis < spec.dims.size(); ++axis) {
            DimSpec const& dim = spec.dims[axis];
            std::int64_t const got = inputs[input]->d[axis];
            bool const known = (dim.symbol == nullptr || symbols.find(dim.symbol) != nullptr) &&
                               (dim.symbol2 == nullptr || symbols.find(dim.symbol2) != nullptr);
            if (got >= 0 && known && !isPlainSymbol(dim) && got != evaluate(dim, symbols)) {
                throw SignatureError(std::string(spec.name) + ": dimension " + std::to_string(axis) + " is " +
                                     dimText(dim) + " = " + std::to_string(evaluate(dim, symbols)) + ", got " +
                                     std::to_string(got));
            }
        }
    }
    return symbols;
}

std::int64_t evaluate(DimSpec const& dim, Symbols const& symbols) {
    std::int64_t const first = factorValue(dim.symbol, dim.plus, symbols);
    return dim.symbol2 == nullptr ? first : first * factorValue(dim.symbol2, dim.plus2, symbols);
}

std::string dimText(DimSpec const& dim) {
    std::string const first = factorText(dim.symbol, dim.plus);
    return dim.symbol2 == nullptr ? first : "(" + first + ")*(" + factorText(dim.symbol2, dim.plus2) + ")";
}

std::string whenText(When const& when) {
    if (when.values == kNonZero) {
        return std::string(when.field) + " is not 0";
    }
    std::string text;
    for (int value = 0; value < 32; ++value) {
        if (when.values >> value & 1u) {
            text += (text.empty() ? "" : " or ") + std::to_string(value);
        }
    }
    return std::string(when.field) + " is " + text;
}

std::string typeName(nvinfer1::DataType type) {
    switch (type) {
        case nvinfer1::DataType::kFLOAT: return "float32";
        case nvinfer1::DataType::kHALF: return "float16";
        case nvinfer1::DataType::kBF16: return "bfloat16";
        case nvinfer1::DataType::kINT8: return "int8";
        case nvinfer1::DataType::kINT32: return "int32";
        case nvinfer1::DataType::kINT64: return "int64";
        default: return "type " + std::to_string(static_cast<int>(type));
    }
}

std::string typesText(TypeSpec const& type) {
    std::string text;
    for (nvinfer1::DataType allowed : type.allowed) {
        text += (text.empty() ? "" : "|") + typeName(allowed);
    }
    return type.group == 0 ? text : text + " (same for group " + type.group + ")";
}

}  // namespace trtllm_dspark
